// Merged keys on an emulated GPU (emulated_gpu/emulation.h): the CUDA source as it stands, by its C
// interface, against the CPU's functions.

#include <cstdint>
#include <random>
#include <vector>

#include "device_memory.h"
#include "ops/common/gpu/cuda_error.cu"
#include "ops/merge_keys/gpu/merge_keys.cu"
#include "tests/native/check.h"

namespace {

using std::vector;

// Features of int64 and int32 ids, hashed and not, some without ids; `bad` ids don't fit.
void CheckMerge(int count, int most, bool mix, int bad, uint32_t seed) {
  constexpr int kIdBits = 57, kMixBits = 54;
  emulated::settings.seed = seed;
  std::mt19937_64 random(seed);
  vector<vector<int64_t>> wide(static_cast<size_t>(count));
  vector<vector<int32_t>> narrow(static_cast<size_t>(count));
  vector<gmeta_gpu_feature_ids> features;
  vector<int64_t> expected;
  for (int f = 0; f < count; ++f) {
    const int64_t prefix = static_cast<int64_t>(f) << kIdBits;
    const bool is_wide = f % 3 != 1, hashed = f % 2 == 1;
    const size_t n = random() % static_cast<size_t>(most + 1);
    for (size_t i = 0; i < n; ++i) {
      const int64_t id = static_cast<int64_t>(is_wide ? random() >> (hashed ? 0 : 64 - kIdBits)
                                                      : random() & 0x7fffffff);
      if (is_wide) wide[static_cast<size_t>(f)].push_back(id);
      if (!is_wide) narrow[static_cast<size_t>(f)].push_back(static_cast<int32_t>(id));
      expected.push_back(prefix | (!hashed ? id
                                   : mix   ? gmeta::MixFold(id, kMixBits)
                                           : gmeta::XorFold(id, kIdBits)));
    }
    const void* const ids = is_wide ? static_cast<const void*>(wide[static_cast<size_t>(f)].data())
                                    : narrow[static_cast<size_t>(f)].data();
    features.push_back({ids, static_cast<int64_t>(n), prefix, is_wide, hashed});
  }
  int64_t first_bad = -1;
  for (; bad > 0; --bad) {  // in features that aren't hashed
    int64_t start = 0;
    for (size_t f = 0; f < features.size(); start += features[f++].n) {
      if (features[f].hashed != 0 || features[f].wide == 0 || features[f].n == 0) continue;
      const int64_t place = static_cast<int64_t>(random() % static_cast<size_t>(features[f].n));
      wide[f][static_cast<size_t>(place)] = bad % 2 == 0 ? -1 : int64_t{1} << kIdBits;
      if (first_bad < 0 || start + place < first_bad) first_bad = start + place;
    }
  }
  vector<int64_t> keys(expected.size() + 1, -7);
  int64_t found = 5;
  CHECK_EQ(gmeta_gpu_merge_keys(features.data(), count, kIdBits, mix, kMixBits, keys.data(), &found,
                                nullptr),
           0);
  CHECK_EQ(found, first_bad);
  CHECK_EQ(keys.back(), int64_t{-7});
  if (first_bad >= 0) return;
  for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(keys[i], expected[i]);
}

}  // namespace

int main() {
  CheckMerge(1, 0, true, 0, 1);
  CheckMerge(7, 600, true, 0, 2);
  CheckMerge(6, 40, false, 0, 3);
  CheckMerge(130, 9, true, 0, 4);  // more than a launch takes
  CheckMerge(9, 300, true, 2, 5);
}
