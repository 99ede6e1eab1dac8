// Recent events, which some threads append and others read, while segments of them go into later
// generations: each event is in the tail or in the generation, and never in both.

#include "io/history/recent_events.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/history/event_log.h"
#include "io/history/opened_generation.h"
#include "io/history/recent_snapshot.h"
#include "tests/native/check.h"

namespace gmeta::history {
namespace {

constexpr size_t kUsers = 4;  // each has a thread that appends its events at times 0, 1, 2, ...
constexpr int kGenerations = 6;

// A generation without stripes.
std::shared_ptr<OpenedGeneration> Empty(int64_t generation) {
  auto opened = std::make_shared<OpenedGeneration>(generation);
  CHECK(opened->AddShard(ShardIndex().Encode()) == IndexFault::kNone);
  return opened;
}

void TestEachEventIsInOnePlace() {
  RecentEvents recent(2, size_t{1} << 30);
  recent.Switch({Empty(1), {}});
  // Of each generation, how many events of each user it contains.
  std::array<std::array<int64_t, kUsers>, kGenerations + 2> contained{};
  std::array<std::atomic<int64_t>, kUsers> appended{};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (size_t user = 0; user < kUsers; ++user) {
    threads.emplace_back([&, user] {
      for (int64_t time = 0; !stop; ++time) {
        const std::array<int64_t, 3> row = {static_cast<int64_t>(user), time, -time};
        CHECK(recent.Append(row.data(), 1) == 0);
        appended[user] = time + 1;
        if (time % 64 == 0) std::this_thread::yield();
      }
    });
  }
  for (int reader = 0; reader < 2; ++reader) {
    threads.emplace_back([&] {
      std::vector<int64_t> rows;
      for (size_t i = 0; !stop; ++i) {
        const size_t user = i % kUsers;
        const int64_t before = appended[user];
        const auto opened = recent.Tail(static_cast<int64_t>(user), INT64_MIN, INT64_MAX, &rows);
        int64_t time = contained[static_cast<size_t>(opened->generation())][user];
        for (size_t k = 0; k < rows.size(); k += 3, ++time) {
          CHECK(rows[k + 1] == time && rows[k + 2] == -time);
        }
        CHECK(time >= before);
      }
    });
  }
  for (int64_t generation = 2; generation < kGenerations + 2; ++generation) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    int failure = 0;
    const SequenceRange ended = recent.Seal(nullptr, false, &failure);
    CHECK(failure == 0);
    std::vector<int64_t> out(static_cast<size_t>(ended.end - ended.begin) * 3);
    CHECK(recent.Export(ended, out.data()) == static_cast<size_t>(ended.end - ended.begin));
    auto& own = contained[static_cast<size_t>(generation)];
    own = contained[static_cast<size_t>(generation - 1)];
    for (size_t k = 0; k < out.size(); k += 3)
      CHECK(out[k + 1] == own[static_cast<size_t>(out[k])]++);
    recent.Switch({Empty(generation), {{0, ended.end}}});
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  int64_t left = 0;
  for (size_t user = 0; user < kUsers; ++user) {
    left += appended[user] - contained[kGenerations + 1][user];
  }
  CHECK(recent.events() == left);
}

void TestRangesInAnyOrder() {
  RecentEvents recent(2, size_t{1} << 30);
  recent.Switch({Empty(1), {}});
  for (int64_t i = 0; i < 9; ++i) {
    const std::array<int64_t, 3> row = {7, 100 - i, i};
    CHECK(recent.Append(row.data(), 1) == 0);
  }
  std::vector<int64_t> rows;
  recent.Switch({Empty(2), {{0, 2}, {4, 6}}});
  CHECK(recent.events() == 5);
  CHECK(recent.Tail(7, 0, 99, &rows)->generation() == 2);
  const std::vector<int64_t> late = {8, 92, 8, 7, 93, 7, 6, 94, 6, 3, 97, 3, 2, 98, 2};
  CHECK(rows == late);  // ordered by time, though they came the other way round
  recent.Switch({Empty(3), {{0, 9}}});
  CHECK(recent.events() == 0 && recent.bytes() == 0);
}

void TestMemoryIsBounded() {
  RecentEvents recent(1, 4096);
  recent.Switch({Empty(1), {}});
  int64_t user = 0;
  int result = 0;
  while (result == 0 && user < 10000) {
    const std::array<int64_t, 2> row = {user++, 1};
    result = recent.Append(row.data(), 1);
  }
  CHECK(result == RecentEvents::kFull);
  CHECK(recent.events() == user - 1 && recent.bytes() >= 4096 && recent.bytes() < 4500);
}

void TestLog() {
  std::string path = "recent_events_test.XXXXXX";
  const int made = mkstemp(path.data());
  CHECK(made >= 0 && write(made, "HEADER", 6) == 6 && close(made) == 0);
  const auto replay = [&] {
    std::vector<int64_t> words;
    const int64_t end = ReplayLog(path.c_str(), 6, 2, [&](const int64_t* rows, size_t events) {
      words.insert(words.end(), rows, rows + 2 * events);
    });
    return std::pair(end, words);
  };
  const std::vector<int64_t> rows = {1, 2, 3, 4, 5, 6};
  {
    EventLog log(path.c_str(), 2);
    CHECK(log.error() == 0 && log.Append(rows.data(), 3) == 0 && log.Append(rows.data(), 1) == 0);
    CHECK(log.Sync(log.written()) == 0);
    CHECK(log.written() == 6 + (8 + 48) + (8 + 16));
  }
  CHECK(replay() == std::pair(int64_t{86}, std::vector<int64_t>{1, 2, 3, 4, 5, 6, 1, 2}));
  for (off_t size = 85; size >= 62; --size) {
    CHECK(truncate(path.c_str(), size) == 0);
    CHECK(replay() == std::pair(int64_t{62}, rows));
  }
  EventLog none((path + ".none").c_str(), 2);
  CHECK(none.error() == ENOENT && none.Append(rows.data(), 1) == ENOENT);
  unlink(path.c_str());
}

}  // namespace
}  // namespace gmeta::history

int main() {
  gmeta::history::TestEachEventIsInOnePlace();
  gmeta::history::TestRangesInAnyOrder();
  gmeta::history::TestMemoryIsBounded();
  gmeta::history::TestLog();
  return 0;
}
