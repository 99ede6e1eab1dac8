// Computes keys of a merged table from a feature's raw ids: key = prefix | id. An id has at most
// `id_bits` bits; the prefix is the number of the feature's table and takes the bits above.
//
// One pass without a branch writes every key, whether its id fits or not, and ors the ids together.
// A bit above the limit is set in the result if and only if some id has it; a negative id,
// sign-extended, has all of them. So one test at the end of the batch serves for all its ids, the
// loop vectorizes, and only a batch that is refused is searched for its first offender.

#ifndef GMETA_OPS_MERGE_KEYS_MERGE_KEYS_H_
#define GMETA_OPS_MERGE_KEYS_MERGE_KEYS_H_

#include <cstddef>
#include <cstdint>

namespace gmeta {

// Writes n keys and returns n. If an id isn't in [0, 2^id_bits), it returns the place of the first
// such id, and the keys are meaningless. 0 <= id_bits <= 63.
template <class Id>
size_t MergeKeys(const Id* ids, size_t n, int64_t prefix, int id_bits, int64_t* keys) {
  int64_t bits = 0;
  for (size_t i = 0; i < n; ++i) {
    const int64_t id = ids[i];
    bits |= id;
    keys[i] = prefix | id;
  }
  const auto fits = [id_bits](int64_t id) { return static_cast<uint64_t>(id) >> id_bits == 0; };
  if (fits(bits)) return n;
  size_t first = 0;
  while (fits(ids[first])) ++first;
  return first;
}

}  // namespace gmeta

#endif  // GMETA_OPS_MERGE_KEYS_MERGE_KEYS_H_
