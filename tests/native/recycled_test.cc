#include "ops/common/recycled.h"

#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "tests/native/check.h"

namespace {

using gmeta::BlockCache;
using gmeta::MakeRecycled;

void TestSizes() {
  CHECK_EQ(BlockCache::Rounded(0), size_t{0});
  CHECK_EQ(BlockCache::Rounded(BlockCache::kSmallest - 1), BlockCache::kSmallest - 1);
  CHECK_EQ(BlockCache::Rounded(BlockCache::kSmallest), BlockCache::kSmallest);
  CHECK_EQ(BlockCache::Rounded(BlockCache::kSmallest + 1), 2 * BlockCache::kSmallest);
}

void TestABlockIsFoundAgainByItsSize() {
  if (BlockCache::kMostKept == 0) return;
  BlockCache cache;
  void* const block = cache.Take(100000);
  cache.Give(block, 100000);
  CHECK_EQ(cache.kept_bytes(), size_t{1} << 17);
  void* const larger = cache.Take(200000);
  CHECK(larger != block);
  CHECK_EQ(cache.Take(90000), block);  // rounds to as much
  CHECK_EQ(cache.kept_bytes(), size_t{0});
  cache.Give(block, 90000);
  cache.Give(larger, 200000);
  for (const size_t bytes : {100000, 200000}) ::operator delete(cache.Take(bytes));
}

void TestWhatIsKeptIsBounded() {
  BlockCache cache;
  constexpr size_t kBytes = size_t{1} << 24;
  std::vector<void*> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(cache.Take(kBytes));
  for (void* block : blocks) cache.Give(block, kBytes);
  CHECK_EQ(cache.kept_bytes(), BlockCache::kMostKept);
  while (cache.kept_bytes() > 0) ::operator delete(cache.Take(kBytes));
  cache.Give(cache.Take(100), 100);  // small ones are not its business
  CHECK_EQ(cache.kept_bytes(), size_t{0});
}

// No two owners at a time, on many threads, of many sizes; and one that moves.
void TestArrays() {
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([thread] {
      for (size_t round = 0; round < 200; ++round) {
        const size_t n = (round * 7919) % 40000;
        auto numbers = MakeRecycled<int64_t>(n);
        for (size_t i = 0; i < n; ++i) numbers[i] = thread;
        const auto moved = std::move(numbers);
        for (size_t i = 0; i < n; ++i) CHECK_EQ(moved[i], thread);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  TestSizes();
  TestABlockIsFoundAgainByItsSize();
  TestWhatIsKeptIsBounded();
  TestArrays();
}
