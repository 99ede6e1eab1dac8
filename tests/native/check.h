// What the native tests assert with: a failure says where and what, and ends the test.

#ifndef GMETA_TESTS_NATIVE_CHECK_H_
#define GMETA_TESTS_NATIVE_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <sstream>

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

#define CHECK_EQ(a, b)                                                                           \
  do {                                                                                           \
    const auto& check_a = (a);                                                                   \
    const auto& check_b = (b);                                                                   \
    if (!(check_a == check_b)) {                                                                 \
      std::ostringstream text;                                                                   \
      text << check_a << " vs " << check_b;                                                      \
      std::fprintf(stderr, "%s:%d: CHECK_EQ failed: %s == %s: %s\n", __FILE__, __LINE__, #a, #b, \
                   text.str().c_str());                                                          \
      std::abort();                                                                              \
    }                                                                                            \
  } while (false)

#endif  // GMETA_TESTS_NATIVE_CHECK_H_
