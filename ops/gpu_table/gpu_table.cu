#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "ops/gpu_table/gpu_table.cuh"
#include "ops/gpu_table/update.cuh"
#include "ops/gpu_unique/gpu_unique.cuh"
#include "ops/gpu_unique/segments.cuh"
#include "ops/gpu_unique/workspace.cuh"

namespace gmeta {
namespace {

constexpr size_t kBlockBytes = size_t{4} << 20;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <class Vec, int kLog2Lanes>
void LaunchFind(const LookupBatch& batch, Uses uses, cudaStream_t stream) {
  const auto kernel = uses == Uses::kNone       ? FindRows<Vec, kLog2Lanes, Uses::kNone>
                      : uses == Uses::kDistinct ? FindRows<Vec, kLog2Lanes, Uses::kDistinct>
                                                : FindRows<Vec, kLog2Lanes, Uses::kShared>;
  kernel<<<BlocksOf(batch.n), kBlockThreads, 0, stream>>>(batch);
  CheckLaunch("looking rows up");
}

void LaunchFind(const LookupBatch& batch, bool vector, Uses uses, cudaStream_t stream) {
  const int log2 = Log2Lanes(batch.vectors);
  if (!vector) {
    return log2 <= 3 ? LaunchFind<float, 3>(batch, uses, stream)
                     : LaunchFind<float, 5>(batch, uses, stream);
  }
  switch (log2) {
    case 0:
      return LaunchFind<float4, 0>(batch, uses, stream);
    case 1:
      return LaunchFind<float4, 1>(batch, uses, stream);
    case 2:
      return LaunchFind<float4, 2>(batch, uses, stream);
    case 3:
      return LaunchFind<float4, 3>(batch, uses, stream);
    case 4:
      return LaunchFind<float4, 4>(batch, uses, stream);
    default:
      return LaunchFind<float4, 5>(batch, uses, stream);
  }
}

}  // namespace

GpuTable::GpuTable(const GpuTableOptions& options)
    : options_(options),
      layout_(options.dim, std::visit([&](const auto& o) { return o.SlotFloats(options.dim); },
                                      options.optimizer)),
      initial_slot_(std::visit([](const auto& o) { return o.InitialSlot(); }, options.optimizer)),
      policies_(options.admission, options.eviction, layout_.bytes()) {
  const DeviceScope device(options.device);
  const size_t floats = layout_.dim() + layout_.slot_floats();
  stride_ = static_cast<uint32_t>(layout_.dim() % 4 == 0 ? RoundUp(floats, 4) : floats);
  log2_block_rows_ = 5;
  while ((size_t{2} << log2_block_rows_) * (stride_ * sizeof(float) + sizeof(RowHeader)) <=
         kBlockBytes) {
    ++log2_block_rows_;
  }
  CheckCuda(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking), "making a stream");
  CheckCuda(cudaEventCreateWithFlags(&last_done_, cudaEventDisableTiming), "making an event");
  CheckCuda(cudaEventCreateWithFlags(&answered_, cudaEventDisableTiming), "making an event");
  CheckCuda(cudaMallocHost(&answer_, sizeof *answer_), "allocating host memory");
  last_stream_ = own_stream_;
  counters_ = DeviceMemory(options.allocator, sizeof(GpuCounters));
  CheckCuda(cudaMemsetAsync(counters_.as<void>(), 0, sizeof(GpuCounters), own_stream_),
            "clearing counters");
  GrowIndex(0, own_stream_);
  CheckCuda(cudaEventRecord(last_done_, own_stream_), "recording an event");
}

GpuTable::~GpuTable() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(options_.device);
  cudaEventSynchronize(last_done_);
  cudaEventDestroy(last_done_);
  cudaEventDestroy(answered_);
  cudaStreamDestroy(own_stream_);
  cudaFreeHost(answer_);
  cudaSetDevice(before);
}

RowsView GpuTable::rows() const {
  return {blocks_.as<char*>(),
          log2_block_rows_,
          stride_,
          static_cast<uint32_t>(dim()),
          static_cast<uint32_t>(slot_floats()),
          ring_.as<uint32_t>(),
          static_cast<uint32_t>(capacity_),
          counters_.as<GpuCounters>()};
}

void GpuTable::CheckBatch(int64_t n) const {
  Require(n >= 0 && n <= (1 << 30), "table '" + options_.name + "': at most 2^30 keys in a call, " +
                                        "got " + std::to_string(n) + ": split the batch");
}

LookupBatch GpuTable::BatchOf(const int64_t* keys, int64_t n, float* out) const {
  const bool vector = dim() % 4 == 0 && IsAligned(out);
  LookupBatch batch{};
  batch.index = index();
  batch.rows = rows();
  batch.keys = keys;
  batch.n = static_cast<uint32_t>(n);
  batch.out = out;
  batch.vectors = static_cast<uint32_t>(vector ? dim() / 4 : dim());
  batch.step = static_cast<uint32_t>(step_);
  batch.initializer = options_.initializer;
  batch.initial_slot = initial_slot_;
  batch.missing = missing_.as<uint32_t>();
  batch.turn = turn_;
  return batch;
}

void GpuTable::Lookup(const int64_t* keys, int64_t n, float* out, cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  if (n == 0) return;
  const LookupBatch batch = BatchOf(keys, n, out);
  LaunchFind(batch, batch.vectors != dim(), Uses::kNone, stream);
}

void GpuTable::LookupOrInsert(const int64_t* keys, int64_t n, bool distinct, float* out,
                              cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  if (n == 0) return;
  EvictFor(keys, n, stream);
  EnsureRoom(static_cast<uint64_t>(n), stream);
  FindAndInsert(keys, n, distinct, out, stream);
  most_rows_ += static_cast<uint64_t>(n);
  since_asked_ += static_cast<uint64_t>(n);
  AskForSize(static_cast<uint64_t>(n), stream);
}

void GpuTable::FindAndInsert(const int64_t* keys, int64_t n, bool distinct, float* out,
                             cudaStream_t stream) {
  if (missing_.bytes() < static_cast<size_t>(n) * sizeof(uint32_t)) {
    CheckCuda(cudaStreamSynchronize(stream), "waiting for a table's batches");
    missing_ = DeviceMemory();
    missing_ = DeviceMemory(options_.allocator,
                            RoundUp(static_cast<size_t>(n) * sizeof(uint32_t) * 5 / 4, 4096));
  }
  const LookupBatch batch = BatchOf(keys, n, out);
  const bool vector = batch.vectors != dim();
  LaunchFind(batch, vector, distinct ? Uses::kDistinct : Uses::kShared, stream);
  turn_ ^= 1;

  const uint8_t* admitted = nullptr;
  if (policies_.decide()) {
    const uint32_t count = ReadCounters(stream).missing[batch.turn];
    std::vector<uint32_t> positions(count);
    std::vector<int64_t> batch_keys(static_cast<size_t>(n));
    CheckCuda(cudaMemcpyAsync(positions.data(), batch.missing, sizeof(uint32_t) * count,
                              cudaMemcpyDeviceToHost, stream),
              "reading missing keys");
    CheckCuda(cudaMemcpyAsync(batch_keys.data(), keys, sizeof(int64_t) * n, cudaMemcpyDeviceToHost,
                              stream),
              "reading a batch's keys");
    CheckCuda(cudaStreamSynchronize(stream), "reading missing keys");
    std::sort(positions.begin(), positions.end());
    std::vector<MissingKey> missing(count);
    for (uint32_t i = 0; i < count; ++i) missing[i] = {positions[i], batch_keys[positions[i]]};
    const std::vector<uint8_t> verdicts = policies_.Admit(missing, batch.step);
    uint8_t* const flags = static_cast<uint8_t*>(Scratch(count + 1, stream));
    CheckCuda(cudaMemcpyAsync(batch.missing, positions.data(), sizeof(uint32_t) * count,
                              cudaMemcpyHostToDevice, stream),
              "writing missing keys");
    CheckCuda(cudaMemcpyAsync(flags, verdicts.data(), count, cudaMemcpyHostToDevice, stream),
              "writing what is admitted");
    CheckCuda(cudaStreamSynchronize(stream), "writing what is admitted");
    admitted = flags;
  }
  constexpr uint32_t kMostBlocks = 1024;
  const uint32_t blocks = std::min(BlocksOf(n), kMostBlocks);
  const auto kernel = vector ? InsertRows<float4> : InsertRows<float>;
  kernel<<<blocks, kBlockThreads, 0, stream>>>(batch, admitted, distinct);
  CheckLaunch("inserting rows");
}

void GpuTable::Update(const int64_t* keys, const float* gradients, int64_t n, float learning_rate,
                      bool distinct, cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  ++step_;
  if (n > 0 && distinct) {
    RunUpdate(keys, n, nullptr, gradients, nullptr, learning_rate, stream);
  } else if (n > 0) {
    const auto cut = [n](Workspace* space) {
      return std::make_tuple(space->Take<int64_t>(n), space->Take<int32_t>(n),
                             space->Take<int32_t>(1), space->Take<char>(UniqueBytes(n, 0)));
    };
    Workspace sizes(nullptr);
    cut(&sizes);
    Workspace space(Scratch(sizes.bytes() + SumsBytes(n, n), stream));
    const auto [distinct_keys, inverse, count, unique_space] = cut(&space);
    Unique(keys, n, 0, distinct_keys, inverse, nullptr, count, unique_space, stream);
    SumAndUpdate(distinct_keys, n, count, gradients, inverse, n, learning_rate, space.Take<char>(0),
                 stream);
  }
  SweepDueShards(stream);
}

void GpuTable::UpdateIndexed(const int64_t* keys, int64_t u, const float* gradients,
                             const int32_t* inverse, int64_t n, float learning_rate,
                             cudaStream_t stream) {
  CheckBatch(n);
  CheckBatch(u);
  const Turn turn(this, stream);
  ++step_;
  if (u > 0) {
    SumAndUpdate(keys, u, nullptr, gradients, inverse, n, learning_rate,
                 Scratch(SumsBytes(n, u), stream), stream);
  }
  SweepDueShards(stream);
}

// Where the optimizer needs a row's whole gradient at once, sums are written to memory.
bool GpuTable::WritesSums() const {
  return std::holds_alternative<RowWiseAdagrad>(options_.optimizer);
}

size_t GpuTable::SumsBytes(int64_t n, int64_t u) const {
  Workspace space(nullptr);
  space.Take<char>(SegmentsBytes(n, u, static_cast<int64_t>(dim())));
  if (WritesSums()) space.Take<float>(static_cast<size_t>(u) * dim());
  return space.bytes();
}

void GpuTable::SumAndUpdate(const int64_t* keys, int64_t u, const int32_t* count,
                            const float* gradients, const int32_t* inverse, int64_t n,
                            float learning_rate, void* workspace, cudaStream_t stream) {
  const int64_t d = static_cast<int64_t>(dim());
  Workspace space(workspace);
  char* const segments_space = space.Take<char>(SegmentsBytes(n, u, d));
  const SegmentsView segments =
      MakeSegments(gradients, d, inverse, n, u, count, segments_space, stream);
  if (!WritesSums()) {
    RunUpdate(keys, u, count, gradients, &segments, learning_rate, stream);
    return;
  }
  float* const sums = space.Take<float>(static_cast<size_t>(u) * dim());
  SumSegments(gradients, d, segments, u, count, sums, stream);
  RunUpdate(keys, u, count, sums, nullptr, learning_rate, stream);
}

void GpuTable::RunUpdate(const int64_t* keys, int64_t n, const int32_t* count,
                         const float* gradients, const SegmentsView* segments, float learning_rate,
                         cudaStream_t stream) {
  const bool vector = dim() % 4 == 0 && IsAligned(gradients);
  UpdateBatch batch{};
  batch.index = index();
  batch.rows = rows();
  batch.keys = keys;
  batch.n = static_cast<uint32_t>(n);
  batch.count = count;
  batch.gradients = gradients;
  batch.summed = segments == nullptr;
  if (segments != nullptr) batch.segments = *segments;
  batch.vectors = static_cast<uint32_t>(vector ? dim() / 4 : dim());
  batch.log2_lanes = static_cast<uint32_t>(Log2Lanes(batch.vectors));
  batch.step = static_cast<uint32_t>(step_);
  LaunchUpdate(batch, options_.optimizer, learning_rate, step_, vector, stream);
}

void GpuTable::Clear() {
  const Turn turn(this);
  CheckCuda(cudaMemsetAsync(slots_.as<void>(), 0, slots_.bytes(), own_stream_), "clearing keys");
  EmptyPool(own_stream_);
  policies_.Clear();
}

uint64_t GpuTable::Size() {
  const Turn turn(this);
  NoteSize(ReadCounters(own_stream_));
  return known_rows_;
}

int64_t GpuTable::Step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return step_;
}

TableStatistics GpuTable::Statistics() {
  const Turn turn(this);
  const GpuCounters now = ReadCounters(own_stream_);
  NoteSize(now);
  TableStatistics sum;
  sum.size = known_rows_;
  sum.capacity = slot_count();
  sum.bytes = slots_.bytes() + blocks_.bytes() + ring_.bytes() + policies_.bytes();
  for (const DeviceMemory& chunk : chunks_) sum.bytes += chunk.bytes();
  sum.hits = now.hits;
  sum.misses = now.misses;
  sum.inserts = now.inserts;
  sum.removes = now.removes;
  sum.updates = now.updates;
  sum.ignored = now.ignored;
  sum.rejects = now.rejects;
  sum.evictions = evictions_;
  return sum;
}

}  // namespace gmeta
