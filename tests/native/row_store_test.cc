#include "ops/table/host/row_store.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/native/check.h"

using gmeta::ChunkArena;
using gmeta::RowStore;

namespace {

// Two stores on one arena, as shards are: every record keeps its place and its content while both
// grow.
void TestRecordsStayWhereTheyAre() {
  constexpr size_t kBytes = 72;
  ChunkArena arena(kBytes);
  RowStore stores[2] = {{kBytes, &arena}, {kBytes, &arena}};
  std::vector<char*> places[2];
  for (uint32_t row = 0; row < 30000; ++row) {
    for (int s = 0; s < 2; ++s) {
      CHECK_EQ(stores[s].Allocate(), row);
      char* record = stores[s][row];
      std::memset(record, static_cast<int>(row * 2 + s), kBytes);
      places[s].push_back(record);
    }
  }
  for (uint32_t row = 0; row < 30000; ++row) {
    for (int s = 0; s < 2; ++s) {
      CHECK(stores[s][row] == places[s][row]);
      const char expected = static_cast<char>(row * 2 + s);
      for (size_t i = 0; i < kBytes; ++i) CHECK(places[s][row][i] == expected);
    }
  }
  // Chunks follow what is in use: at most a sixteenth, and a block a store, is not.
  const size_t used = 2 * 30000 * kBytes;
  CHECK(arena.bytes() >= used);
  CHECK(arena.bytes() <= used + used / 8);
}

void TestFreedRowsAreUsedFirst() {
  ChunkArena arena(8);
  RowStore store(8, &arena);
  for (uint32_t row = 0; row < 100; ++row) CHECK_EQ(store.Allocate(), row);
  const std::vector<uint32_t> freed = {7, 99, 0, 42};
  for (const uint32_t row : freed) store.Free(row);
  const size_t before = arena.bytes();
  std::vector<uint32_t> again;
  for (size_t i = 0; i < freed.size(); ++i) again.push_back(store.Allocate());
  CHECK(std::is_permutation(freed.begin(), freed.end(), again.begin()));
  CHECK_EQ(store.Allocate(), 100u);
  CHECK_EQ(arena.bytes(), before);
}

void TestClearedRowsAreUsedAgain() {
  ChunkArena arena(16);
  RowStore store(16, &arena);
  for (int i = 0; i < 5000; ++i) store.Allocate();
  store.Free(17);
  const size_t before = arena.bytes();
  store.Clear();
  for (uint32_t row = 0; row < 5000; ++row) CHECK_EQ(store.Allocate(), row);
  CHECK_EQ(arena.bytes(), before);
}

// A record of more than a chunk's usual size gets chunks that hold a block of it.
void TestWideRecords() {
  constexpr size_t kBytes = size_t{1} << 18;
  ChunkArena arena(kBytes);
  RowStore store(kBytes, &arena);
  for (uint32_t row = 0; row < 70; ++row) std::memset(store[store.Allocate()], 1, kBytes);
  for (uint32_t row = 0; row < 70; ++row) CHECK_EQ(int{store[row][kBytes - 1]}, 1);
}

}  // namespace

void TestReservedMemoryIsUsedBeforeNew() {
  constexpr size_t kBytes = 1000;
  ChunkArena arena(kBytes);
  RowStore store(kBytes, &arena);
  store.Allocate();
  arena.Reserve(100000);
  const size_t reserved = arena.bytes();
  CHECK(reserved >= 100000 * kBytes);
  for (int i = 1; i < 100000; ++i) std::memset(store[store.Allocate()], 1, kBytes);
  const size_t used = arena.bytes();
  CHECK(used <= reserved + (size_t{64} << 10));  // the rest of the chunk that was begun before
  arena.Reserve(1);                              // there is room for it
  CHECK_EQ(arena.bytes(), used);
}

int main() {
  TestReservedMemoryIsUsedBeforeNew();
  TestRecordsStayWhereTheyAre();
  TestFreedRowsAreUsedFirst();
  TestClearedRowsAreUsedAgain();
  TestWideRecords();
}
