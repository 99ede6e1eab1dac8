// The lane of GPUs, with threads as ranks and fake GPUs: results, order, and what ranks are told
// when one goes wrong.

#include "ops/lane/nccl_lane.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/native/check.h"
#include "tests/native/fake_gpus.h"

namespace {

using gmeta::lane::Address;
using gmeta::lane::Call;
using gmeta::lane::Kind;
using gmeta::lane::Nccl;
using gmeta::lane::NcclLane;
using std::chrono::milliseconds;

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A rank with a lane and a compute stream.
struct Rank {
  std::unique_ptr<NcclLane> lane;
  fake::Stream compute;

  // Runs a collective. Returns why it failed, or "".
  std::string Run(const std::function<void()>& begin) {
    std::string why;
    std::atomic<bool> done{false};
    lane->Run({begin, [&](bool may_sleep) { return lane->Advance(may_sleep); },
               [&] { why = lane->failure(); }, [&] { done = true; }});
    while (!done) std::this_thread::yield();
    return why;
  }

  // Sends rows[r] to rank r, and takes `expected[r]` rows from each.
  std::string Alltoall(const std::string& name, const std::vector<std::vector<int64_t>>& rows,
                       const std::vector<size_t>& expected, std::vector<int64_t>* received) {
    std::vector<int64_t> all;
    std::vector<size_t> sends, receives;
    size_t total = 0;
    for (const auto& part : rows) {
      all.insert(all.end(), part.begin(), part.end());
      sends.push_back(part.size() * 8);
    }
    for (const size_t n : expected) {
      receives.push_back(n * 8);
      total += n;
    }
    received->assign(total, -1);
    return Run([&] {
      lane->BeginAlltoall({Kind::kAlltoall, 8, "int64", name}, all.data(), sends, received->data(),
                          receives, &compute);
    });
  }

  std::string Allreduce(const std::string& name, std::vector<float>* values) {
    return Run([&] {
      lane->BeginAllreduce({Kind::kAllreduce, values->size(), "float", name},
                           {{values->data(), values->data(), values->size()}}, Nccl::kFloat,
                           &compute);
    });
  }
};

// Runs `work` as each of `size` ranks.
void RunRanks(int size, milliseconds patience, const std::function<void(Rank&)>& work) {
  const Nccl nccl = fake::MakeNccl();
  Nccl::Id id;
  nccl.get_unique_id(&id);
  std::vector<Rank> ranks(size);
  std::vector<Address> addresses(size, Address{"127.0.0.1", 0});
  for (int r = 0; r < size; ++r) {
    ranks[r].lane = std::make_unique<NcclLane>(nccl);
    CHECK_EQ(ranks[r].lane->Listen(&addresses[r]), "");
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      CHECK_EQ(ranks[r].lane->Connect(r, addresses, "secret", milliseconds(30000), patience,
                                      std::string(id.bytes, sizeof id.bytes)),
               "");
      work(ranks[r]);
      ranks[r].lane.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Everyone can compute what everyone sends.
std::vector<int64_t> Sent(int from, int to, int round) {
  std::mt19937_64 random(static_cast<uint64_t>(from * 64 + to) * 1000 + round);
  std::vector<int64_t> rows(random() % (round % 3 == 0 ? 2 : 500));
  for (int64_t& row : rows) row = static_cast<int64_t>(random());
  return rows;
}

void TestRowsAndSumsArrive() {
  for (int size = 1; size <= 4; ++size) {
    RunRanks(size, milliseconds(60000), [size](Rank& rank) {
      const int own = rank.lane->rank();
      std::mt19937 random(own);
      for (int round = 0; round < 60; ++round) {
        std::vector<std::vector<int64_t>> rows;
        std::vector<int64_t> expected, received;
        std::vector<size_t> sizes;
        for (int r = 0; r < size; ++r) {
          rows.push_back(Sent(own, r, round));
          const auto came = Sent(r, own, round);
          expected.insert(expected.end(), came.begin(), came.end());
          sizes.push_back(came.size());
        }
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(900));
        CHECK_EQ(rank.Alltoall("rows", rows, sizes, &received), "");
        CHECK(received == expected);
        std::vector<float> values(static_cast<size_t>(round), static_cast<float>(own));
        CHECK_EQ(rank.Allreduce("dense", &values), "");
        for (const float value : values) CHECK_EQ(value, static_cast<float>(size * (size - 1) / 2));
      }
    });
  }
}

void TestACollectiveWaitsForWhatWasQueuedAndKeepsNothingElseWaiting() {
  std::atomic<bool> computed{false};
  RunRanks(2, milliseconds(60000), [&](Rank& rank) {
    std::vector<float> values(1, 0.0f);
    rank.compute.Push([&] {
      std::this_thread::sleep_for(milliseconds(30));
      values[0] = 1;
    });
    std::thread later;
    if (rank.lane->rank() == 0) {
      later = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(10));
        rank.compute.Push([&] { computed = true; });
      });
    } else {
      while (!computed) std::this_thread::yield();  // although rank 0 waits in the collective
    }
    CHECK_EQ(rank.Allreduce("dense", &values), "");
    CHECK_EQ(values[0], 2.0f);
    if (later.joinable()) later.join();
  });
}

void TestRanksInDifferentCollectivesAreToldBothNames() {
  RunRanks(2, milliseconds(60000), [](Rank& rank) {
    std::vector<float> values(3);
    CHECK_EQ(rank.Allreduce("dense", &values), "");
    const std::string why = rank.Allreduce(rank.lane->rank() == 0 ? "one" : "other", &values);
    CHECK(Contains(why, "allreduce 'one' of float, 3 elements"));
    CHECK(Contains(why, "allreduce 'other' of float, 3 elements"));
    CHECK_EQ(rank.Allreduce("dense", &values), why);  // it stays failed
  });
}

void TestARankThatIsElsewhereIsNamed() {
  RunRanks(2, milliseconds(600), [](Rank& rank) {
    std::vector<float> values(3);
    CHECK_EQ(rank.Allreduce("dense", &values), "");
    const bool is_new = rank.lane->rank() == 0;  // it compares, and rank 1 doesn't
    const std::string why = rank.Allreduce(is_new ? "new" : "dense", &values);
    CHECK(Contains(why, "timed out: rank 1 did not come") ||
          Contains(why, "timed out: rank 0, which is in allreduce 'new'"));
  });
}

void TestARankThatLeavesIsNamed() {
  RunRanks(3, milliseconds(60000), [](Rank& rank) {
    std::vector<float> values(3);
    CHECK_EQ(rank.Allreduce("dense", &values), "");
    if (rank.lane->rank() == 1) return;
    const std::string why = rank.Allreduce("dense", &values);
    CHECK(Contains(why, "connection closed by rank 1, while rank"));
    CHECK(Contains(why, "allreduce 'dense' of float, 3 elements, number 1 of GPUs"));
  });
}

void TestARankThatDoesNotComeIsNamed() {
  std::atomic<int> done{0};
  RunRanks(3, milliseconds(600), [&](Rank& rank) {
    std::vector<float> values(3);
    CHECK_EQ(rank.Allreduce("dense", &values), "");
    if (rank.lane->rank() != 1) {
      CHECK(
          Contains(rank.Allreduce("dense", &values), "timed out: rank 1 did not come within 0 s"));
      ++done;
    }
    while (done < 2) std::this_thread::sleep_for(milliseconds(1));
  });
}

// Patience is for other ranks; the own GPU may compute as long as it likes.
void TestALongComputationIsNoFailure() {
  RunRanks(2, milliseconds(200), [&](Rank& rank) {
    std::vector<float> values(3);
    CHECK_EQ(rank.Allreduce("dense", &values), "");
    rank.compute.Push([] { std::this_thread::sleep_for(milliseconds(700)); });
    CHECK_EQ(rank.Allreduce("dense", &values), "");
  });
}

void TestACancelledCollectiveEnds() {
  std::atomic<bool> done{false};
  RunRanks(2, milliseconds(0), [&](Rank& rank) {
    std::vector<float> values(3);
    CHECK_EQ(rank.Allreduce("dense", &values), "");
    if (rank.lane->rank() == 0) {
      std::thread other(
          [&] { rank.lane->abort().Soon("the step was cancelled", milliseconds(50)); });
      CHECK_EQ(rank.Allreduce("dense", &values), "the step was cancelled");
      other.join();
      done = true;
    }
    while (!done) std::this_thread::sleep_for(milliseconds(1));
  });
}

void TestALaneThatNobodyJoinsFails() {
  NcclLane lane(fake::MakeNccl());
  std::vector<Address> addresses(2, Address{"127.0.0.1", 0});
  CHECK_EQ(lane.Listen(&addresses[0]), "");
  CHECK(Contains(lane.Connect(0, addresses, "secret", milliseconds(50), milliseconds(50),
                              std::string(128, 'x')),
                 "timed out: rank 1 did not connect"));
  CHECK(!lane.is_open());
}

}  // namespace

int main() {
  TestRowsAndSumsArrive();
  TestACollectiveWaitsForWhatWasQueuedAndKeepsNothingElseWaiting();
  TestRanksInDifferentCollectivesAreToldBothNames();
  TestARankThatIsElsewhereIsNamed();
  TestARankThatLeavesIsNamed();
  TestARankThatDoesNotComeIsNamed();
  TestALongComputationIsNoFailure();
  TestACancelledCollectiveEnds();
  TestALaneThatNobodyJoinsFails();
}
