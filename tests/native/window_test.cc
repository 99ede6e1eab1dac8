#include <algorithm>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "ops/window/clusters.h"
#include "ops/window/collected_keys.h"
#include "ops/window/key_classes.h"
#include "tests/native/check.h"

namespace {

// Runs blocks on threads, or all in one call.
struct Threads {
  int count;
  int threads() const { return count; }
  template <class Work>
  void operator()(size_t n, size_t, const Work& work) const {
    if (count == 1) return work(0, n);
    std::vector<std::thread> all;
    for (size_t i = 0; i < n; ++i) all.emplace_back([&work, i] { work(i, i + 1); });
    for (std::thread& each : all) each.join();
  }
};

std::vector<std::vector<int64_t>> Draw(std::mt19937_64* random, size_t parts, size_t most) {
  std::vector<std::vector<int64_t>> drawn(parts);
  for (auto& part : drawn) {
    part.resize((*random)() % (most + 1));
    for (int64_t& key : part) key = static_cast<int64_t>((*random)() % 40) - 7;
  }
  return drawn;
}

std::vector<gmeta::KeySpan> Spans(const std::vector<std::vector<int64_t>>& parts) {
  std::vector<gmeta::KeySpan> spans;
  for (const auto& part : parts) spans.push_back({part.data(), part.size()});
  return spans;
}

// Each place leads back to its key, in a class that is open.
void CheckClasses(const std::vector<std::vector<int64_t>>& parts, const Threads& threads) {
  const size_t number = parts.size();
  const gmeta::KeyClasses classes(Spans(parts), threads);
  std::vector<std::vector<int64_t>> keys(gmeta::ClassCount(number));
  std::vector<std::vector<int32_t>> places(number);
  std::vector<int64_t*> to_keys;
  std::vector<int32_t*> to_places;
  for (size_t each = 0; each < keys.size(); ++each) {
    keys[each].resize(static_cast<size_t>(classes.count(each)));
    to_keys.push_back(keys[each].data());
  }
  for (size_t i = 0; i < number; ++i) {
    places[i].resize(parts[i].size());
    to_places.push_back(places[i].data());
  }
  classes.Write(to_keys.data(), to_places.data(), threads);
  size_t all = 0;
  for (size_t i = 0; i < number; ++i) {
    std::vector<int64_t> open;
    for (size_t first = 0; first <= i; ++first) {
      for (size_t last = i; last < number; ++last) {
        const auto& own = keys[gmeta::ClassOf(first, last, number)];
        open.insert(open.end(), own.begin(), own.end());
      }
    }
    for (size_t j = 0; j < parts[i].size(); ++j) {
      CHECK_EQ(open[static_cast<size_t>(places[i][j])], parts[i][j]);
    }
  }
  std::vector<int64_t> distinct;
  for (const auto& own : keys) {
    all += own.size();
    distinct.insert(distinct.end(), own.begin(), own.end());
  }
  std::sort(distinct.begin(), distinct.end());
  CHECK_EQ(static_cast<size_t>(std::unique(distinct.begin(), distinct.end()) - distinct.begin()),
           all);
}

void CheckClusters(std::mt19937_64* random, const Threads& threads) {
  std::vector<size_t> sizes(1 + (*random)() % gmeta::kMostMicroBatches);
  size_t total = 0;
  for (size_t& size : sizes) total += size = (*random)() % 20;
  std::vector<int64_t> keys(total == 0 ? 0 : (*random)() % 200), units(keys.size());
  for (int64_t& key : keys) key = static_cast<int64_t>((*random)() % 30);
  for (int64_t& unit : units) unit = static_cast<int64_t>((*random)() % total);
  std::vector<int64_t> order(total, -1), again(total);
  gmeta::ClusterUnits(keys.data(), units.data(), keys.size(), sizes, order.data(), threads);
  gmeta::ClusterUnits(keys.data(), units.data(), keys.size(), sizes, again.data(), Threads{1});
  CHECK(order == again);
  size_t begin = 0;
  for (const size_t size : sizes) {  // ascending in each
    CHECK(std::is_sorted(order.begin() + static_cast<long>(begin),
                         order.begin() + static_cast<long>(begin + size)));
    begin += size;
  }
  std::sort(order.begin(), order.end());
  for (size_t unit = 0; unit < total; ++unit) CHECK_EQ(order[unit], static_cast<int64_t>(unit));
}

}  // namespace

int main() {
  std::mt19937_64 random(11);
  for (const int count : {1, 4}) {
    const Threads threads{count};
    for (int round = 0; round < 60; ++round) {
      CheckClasses(Draw(&random, 1 + random() % gmeta::kMostMicroBatches, 60), threads);
      CheckClusters(&random, threads);
    }
    CheckClasses(Draw(&random, 3, 40000), threads);
  }

  const std::vector<std::vector<int64_t>> parts = {{5, 6}, {}, {6, 7}};
  const gmeta::CollectedKeys collected(Spans(parts), Threads{1});
  CHECK_EQ(collected.size(), size_t{3});
  const int32_t positions[] = {1, 0, 1};
  int32_t places[3];
  CHECK(collected.WritePlaces(2, {positions, 3}, places));
  CHECK_EQ(places[0], 2);
  CHECK_EQ(places[1], 1);
  const int32_t outside[] = {2}, negative[] = {-1};
  CHECK(!collected.WritePlaces(2, {outside, 1}, places));
  CHECK(!collected.WritePlaces(2, {negative, 1}, places));
  CHECK(!collected.WritePlaces(1, {positions + 1, 1}, places));
  return 0;
}
