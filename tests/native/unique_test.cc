#include "ops/unique/host/unique.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include "ops/unique/host/parallel_unique.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

namespace {

void Compare(gmeta::UniqueFinder* finder, const std::vector<int64_t>& ids) {
  std::vector<int64_t> keys(ids.size());
  std::vector<int32_t> inverse(ids.size());
  const size_t found =
      finder->Find(ids.size(), [&](size_t i) { return ids[i]; }, keys.data(), inverse.data());
  std::unordered_map<int64_t, int32_t> model;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto [place, is_new] = model.emplace(ids[i], static_cast<int32_t>(model.size()));
    CHECK_EQ(inverse[i], place->second);
    if (is_new) CHECK_EQ(keys[place->second], ids[i]);
  }
  CHECK_EQ(found, model.size());

  std::vector<int64_t> also_keys(ids.size());
  std::vector<int32_t> also_inverse(ids.size(), -1);
  CHECK_EQ(gmeta::ParallelUnique(ids.data(), ids.size(), also_keys.data(), also_inverse.data(),
                                 Threads{3}),
           found);
  CHECK(also_inverse == inverse);
  CHECK(std::equal(also_keys.begin(), also_keys.begin() + found, keys.begin()));
}

}  // namespace

int main() {
  gmeta::UniqueFinder finder;  // one for all: what a call leaves behind must not show in the next
  Compare(&finder, {});
  Compare(&finder, {-1});
  Compare(&finder, {INT64_MIN, -1, 0, INT64_MAX, 0, -1, INT64_MIN, INT64_MAX});
  std::mt19937_64 random(3);
  for (const size_t n : {5, 15, 16, 17, 100, 1000, 70000}) {
    for (const uint64_t distinct : {uint64_t{1}, uint64_t{7}, uint64_t{n}, uint64_t{100} * n}) {
      std::vector<int64_t> ids(n);
      for (int64_t& id : ids) id = static_cast<int64_t>(random() % distinct) - 3;
      Compare(&finder, ids);
    }
  }
}
