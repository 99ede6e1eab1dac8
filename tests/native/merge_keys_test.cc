#include "ops/merge_keys/merge_keys.h"

#include <cstdint>
#include <random>
#include <vector>

#include "tests/native/check.h"

namespace {

template <class Id>
size_t Merge(const std::vector<Id>& ids, int64_t prefix, int id_bits, std::vector<int64_t>* keys) {
  keys->assign(ids.size(), -7);
  return gmeta::MergeKeys(ids.data(), ids.size(), prefix, id_bits, keys->data());
}

}  // namespace

int main() {
  std::vector<int64_t> keys;
  CHECK_EQ(Merge<int64_t>({}, 0, 62, &keys), size_t{0});

  // Both ends of the range, with and without a prefix.
  for (const int id_bits : {1, 31, 61, 62, 63}) {
    const int64_t last = static_cast<int64_t>((uint64_t{1} << id_bits) - 1);
    const int64_t prefix = id_bits == 63 ? 0 : int64_t{1} << id_bits;
    CHECK_EQ(Merge<int64_t>({0, last, 1, last}, prefix, id_bits, &keys), size_t{4});
    CHECK_EQ(keys[0], prefix);
    CHECK_EQ(keys[1], prefix + last);
    CHECK_EQ(Merge<int64_t>({last, 0, -1, 3, -1}, prefix, id_bits, &keys), size_t{2});
    CHECK_EQ(Merge<int64_t>({INT64_MIN}, prefix, id_bits, &keys), size_t{0});
    if (id_bits < 63) CHECK_EQ(Merge<int64_t>({last, last + 1}, prefix, id_bits, &keys), size_t{1});
  }

  // A negative 32-bit id is as negative as a 64-bit one.
  CHECK_EQ(Merge<int32_t>({INT32_MAX, INT32_MIN}, int64_t{1} << 61, 61, &keys), size_t{1});
  CHECK_EQ(Merge<int32_t>({INT32_MAX, 5}, int64_t{1} << 61, 61, &keys), size_t{2});
  CHECK_EQ(keys[0], (int64_t{1} << 61) + INT32_MAX);

  // The first offender, wherever it stands.
  std::mt19937_64 random(5);
  for (const size_t n : {1, 3, 16, 33, 1000}) {
    std::vector<int64_t> ids(n);
    for (int64_t& id : ids) id = static_cast<int64_t>(random() >> 4);
    CHECK_EQ(Merge(ids, int64_t{5} << 60, 60, &keys), n);
    for (size_t i = 0; i < n; ++i) CHECK_EQ(keys[i], (int64_t{5} << 60) + ids[i]);
    const size_t bad = random() % n;
    ids[bad] = int64_t{1} << 60;
    ids[n - 1] |= int64_t{1} << 62;
    CHECK_EQ(Merge(ids, 0, 60, &keys), bad);
  }
}
