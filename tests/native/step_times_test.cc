// The times of steps against the full list of them: what has expired, the bound, and the turns.

#include "ops/table/core/step_times.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/native/check.h"

namespace {

using gmeta::IsTurnOf;
using gmeta::StepTime;
using gmeta::StepTimes;

// Drawn intervals between steps, some of them pauses, and a clock that goes back sometimes.
void TestExpiry(uint64_t seed) {
  std::mt19937_64 random(seed);
  const int64_t lifetime = 1 + static_cast<int64_t>(random() % 100000);
  const int64_t every = 1 + static_cast<int64_t>(random() % 10000);
  const int64_t most = 1 + static_cast<int64_t>(random() % 3000);
  StepTimes times({});
  std::vector<StepTime> all;
  int64_t now = -5000, turned = 0;
  std::vector<uint64_t> turns(64, 0);
  for (int64_t step = 1; step < 3000; ++step) {
    int64_t gap = static_cast<int64_t>(random() % static_cast<uint64_t>(most));
    if (random() % 500 == 0) gap = static_cast<int64_t>(random() % 200000);
    if (random() % 300 == 0) gap = -gap;
    for (StepTime& one : all) one.time += std::min<int64_t>(gap, 0);
    now += gap;
    all.push_back({step, now});
    const uint64_t due = times.Note(step, now, lifetime, every);
    if (all.size() > 1 && gap >= every) CHECK_EQ(due, ~uint64_t{0});
    if (gap <= 0) CHECK_EQ(due, uint64_t{0});
    for (int i = 0; i < 64; ++i) turned += static_cast<int64_t>(due >> i & 1);
    CHECK(times.pairs().size() <= 67);
    // The newest step of a time that is old enough, and with joined pairs not much older.
    int64_t exact = 0, late = 0;
    for (const StepTime& one : all) {
      if (one.time <= now - lifetime) exact = one.step;
      if (one.time <= now - lifetime - lifetime / 64 - 200000) late = one.step;
    }
    const int64_t before = times.Before(now, lifetime);
    CHECK(late <= before && before <= exact);
  }
  CHECK(turned > 0);
}

void TestRollback() {
  StepTimes times({});
  for (int64_t step = 1; step <= 10; ++step) times.Note(step, 100 * step, 300, 100);
  times.Note(4, 1100, 300, 100);
  CHECK_EQ(times.pairs().back().step, int64_t{4});
  CHECK(times.Before(1100, 300) <= 4);
}

// In `every`, each shard has one turn, whatever their number.
void TestTurns() {
  for (const size_t shards : {1, 2, 16, 64}) {
    std::vector<int> swept(shards, 0);
    for (int64_t time = -640; time < 640; ++time) {
      const uint64_t turns = StepTimes::Turns(time, time + 1, 640);
      for (size_t i = 0; i < shards; ++i) swept[i] += IsTurnOf(i, shards, turns) ? 1 : 0;
    }
    for (const int count : swept) CHECK_EQ(count, 2);
  }
}

}  // namespace

int main() {
  for (uint64_t seed = 0; seed < 60; ++seed) TestExpiry(seed);
  TestRollback();
  TestTurns();
}
