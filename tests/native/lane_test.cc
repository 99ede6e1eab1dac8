// The lane, with threads as ranks: results, equal bits, and what ranks are told when one goes
// wrong.

#include "ops/lane/lane.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ops/lane/channel.h"
#include "ops/lane/mesh.h"
#include "tests/native/check.h"

namespace {

using gmeta::lane::Address;
using gmeta::lane::Call;
using gmeta::lane::Channel;
using gmeta::lane::Kind;
using gmeta::lane::Listen;
using gmeta::lane::Mesh;
using gmeta::lane::Part;
using gmeta::lane::Socket;
using std::chrono::milliseconds;

// Runs `work` as each of `size` ranks, every one with a channel of its own.
void RunRanks(int size, milliseconds patience, const std::function<void(Channel&)>& work) {
  std::vector<Socket> listeners(size);
  std::vector<Address> addresses(size, Address{"127.0.0.1", 0});
  for (int r = 0; r < size; ++r) CHECK_EQ(Listen(&addresses[r], &listeners[r]), "");
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.emplace_back([&, r] {
      Mesh mesh;
      CHECK_EQ(mesh.Make(listeners[r], r, addresses, "secret", milliseconds(30000)), "");
      Channel channel(mesh.Take(), r, patience);
      work(channel);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

Call Rows(const std::string& name) { return {Kind::kAlltoall, 8, "int64", name}; }
Call Sum(const std::string& name, size_t n) { return {Kind::kAllreduce, n, "float", name}; }

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Sends rows[r] to rank r of `ranks`; what came from each is in `received`.
std::string Alltoall(Channel& channel, const std::string& name,
                     const std::vector<std::vector<int64_t>>& rows,
                     std::vector<std::vector<int64_t>>* received,
                     const std::vector<int32_t>& ranks = {}) {
  Call call = Rows(name);
  call.ranks = ranks;
  std::vector<Part> parts;
  for (const auto& part : rows) {
    parts.push_back({reinterpret_cast<const char*>(part.data()), part.size() * 8});
  }
  std::vector<int64_t> all;
  std::vector<uint64_t> sizes;
  const std::string why = channel.Alltoallv(call, parts, [&](const std::vector<uint64_t>& bytes) {
    sizes = bytes;
    size_t total = 1;  // so that there is a place even for nothing
    for (const uint64_t b : bytes) total += b / 8;
    all.resize(total);
    return reinterpret_cast<char*>(all.data());
  });
  received->clear();
  const int64_t* at = all.data();
  for (const uint64_t bytes : sizes) {
    received->emplace_back(at, at + bytes / 8);
    at += bytes / 8;
  }
  return why;
}

// Everyone can compute what everyone sends: it depends on who, to whom, and the round.
std::vector<int64_t> Sent(int from, int to, int round) {
  std::mt19937_64 random(static_cast<uint64_t>(from * 64 + to) * 1000 + round);
  const size_t limits[] = {1, 4, 200, 4000, 60000};
  std::vector<int64_t> rows(random() % limits[round % 5]);
  for (int64_t& row : rows) row = static_cast<int64_t>(random());
  return rows;
}

void TestAlltoallGivesEveryRankItsRowsInTheOrderOfSenders() {
  for (int size = 1; size <= 4; ++size) {
    RunRanks(size, milliseconds(60000), [size](Channel& channel) {
      std::mt19937 random(channel.rank());
      for (int round = 0; round < 60; ++round) {
        std::vector<std::vector<int64_t>> rows, received;
        for (int to = 0; to < size; ++to) rows.push_back(Sent(channel.rank(), to, round));
        if (random() % 4 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 900));
        CHECK_EQ(Alltoall(channel, "rows", rows, &received), "");
        CHECK_EQ(received.size(), static_cast<size_t>(size));
        for (int from = 0; from < size; ++from) {
          CHECK(received[from] == Sent(from, channel.rank(), round));
        }
      }
    });
  }
}

void TestOnlySomeRanksTakePartAndWaitForNoOthers() {
  std::atomic<int> done{0};
  RunRanks(4, milliseconds(60000), [&](Channel& channel) {
    const int own = channel.rank(), first = own / 2 * 2;
    for (int round = 0; round < 60; ++round) {
      // Ranks 2 and 3 come when 0 and 1 have ended.
      while (first == 2 && done < 2 * (round + 1)) std::this_thread::yield();
      std::vector<std::vector<int64_t>> rows(4), received;
      for (int to = first; to < first + 2; ++to) rows[to] = Sent(own, to, round);
      CHECK_EQ(Alltoall(channel, "rows", rows, &received, {first, first + 1}), "");
      for (int from = 0; from < 4; ++from) {
        const bool is_peer = from / 2 * 2 == first;
        CHECK(received[from] == (is_peer ? Sent(from, own, round) : std::vector<int64_t>()));
      }
      if (first == 0) ++done;
      const std::vector<int32_t> across = {own % 2, own % 2 + 2};
      rows.assign(4, {});
      for (const int32_t to : across) rows[to] = Sent(own, to, round + 1);
      CHECK_EQ(Alltoall(channel, "rows", rows, &received, across), "");
      for (const int32_t from : across) CHECK(received[from] == Sent(from, own, round + 1));
      float value = 1;
      CHECK_EQ(channel.Allreduce(Sum("dense", 1), &value, 1), "");
      CHECK(value == 4);
    }
  });
}

void TestSumsHaveEqualBitsAndAreInTheOrderOfRanks() {
  for (int size = 1; size <= 4; ++size) {
    RunRanks(size, milliseconds(60000), [size](Channel& channel) {
      for (const size_t n : {0, 1, 3, 1000, 16384, 16385, 300001}) {
        std::vector<std::vector<float>> terms(size, std::vector<float>(n));
        for (int r = 0; r < size; ++r) {
          std::mt19937 random(r + 1);
          for (float& term : terms[r]) term = std::ldexp(1.0f + random() % 1000, random() % 40);
        }
        std::vector<float> sums = terms[0];
        for (int r = 1; r < size; ++r) {
          for (size_t i = 0; i < n; ++i) sums[i] += terms[r][i];
        }
        std::vector<float>& values = terms[channel.rank()];
        CHECK_EQ(channel.Allreduce(Sum("dense", n), values.data(), n), "");
        CHECK(n == 0 || std::memcmp(values.data(), sums.data(), n * sizeof(float)) == 0);
      }
    });
  }
}

void TestManyStepsWithDelaysEndWithEqualBits() {
  const int size = 3, steps = 3000;
  std::vector<std::vector<float>> ends(size);
  RunRanks(size, milliseconds(60000), [&](Channel& channel) {
    std::mt19937 random(7 + channel.rank());
    std::vector<float> weights(50, 1.0f);
    for (int step = 0; step < steps; ++step) {
      if (random() % 64 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      std::vector<std::vector<int64_t>> rows(size), received;
      for (auto& part : rows) part.assign(random() % 5, channel.rank());
      CHECK_EQ(Alltoall(channel, "ids", rows, &received), "");
      std::vector<float> gradient(50);
      for (float& g : gradient) g = (random() % 1000) * 1e-3f;
      gradient[0] += static_cast<float>(received[0].size());
      CHECK_EQ(channel.Allreduce(Sum("dense", 50), gradient.data(), 50), "");
      for (size_t i = 0; i < weights.size(); ++i) weights[i] = 0.9f * weights[i] + gradient[i];
    }
    ends[channel.rank()] = weights;
  });
  for (const auto& end : ends) CHECK(std::memcmp(end.data(), ends[0].data(), 200) == 0);
}

void TestRanksInDifferentCollectivesAreToldBothNames() {
  RunRanks(2, milliseconds(60000), [](Channel& channel) {
    std::vector<std::vector<int64_t>> rows(2, {1, 2}), received;
    CHECK_EQ(Alltoall(channel, "rows", rows, &received), "");
    float value = 1;
    const std::string why = channel.rank() == 0 ? Alltoall(channel, "keys", rows, &received)
                                                : channel.Allreduce(Sum("dense", 1), &value, 1);
    CHECK(Contains(why, "alltoall 'keys' of int64, 8 bytes a row, number 1"));
    CHECK(Contains(why, "allreduce 'dense' of float, 1 elements, number 1"));
    CHECK_EQ(Alltoall(channel, "rows", rows, &received), why);  // it stays failed
  });
}

void TestSumsOfDifferentSizesAreRefused() {
  RunRanks(2, milliseconds(60000), [](Channel& channel) {
    std::vector<float> values(3);
    const size_t n = 2 + channel.rank();
    const std::string why = channel.Allreduce(Sum("dense", n), values.data(), n);
    CHECK(Contains(why, "2 elements") && Contains(why, "3 elements"));
  });
}

void TestARankThatLeavesIsNamed() {
  RunRanks(3, milliseconds(60000), [](Channel& channel) {
    if (channel.rank() == 1) return;
    std::vector<std::vector<int64_t>> rows(3, std::vector<int64_t>(100000)), received;
    const std::string why = Alltoall(channel, "rows", rows, &received);
    CHECK(Contains(why, "connection closed by rank 1"));
  });
}

void TestARankThatGivesUpSaysWhy() {
  std::atomic<int> done{0};
  RunRanks(3, milliseconds(60000), [&](Channel& channel) {
    float value = 1;
    CHECK_EQ(channel.Allreduce(Sum("dense", 1), &value, 1), "");
    if (channel.rank() == 0) channel.GiveUp("rank 7 is lost", ", while rank 0 looks");
    if (channel.rank() == 2) {
      const std::string why = channel.Allreduce(Sum("dense", 1), &value, 1);
      CHECK(Contains(why, "rank 7 is lost, while rank 2 is in allreduce 'dense'"));
    }
    ++done;
    while (done < 3) std::this_thread::sleep_for(milliseconds(1));
  });
}

void TestRanksKnowWhoWaitsInWhat() {
  std::atomic<int> done{0};
  RunRanks(4, milliseconds(60000), [&](Channel& channel) {
    if (channel.rank() == 3) channel.BeginCheck(Rows("elsewhere"));
    if (channel.rank() == 3) CHECK(!channel.Advance(false));
    if (channel.rank() == 2) channel.TellWaiting(7);
    ++done;
    while (done < 4) std::this_thread::sleep_for(milliseconds(1));
    std::this_thread::sleep_for(milliseconds(50));
    if (channel.rank() < 2) {
      const std::string absent = channel.AbsentFrom(7, Rows("rows"));
      CHECK(Contains(absent, channel.rank() == 0 ? "rank 1, rank 3" : "rank 0, rank 3"));
      CHECK(Contains(absent, "rank 3, which is in alltoall 'elsewhere'"));
    }
    ++done;
    while (done < 8) std::this_thread::sleep_for(milliseconds(1));
  });
}

void TestACancelledCollectiveHasAGraceInWhichItMayEnd() {
  std::atomic<bool> done{false};
  RunRanks(2, milliseconds(0), [&](Channel& channel) {
    float value = 1;
    if (channel.rank() == 0) channel.abort().Soon("the step was cancelled", milliseconds(200));
    CHECK_EQ(channel.Allreduce(Sum("dense", 1), &value, 1), "");
    if (channel.rank() == 0) channel.abort().Withdraw();
    if (channel.rank() == 1) {
      while (!done) std::this_thread::sleep_for(milliseconds(1));
      CHECK_EQ(channel.Allreduce(Sum("dense", 1), &value, 1), "");  // all is there
      CHECK_EQ(channel.Hear(), "the step was cancelled");
      return;
    }
    channel.abort().Soon("the step was cancelled", milliseconds(200));
    CHECK_EQ(channel.Allreduce(Sum("dense", 1), &value, 1), "the step was cancelled");
    done = true;
  });
}

void TestARankThatDoesNotComeIsNamed() {
  std::atomic<int> done{0};
  RunRanks(3, milliseconds(300), [&](Channel& channel) {
    if (channel.rank() == 1) {
      while (done < 2) std::this_thread::sleep_for(milliseconds(1));
      return;
    }
    std::vector<std::vector<int64_t>> rows(3), received;
    const std::string why = Alltoall(channel, "rows", rows, &received);
    CHECK(Contains(why, "timed out: rank 1 did not come"));
    ++done;
  });
}

void TestAbortEndsAWaitingCollective() {
  std::atomic<bool> done{false};
  RunRanks(2, milliseconds(0), [&](Channel& channel) {
    if (channel.rank() == 1) {
      while (!done) std::this_thread::sleep_for(milliseconds(1));
      return;
    }
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(50));
      channel.abort().Now("the step was cancelled");
    });
    float value = 1;
    CHECK_EQ(channel.Allreduce(Sum("dense", 1), &value, 1), "the step was cancelled");
    other.join();
    done = true;
  });
}

// Jobs are handed in without waiting, so some begin on this thread and some on the lane's.
void TestALaneRunsJobsInTheOrderInWhichTheyCame() {
  const int size = 3, jobs = 400;
  std::vector<std::unique_ptr<gmeta::lane::Lane>> lanes;
  std::vector<Address> addresses(size, Address{"127.0.0.1", 0});
  for (Address& address : addresses) {
    lanes.push_back(std::make_unique<gmeta::lane::Lane>());
    CHECK_EQ(lanes.back()->Listen(&address), "");
  }
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r) {
    ranks.emplace_back([&, r] {
      gmeta::lane::Lane& lane = *lanes[r];
      CHECK_EQ(lane.Connect(r, addresses, "secret", milliseconds(30000), milliseconds(60000), ""),
               "");
      std::mt19937 random(r);
      std::vector<float> values(jobs);
      std::vector<int> ended;
      std::atomic<int> count{0};
      for (int job = 0; job < jobs; ++job) {
        values[job] = static_cast<float>(job);
        if (random() % 8 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
        const auto begin = [&, job] {
          lane.channel()->BeginAllreduce(Sum("dense", 1), &values[job], 1);
        };
        const auto take = [&, job] {
          CHECK_EQ(lane.channel()->failure(), "");
          ended.push_back(job);
        };
        const auto advance = [&](bool may_sleep) { return lane.Advance(may_sleep); };
        lane.Run({begin, advance, take, [&] { ++count; }});
      }
      while (count < jobs) std::this_thread::yield();
      for (int job = 0; job < jobs; ++job) {
        CHECK_EQ(ended[job], job);
        CHECK_EQ(values[job], static_cast<float>(size * job));
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace

int main() {
  TestAlltoallGivesEveryRankItsRowsInTheOrderOfSenders();
  TestOnlySomeRanksTakePartAndWaitForNoOthers();
  TestSumsHaveEqualBitsAndAreInTheOrderOfRanks();
  TestManyStepsWithDelaysEndWithEqualBits();
  TestRanksInDifferentCollectivesAreToldBothNames();
  TestSumsOfDifferentSizesAreRefused();
  TestARankThatLeavesIsNamed();
  TestARankThatGivesUpSaysWhy();
  TestRanksKnowWhoWaitsInWhat();
  TestACancelledCollectiveHasAGraceInWhichItMayEnd();
  TestARankThatDoesNotComeIsNamed();
  TestAbortEndsAWaitingCollective();
  TestALaneRunsJobsInTheOrderInWhichTheyCame();
}
