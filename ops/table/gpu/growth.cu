// How a GPU table grows (table.cuh, "Growth" and "Waiting").

#include <algorithm>
#include <string>
#include <utility>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/growing.cuh"
#include "ops/table/gpu/table.cuh"

namespace gmeta {
namespace {

constexpr uint64_t kFewestBuckets = 256;
constexpr uint64_t kMostBuckets = uint64_t{1} << 30;

// An index grows when it is fuller than kMostLoad; a batch may overfill it up to kHardLoad.
uint64_t KeysAtMostLoad(uint64_t slots) { return slots / 4 * 3; }
uint64_t KeysAtHardLoad(uint64_t slots) { return slots / 16 * 15; }

}  // namespace

GpuCounters GpuTable::ReadCounters(cudaStream_t stream) {
  GpuCounters now;
  CheckCuda(cudaMemcpyAsync(&now, counters_.as<void>(), sizeof now, cudaMemcpyDeviceToHost, stream),
            "reading a table's counters");
  CheckCuda(cudaStreamSynchronize(stream), "reading a table's counters");
  return now;
}

void GpuTable::NoteSize(const GpuCounters& counters) {
  known_rows_ = full_.NoteUsed(counters.full);
  if (half_) known_rows_ += half_->NoteUsed(counters.half);
  most_rows_ = known_rows_;
  asked_ = false;
}

void GpuTable::AskForSize(uint64_t n, cudaStream_t stream) {
  // Promotions add rows to the full store.
  const bool far = most_rows_ + 4 * n <= KeysAtHardLoad(slot_count()) && HasRoom(4 * n, 4 * n);
  if (asked_ || (far && full_moves_ == nullptr)) return;
  CheckCuda(cudaMemcpyAsync(answer_, counters_.as<void>(), sizeof *answer_, cudaMemcpyDeviceToHost,
                            stream),
            "reading a table's counters");
  CheckCuda(cudaEventRecord(answered_, stream), "recording an event");
  asked_ = true;
  since_asked_ = since_moved_ = 0;
}

void GpuTable::EnsureRoom(uint64_t full, uint64_t half, cudaStream_t stream) {
  const uint64_t n = full + half;
  if (asked_ && cudaEventQuery(answered_) == cudaSuccess) {
    NoteSize(*answer_);
    most_rows_ += since_asked_;
    full_.MayHaveTaken(since_asked_ + since_moved_);
    if (half_) half_->MayHaveTaken(since_asked_ + since_moved_);
  }
  cudaGetLastError();  // "not ready" is no error
  const auto has_room = [&] {
    return most_rows_ + n <= KeysAtHardLoad(slot_count()) && HasRoom(full, half) &&
           known_rows_ <= KeysAtMostLoad(slot_count());
  };
  if (has_room()) return;
  NoteSize(ReadCounters(stream));
  if (known_rows_ > KeysAtMostLoad(slot_count()) ||
      known_rows_ + n > KeysAtHardLoad(slot_count())) {
    GrowIndex(known_rows_ + n, stream);
  }
  while (!full_.HasRoom(full)) GrowFull(full_.Wish(full), stream);
  while (half_ && !half_->HasRoom(half)) GrowHalf(half_->Wish(half), stream);
}

void GpuTable::GrowIndex(uint64_t rows, cudaStream_t stream) {
  uint64_t buckets = kFewestBuckets;
  if (slots_.bytes() != 0) buckets = uint64_t{bucket_mask_} + 1;
  while (KeysAtMostLoad(buckets * kBucketSlots) < rows) buckets *= 2;
  if (slots_.bytes() != 0 && buckets == uint64_t{bucket_mask_} + 1) return;
  Require(buckets <= kMostBuckets, "table '" + options_.name + "': it has no room for " +
                                       std::to_string(rows) + " keys: bound it by an eviction");
  DeviceMemory larger(options_.allocator, buckets * kBucketSlots * sizeof(KeySlot));
  CheckCuda(cudaMemsetAsync(larger.as<void>(), 0, larger.bytes(), stream), "clearing an index");
  const IndexView to{larger.as<KeySlot>(), static_cast<uint32_t>(buckets - 1)};
  if (slots_.bytes() != 0) {
    Launch(Rehash, BlocksOf(slot_count()), kBlockThreads, 0, stream, "growing an index",
           slots_.as<KeySlot>(), slot_count(), to);
    CheckCuda(cudaStreamSynchronize(stream), "growing an index");
  }
  slots_ = std::move(larger);
  bucket_mask_ = to.bucket_mask;
}

// Growing a store starts its pool's counts again, so a copy of the counters that was requested
// before is no longer valid.
void GpuTable::GrowFull(uint64_t rows, cudaStream_t stream) {
  InstallMoves(0, stream);
  full_.Grow(rows, &counters()->full, stream);
  asked_ = false;
}

void GpuTable::GrowHalf(uint64_t rows, cudaStream_t stream) {
  InstallMoves(0, stream);
  half_->Grow(rows, &counters()->half, stream);
  asked_ = false;
}

void GpuTable::EmptyPools(cudaStream_t stream) {
  full_.Clear(&counters()->full, stream);
  if (half_) half_->Clear(&counters()->half, stream);
  known_rows_ = most_rows_ = 0;
  asked_ = false;
  const auto clear = [&](auto* counter) {
    CheckCuda(cudaMemsetAsync(counter, 0, sizeof *counter, stream), "clearing a counter");
  };
  clear(&counters()->shard_halves);
  clear(&counters()->rare_no_more);
  listed_ = 0;
}

void GpuTable::Reserve(uint64_t rows) {
  const Turn turn(this);
  GrowIndex(rows, own_stream_);
  half_ ? GrowHalf(rows, own_stream_) : GrowFull(rows, own_stream_);
}

void* GpuTable::Scratch(size_t bytes, cudaStream_t stream) {
  if (scratch_.bytes() < bytes) {
    CheckCuda(cudaStreamSynchronize(stream), "waiting for a table's batches");
    scratch_ = DeviceMemory();
    scratch_ = DeviceMemory(options_.allocator, (bytes + bytes / 4 + 4095) / 4096 * 4096);
  }
  return scratch_.as<void>();
}

}  // namespace gmeta
