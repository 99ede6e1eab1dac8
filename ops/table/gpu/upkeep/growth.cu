// How a GPU table grows (table.cuh, "Growth" and "Waiting").

#include <algorithm>
#include <string>
#include <utility>

#include "ops/table/gpu/table.cuh"

namespace gmeta {

GpuCounters GpuTable::ReadCounters(cudaStream_t stream) {
  GpuCounters now;
  CheckCuda(cudaMemcpyAsync(&now, counters_.as<void>(), sizeof now, cudaMemcpyDeviceToHost, stream),
            "reading a table's counters");
  CheckCuda(cudaStreamSynchronize(stream), "reading a table's counters");
  Require(now.homeless == 0,
          "table '" + options_.name + "': a part of its index is full, and it has lost " +
              std::to_string(now.homeless) +
              " keys, because many keys of a batch agree in the same bits of their hash: hash the "
              "ids by another function first, or put the table on the CPU");
  return now;
}

void GpuTable::NoteSize(const GpuCounters& counters) {
  known_rows_ = full_.NoteUsed(counters.full);
  if (half_) known_rows_ += half_->NoteUsed(counters.half);
  index_.NoteKeys(counters.part_keys);
  policies_.NoteSizes(counters.shard_keys);
  asked_ = false;
}

void GpuTable::AskForSize(uint64_t n, cudaStream_t stream) {
  // Promotions add rows to the full store.
  const bool far = index_.HasRoom(4 * n) && HasRoom(4 * n, 4 * n) && !policies_.MayBeFull(4 * n);
  if (asked_ || (far && full_moves_ == nullptr)) return;
  CheckCuda(cudaMemcpyAsync(answer_, counters_.as<void>(), sizeof *answer_, cudaMemcpyDeviceToHost,
                            stream),
            "reading a table's counters");
  CheckCuda(cudaEventRecord(answered_, stream), "recording an event");
  asked_ = true;
  since_asked_ = since_moved_ = 0;
}

void GpuTable::NoteAnswer() {
  if (asked_ && cudaEventQuery(answered_) == cudaSuccess) {
    NoteSize(*answer_);
    index_.MayHaveTaken(since_asked_);
    policies_.MayHaveTaken(since_asked_);
    full_.MayHaveTaken(since_asked_ + since_moved_);
    if (half_) half_->MayHaveTaken(since_asked_ + since_moved_);
  }
  cudaGetLastError();  // "not ready" is no error
}

void GpuTable::EnsureRoom(uint64_t full, uint64_t half, cudaStream_t stream) {
  const uint64_t n = full + half;
  NoteAnswer();
  if (index_.HasRoom(n) && !index_.IsFull() && HasRoom(full, half)) return;
  NoteSize(ReadCounters(stream));
  if (index_.IsFull()) {
    index_.CutFullest(n, stream);
    NoteSize(ReadCounters(stream));
  }
  if (!index_.HasRoom(n)) GrowIndex(n, stream);
  if (!full_.HasRoom(full)) MakeRoom(&full_, full, false, stream);
  if (half_ && !half_->HasRoom(half)) MakeRoom(&*half_, half, false, stream);
}

void GpuTable::GrowIndex(uint64_t n, cudaStream_t stream) {
  while (index_.Grow(n, stream)) NoteSize(ReadCounters(stream));
}

void GpuTable::EmptyPools(cudaStream_t stream) {
  full_.Clear(&counters()->full, stream);
  if (half_) half_->Clear(&counters()->half, stream);
  if (full_disk_ != nullptr) full_disk_->Clear();
  if (half_disk_ != nullptr) half_disk_->Clear();
  known_rows_ = 0;
  asked_ = false;
  const auto clear = [&](auto* counter) {
    CheckCuda(cudaMemsetAsync(counter, 0, sizeof *counter, stream), "clearing a counter");
  };
  clear(&counters()->shard_keys);
  clear(&counters()->shard_halves);
  clear(&counters()->rare_no_more);
  listed_ = 0;
}

void GpuTable::Reserve(uint64_t rows) {
  const Turn turn(this);
  NoteSize(ReadCounters(own_stream_));
  GrowIndex(rows - std::min(rows, known_rows_), own_stream_);
  InstallMoves(0, own_stream_);
  GpuRowStore& store = half_ ? *half_ : full_;
  store.Grow(std::min(rows, store.most_in_memory()), half_ ? &counters()->half : &counters()->full,
             own_stream_);
  asked_ = false;  // growth starts the counts of pools again
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
