// Distinct keys, their owners and sums of segments on an emulated GPU (emulated_gpu/emulation.h):
// the CUDA sources as they stand, by their C interface, against the CPU's code and plain loops.

#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "device_memory.h"
#include "ops/common/gpu/cuda_error.cu"
#include "ops/unique/gpu/unique.cu"
#include "ops/unique/host/by_owner.h"
#include "ops/unique/host/unique.h"
#include "tests/native/check.h"

namespace {

using std::vector;

// `distinct` keys at most, of which few have most of the places.
vector<int64_t> Ids(size_t n, int64_t distinct, std::mt19937_64* random) {
  vector<int64_t> ids(n);
  for (int64_t& id : ids) {
    const int64_t low = static_cast<int64_t>((*random)() % static_cast<uint64_t>(distinct));
    id = static_cast<int64_t>(gmeta::MurmurHash3(low * low / distinct));
  }
  return ids;
}

void CheckUnique(const vector<int64_t>& ids, int32_t ranks, uint32_t seed) {
  emulated::settings.seed = seed;
  const int64_t n = static_cast<int64_t>(ids.size());
  vector<int64_t> keys(ids.size(), -1), expected(ids.size());
  vector<int32_t> inverse(ids.size(), -1), expected_inverse(ids.size());
  vector<int32_t> counts(static_cast<size_t>(ranks), -1), expected_counts(counts.size());
  int32_t count = -1;
  const emulated::Workspace room(gmeta_gpu_unique_workspace(n, ranks));
  CHECK_EQ(ranks == 0
               ? gmeta_gpu_unique(ids.data(), n, keys.data(), inverse.data(), &count, room.data,
                                  room.bytes, nullptr)
               : gmeta_gpu_unique_by_owner(ids.data(), n, ranks, keys.data(), inverse.data(),
                                           counts.data(), &count, room.data, room.bytes, nullptr),
           0);
  gmeta::UniqueFinder finder;
  const size_t found = finder.Find(
      ids.size(), [&](size_t i) { return ids[i]; }, expected.data(), expected_inverse.data());
  if (ranks > 0) {
    gmeta::OrderByOwner(counts.size(), expected.data(), found, expected_inverse.data(), ids.size(),
                        expected_counts.data());
  }
  CHECK_EQ(static_cast<size_t>(count), found);
  keys.resize(found), expected.resize(found);
  CHECK(keys == expected);
  CHECK(inverse == expected_inverse);
  CHECK(counts == expected_counts);
}

// All ids by owner, against the CPU's order of as many keys.
void CheckOrder(const vector<int64_t>& ids, int32_t ranks, uint32_t seed) {
  emulated::settings.seed = seed;
  const int64_t n = static_cast<int64_t>(ids.size());
  vector<int64_t> keys(ids.size(), -1), expected = ids;
  vector<int32_t> inverse(ids.size(), -1), expected_inverse(ids.size());
  vector<int32_t> counts(static_cast<size_t>(ranks), -1), expected_counts(counts.size());
  std::iota(expected_inverse.begin(), expected_inverse.end(), 0);
  const emulated::Workspace room(gmeta_gpu_order_by_owner_workspace(n, ranks));
  CHECK_EQ(gmeta_gpu_order_by_owner(ids.data(), n, ranks, keys.data(), inverse.data(),
                                    counts.data(), room.data, room.bytes, nullptr),
           0);
  gmeta::OrderByOwner(counts.size(), expected.data(), expected.size(), expected_inverse.data(),
                      expected_inverse.size(), expected_counts.data());
  CHECK(keys == expected);
  CHECK(inverse == expected_inverse);
  CHECK(counts == expected_counts);
  for (size_t i = 0; i < ids.size(); ++i) CHECK_EQ(keys[inverse[i]], ids[i]);
}

void CheckRefused() {
  int64_t id = 7, key = 0;
  int32_t place, count;
  const emulated::Workspace room(gmeta_gpu_order_by_owner_workspace(1, 2));
  for (const int32_t ranks : {0, 1025}) {
    CHECK(gmeta_gpu_order_by_owner(&id, 1, ranks, &key, &place, &count, room.data, room.bytes,
                                   nullptr) != 0);
  }
  int32_t counts[2];
  CHECK(gmeta_gpu_order_by_owner(&id, 1, 2, &key, &place, counts, room.data, 16, nullptr) != 0);
  CHECK_EQ(key, 0);
}

}  // namespace

int main() {
  std::mt19937_64 random(5);
  for (const int32_t ranks : {0, 1, 3, 1024}) {
    CheckUnique({}, ranks, 1);
    CheckUnique({INT64_MIN, -1, 0, INT64_MAX, -1, INT64_MIN}, ranks, 2);
    CheckUnique(Ids(3000, 700, &random), ranks, 3);  // of two stretches
    CheckUnique(Ids(500, 1000000, &random), ranks, 4);
    if (ranks == 0) continue;
    CheckOrder({}, ranks, 5);
    CheckOrder({INT64_MIN, -1, 0, INT64_MAX, -1, INT64_MIN}, ranks, 6);
    CheckOrder(Ids(3000, 700, &random), ranks, 7);
    CheckOrder(Ids(1, 5, &random), ranks, 8);
  }
  CheckRefused();
}
