// Computes keys of a merged table from a feature's ids: key = prefix | id. An id has at most
// `id_bits` bits; the prefix is the number of the feature's table and takes the bits above.
//
// MergeKeys takes numbers that are ids. One pass without a branch writes every key, whether its id
// fits or not, and ors the ids together. A bit above the limit is set in the result if and only if
// some id has it; a negative id, sign-extended, has all of them. So one test at the end of the
// batch serves for all its ids, the loop vectorizes, and only a batch that is refused is searched
// for its first offender.
//
// HashKeys takes any 64-bit numbers, and folds them into ids first.
//
// gpu/merge_keys_abi.h does the same on a GPU.

#ifndef GMETA_OPS_MERGE_KEYS_MERGE_KEYS_H_
#define GMETA_OPS_MERGE_KEYS_MERGE_KEYS_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/host_device.h"
#include "ops/common/splitmix.h"

namespace gmeta {

// Folds 64 bits into `bits`, 1 to 63. A number of so few bits is its own id. The id of any other is
// the low bits of its SplitMix64, so numbers of any structure share ids as random ones do.
GMETA_HOST_DEVICE inline int64_t MixFold(int64_t number, int bits) {
  const uint64_t x = static_cast<uint64_t>(number), most = (uint64_t{1} << bits) - 1;
  return static_cast<int64_t>(x <= most ? x : SplitMix64(x) & most);
}

// The fold of tables that were made before MixFold: the upper bits are xored onto the low ones.
// Numbers that count in both share ids.
GMETA_HOST_DEVICE inline int64_t XorFold(int64_t number, int bits) {
  const uint64_t x = static_cast<uint64_t>(number), most = (uint64_t{1} << bits) - 1;
  return static_cast<int64_t>((x ^ (x >> bits)) & most);
}

// Writes the keys of n numbers. `fold` maps a number to an id that fits below the prefix.
template <class Id, class Fold>
void HashKeys(const Id* numbers, size_t n, int64_t prefix, Fold fold, int64_t* keys) {
  for (size_t i = 0; i < n; ++i) keys[i] = prefix | fold(numbers[i]);
}

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
