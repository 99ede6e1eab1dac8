// How a GPU table gets memory (gpu_table.cuh, "Growth" and "Waiting").

#include <algorithm>
#include <string>
#include <utility>

#include "ops/gpu_table/gpu_table.cuh"
#include "ops/gpu_table/growing.cuh"

namespace gmeta {
namespace {

constexpr uint64_t kFewestBuckets = 256;
constexpr uint64_t kMostBuckets = uint64_t{1} << 30;
constexpr uint64_t kMostRows = 0xfffffff0u;

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
  known_rows_ = most_rows_ = capacity_ - (counters.given - counters.taken);
  asked_ = false;
}

void GpuTable::AskForSize(uint64_t n, cudaStream_t stream) {
  const uint64_t limit = std::min(capacity_, KeysAtHardLoad(slot_count()));
  if (asked_ || most_rows_ + 4 * n <= limit) return;
  CheckCuda(cudaMemcpyAsync(answer_, counters_.as<void>(), sizeof *answer_, cudaMemcpyDeviceToHost,
                            stream),
            "reading a table's counters");
  CheckCuda(cudaEventRecord(answered_, stream), "recording an event");
  asked_ = true;
  since_asked_ = 0;
}

void GpuTable::EnsureRoom(uint64_t n, cudaStream_t stream) {
  if (asked_ && cudaEventQuery(answered_) == cudaSuccess) {
    const uint64_t since = since_asked_;
    NoteSize(*answer_);
    most_rows_ += since;
  }
  cudaGetLastError();  // "not ready" is no error
  const auto has_room = [&] {
    return most_rows_ + n <= std::min(capacity_, KeysAtHardLoad(slot_count())) &&
           known_rows_ <= KeysAtMostLoad(slot_count());
  };
  if (has_room()) return;
  NoteSize(ReadCounters(stream));
  if (known_rows_ > KeysAtMostLoad(slot_count()) ||
      known_rows_ + n > KeysAtHardLoad(slot_count())) {
    GrowIndex(known_rows_ + n, stream);
  }
  if (known_rows_ + n > capacity_) {
    // Twice a batch, so that the true number of rows is known before the next growth.
    GrowRows(std::max(known_rows_ + 2 * n, capacity_ + capacity_ / 8), stream);
  }
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
    Rehash<<<BlocksOf(slot_count()), kBlockThreads, 0, stream>>>(slots_.as<KeySlot>(), slot_count(),
                                                                 to);
    CheckLaunch("growing an index");
    CheckCuda(cudaStreamSynchronize(stream), "growing an index");
  }
  slots_ = std::move(larger);
  bucket_mask_ = to.bucket_mask;
}

void GpuTable::GrowRows(uint64_t rows, cudaStream_t stream) {
  if (rows <= capacity_) return;
  const uint64_t block_rows = uint64_t{1} << log2_block_rows_;
  const size_t block_bytes =
      (block_rows * (stride_ * sizeof(float) + sizeof(RowHeader)) + 255) / 256 * 256;
  const uint64_t added = (rows - capacity_ + block_rows - 1) / block_rows;
  const uint64_t capacity = capacity_ + added * block_rows;
  Require(capacity <= kMostRows, "table '" + options_.name + "': it has no numbers for " +
                                     std::to_string(capacity) + " rows: bound it by an eviction");
  // All that is new is made before anything changes, so that a lack of memory changes nothing.
  uint64_t on_device = added;
  if (options_.device_rows != 0) {
    const uint64_t left = options_.device_rows > capacity_ ? options_.device_rows - capacity_ : 0;
    on_device = std::min(added, (left + block_rows - 1) / block_rows);
  }
  std::vector<DeviceMemory> chunks;
  if (on_device > 0) chunks.emplace_back(options_.allocator, on_device * block_bytes);
  if (added > on_device) {
    chunks.push_back(DeviceMemory::Pinned((added - on_device) * block_bytes));
  }
  std::vector<char*> directory(block_count_);
  if (block_count_ > 0) {
    CheckCuda(cudaMemcpyAsync(directory.data(), blocks_.as<void>(), block_count_ * sizeof(char*),
                              cudaMemcpyDeviceToHost, stream),
              "reading a directory");
    CheckCuda(cudaStreamSynchronize(stream), "reading a directory");
  }
  for (const DeviceMemory& chunk : chunks) {
    for (size_t at = 0; at < chunk.bytes(); at += block_bytes) {
      directory.push_back(chunk.as<char>() + at);
    }
  }
  DeviceMemory blocks(options_.allocator, directory.size() * sizeof(char*));
  DeviceMemory ring(options_.allocator, capacity * sizeof(uint32_t));
  GpuCounters now = ReadCounters(stream);
  const uint64_t left = now.given - now.taken;
  const uint64_t fresh = added * block_rows;
  FillRing<<<BlocksOf(left + fresh), kBlockThreads, 0, stream>>>(
      ring_.as<uint32_t>(), static_cast<uint32_t>(capacity_), now.taken,
      static_cast<uint32_t>(left), static_cast<uint32_t>(capacity_), static_cast<uint32_t>(fresh),
      ring.as<uint32_t>());
  CheckLaunch("filling a pool");
  CheckCuda(cudaMemcpyAsync(blocks.as<void>(), directory.data(), directory.size() * sizeof(char*),
                            cudaMemcpyHostToDevice, stream),
            "writing a directory");
  now.taken = 0;
  now.given = left + fresh;
  CheckCuda(cudaMemcpyAsync(&counters_.as<GpuCounters>()->taken, &now.taken,
                            sizeof now.taken + sizeof now.given, cudaMemcpyHostToDevice, stream),
            "writing a pool's state");
  CheckCuda(cudaStreamSynchronize(stream), "growing a table's rows");
  for (DeviceMemory& chunk : chunks) chunks_.push_back(std::move(chunk));
  blocks_ = std::move(blocks);
  ring_ = std::move(ring);
  block_count_ = directory.size();
  capacity_ = capacity;
  NoteSize(now);
}

void GpuTable::EmptyPool(cudaStream_t stream) {
  GpuCounters now = ReadCounters(stream);
  if (capacity_ > 0) {
    FillRing<<<BlocksOf(capacity_), kBlockThreads, 0, stream>>>(
        nullptr, 1, 0, 0, 0, static_cast<uint32_t>(capacity_), ring_.as<uint32_t>());
    CheckLaunch("filling a pool");
  }
  now.taken = 0;
  now.given = capacity_;
  CheckCuda(cudaMemcpyAsync(&counters_.as<GpuCounters>()->taken, &now.taken,
                            sizeof now.taken + sizeof now.given, cudaMemcpyHostToDevice, stream),
            "writing a pool's state");
  CheckCuda(cudaStreamSynchronize(stream), "emptying a table");
  NoteSize(now);
}

void GpuTable::Reserve(uint64_t rows) {
  const Turn turn(this);
  GrowIndex(rows, own_stream_);
  GrowRows(rows, own_stream_);
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
