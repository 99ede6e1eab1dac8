// Karmarkar and Karp's splits against the method written out with full splits, and what it
// promises.

#include "io/balance/karmarkar_karp.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "tests/native/check.h"

using gmeta::balance::KarmarkarKarp;

namespace {

std::vector<int32_t> Dealt(const std::vector<double>& costs, int32_t ranks) {
  std::vector<int32_t> rank_of(costs.size(), -1);
  KarmarkarKarp(costs.data(), costs.size(), ranks).Deal(rank_of.data());
  return rank_of;
}

// Every split with all of its parts, and a search for the most uneven one in place of a heap.
std::vector<int32_t> WrittenOut(const std::vector<double>& costs, int32_t ranks) {
  struct Part {
    double cost = 0;
    std::vector<int32_t> sequences;
  };
  std::vector<std::vector<Part>> splits;
  for (size_t i = 0; i < costs.size(); ++i) {
    splits.emplace_back(ranks);
    splits.back()[0] = {costs[i], {static_cast<int32_t>(i)}};
  }
  const auto take_most_uneven = [&splits] {
    const auto found =
        std::min_element(splits.begin(), splits.end(), [](const auto& a, const auto& b) {
          return a.back().cost - a.front().cost <
                 b.back().cost - b.front().cost;  // the first of equal ones
        });
    std::vector<Part> taken = *found;
    splits.erase(found);
    return taken;
  };
  while (splits.size() > 1) {
    std::vector<Part> joined = take_most_uneven();
    const std::vector<Part> second = take_most_uneven();
    for (int32_t i = 0; i < ranks; ++i) {
      const Part& other = second[ranks - 1 - i];
      joined[i].cost += other.cost;
      joined[i].sequences.insert(joined[i].sequences.end(), other.sequences.begin(),
                                 other.sequences.end());
    }
    std::stable_sort(joined.begin(), joined.end(),
                     [](const Part& a, const Part& b) { return a.cost > b.cost; });
    splits.push_back(joined);
  }
  std::vector<std::vector<int32_t>> parts;
  for (Part& part : splits[0]) {
    std::sort(part.sequences.begin(), part.sequences.end());
    parts.push_back(part.sequences);
  }
  std::sort(parts.begin(), parts.end());
  std::vector<int32_t> rank_of(costs.size());
  for (int32_t rank = 0; rank < ranks; ++rank) {
    for (const int32_t sequence : parts[rank]) rank_of[sequence] = rank;
  }
  return rank_of;
}

std::vector<double> Sums(const std::vector<double>& costs, const std::vector<int32_t>& rank_of,
                         int32_t ranks) {
  std::vector<double> sums(ranks, 0.0);
  for (size_t i = 0; i < costs.size(); ++i) sums.at(rank_of[i]) += costs[i];
  return sums;
}

void IsTheMethodWrittenOut() {
  std::mt19937 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int32_t ranks = 1 + random() % 9;
    std::vector<double> costs(1 + random() % 40);
    // Few whole numbers, with zeros or without: ties everywhere. Or fractions: none.
    const int kind = random() % 3;
    for (double& cost : costs) {
      cost = kind == 0 ? random() % 4 : kind == 1 ? 1 + random() % 4 : random() / 1000.0;
    }
    CHECK(Dealt(costs, ranks) == WrittenOut(costs, ranks));
  }
}

void PartsDifferByTheDearestAtMost() {
  std::mt19937 random(2);
  std::lognormal_distribution<double> length(6.0, 0.9);
  for (const int32_t ranks : {2, 8, 64}) {
    std::vector<double> costs(ranks * 80);
    for (double& cost : costs) cost = length(random);
    const std::vector<int32_t> rank_of = Dealt(costs, ranks);
    const std::vector<double> sums = Sums(costs, rank_of, ranks);
    const auto [least, most] = std::minmax_element(sums.begin(), sums.end());
    const double dearest = *std::max_element(costs.begin(), costs.end());
    CHECK(*most - *least <= dearest);
    const double mean = std::accumulate(sums.begin(), sums.end(), 0.0) / ranks;
    CHECK(*most < 1.001 * mean);
    CHECK_EQ(std::set<int32_t>(rank_of.begin(), rank_of.end()).size(), static_cast<size_t>(ranks));
  }
}

void FewSequencesLeaveTheFirstRanksEmpty() {
  CHECK(Dealt({}, 3).empty());
  CHECK(Dealt({5.0}, 3) == std::vector<int32_t>({2}));
  CHECK(Dealt({1.0, 2.0}, 4) == std::vector<int32_t>({2, 3}));
  CHECK(Dealt({4, 5, 6, 7, 8}, 2) == std::vector<int32_t>({0, 0, 1, 0, 1}));
  CHECK(Dealt({0, 0, 0}, 1) == std::vector<int32_t>({0, 0, 0}));
}

}  // namespace

int main() {
  IsTheMethodWrittenOut();
  PartsDifferByTheDearestAtMost();
  FewSequencesLeaveTheFirstRanksEmpty();
  return 0;
}
