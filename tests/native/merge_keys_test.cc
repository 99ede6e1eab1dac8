#include "ops/merge_keys/merge_keys.h"

#include <algorithm>
#include <cstddef>
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

  // A number of few bits is its own id; others are mixed. SplitMix64 of 0 is the published one.
  CHECK_EQ(gmeta::SplitMix64(0), uint64_t{0xe220a8397b1dcdaf});
  const int64_t most = (int64_t{1} << 56) - 1;
  for (const int64_t id : {int64_t{0}, int64_t{7}, most}) CHECK_EQ(gmeta::MixFold(id, 56), id);
  CHECK_EQ(gmeta::MixFold(most + 1, 56), int64_t{66877949675812449});
  CHECK_EQ(gmeta::MixFold(-1, 56), int64_t{61204826320874528});
  CHECK_EQ(gmeta::MixFold(INT64_MIN, 56), int64_t{8656051631682523});
  CHECK_EQ(gmeta::XorFold(int64_t{5} << 58 | 6, 58), int64_t{3});

  // Ids that count in their upper and in their lower bits: the one fold keeps all of them apart.
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot < 1024; ++slot) {
    for (int64_t n = 0; n < 64; ++n) slots.push_back(slot << 54 | n);
  }
  const auto distinct = [&](auto fold) {
    keys.resize(slots.size());
    gmeta::HashKeys(slots.data(), slots.size(), int64_t{1} << 58, fold, keys.data());
    for (const int64_t key : keys) CHECK_EQ(key >> 58, int64_t{1});
    std::sort(keys.begin(), keys.end());
    return std::unique(keys.begin(), keys.end()) - keys.begin();
  };
  CHECK_EQ(distinct([](int64_t x) { return gmeta::MixFold(x, 56); }), std::ptrdiff_t{65536});
  CHECK_EQ(distinct([](int64_t x) { return gmeta::XorFold(x, 58); }), std::ptrdiff_t{1024});

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
