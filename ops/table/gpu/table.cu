#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "ops/table/gpu/device/update.cuh"
#include "ops/table/gpu/table.cuh"
#include "ops/unique/gpu/segments.cuh"
#include "ops/unique/gpu/unique.cuh"
#include "ops/unique/gpu/workspace.cuh"

namespace gmeta {
namespace {

// The most row numbers. An index entry is a row number + 1; in a table with half rows, the top bit
// of the number shows the form.
constexpr uint64_t kMostRows = 0xfffffff0u;
constexpr uint64_t kMostRowsOfEither = 0x7ffffff0u;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// How many full rows may be in GPU memory; 0: all.
uint64_t NearFull(const GpuTableOptions& options) {
  return options.half.half_below == 0 ? options.hbm_rows : NearFullRows(options.hbm_rows);
}

// Either form of rows takes half of the host memory.
uint64_t HalfOf(uint64_t host_bytes) { return (host_bytes + 1) / 2; }

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

GpuTable::GpuTable(const GpuTableOptions& options)
    : options_(options),
      layout_(options.dim, std::visit([&](const auto& o) { return o.SlotFloats(options.dim); },
                                      options.optimizer)),
      initial_slot_(std::visit([](const auto& o) { return o.InitialSlot(); }, options.optimizer)),
      full_("table '" + options.name + "': ", options.allocator,
            RowGeometry::OfFull(layout_, NearFull(options)),
            options.half.half_below == 0 ? kMostRows : kMostRowsOfEither, NearFull(options),
            options.half.half_below == 0 ? options.host_bytes : HalfOf(options.host_bytes)),
      index_("table '" + options.name + "': ", options.allocator),
      policies_(options.admission, options.eviction, layout_.bytes(), HalfLayout(layout_).bytes()) {
  const DeviceScope device(options.device);
  if (options.half.half_below != 0) {
    half_.emplace("table '" + options.name + "': ", options.allocator,
                  RowGeometry::OfHalf(layout_, options.hbm_rows), kMostRowsOfEither,
                  options.hbm_rows, HalfOf(options.host_bytes));
  }
  const uint32_t mask = half_ ? HalfRule::kHalf : 0;
  if (options.hbm_rows != 0) {
    const auto moves = [&](uint32_t form) {
      return std::make_unique<RowMoves>(options.allocator, options.lookahead, form, mask);
    };
    full_moves_ = moves(0);
    if (half_) half_moves_ = moves(mask);
  }
  if (options.host_bytes != 0) {
    const auto disk = [&](GpuRowStore* store, uint32_t form) {
      // A batch requests its rows up to three times: in its prefetch, lookup and update.
      const uint32_t pins = 3 * (options.lookahead + 2);
      return std::make_unique<GpuDiskTier>("table '" + options.name + "': ", options.allocator,
                                           options.disk_folder, store, form, mask, pins);
    };
    full_disk_ = disk(&full_, 0);
    if (half_) half_disk_ = disk(&*half_, mask);
  }
  CheckCuda(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking), "making a stream");
  CheckCuda(cudaEventCreateWithFlags(&last_done_, cudaEventDisableTiming), "making an event");
  CheckCuda(cudaEventCreateWithFlags(&answered_, cudaEventDisableTiming), "making an event");
  CheckCuda(cudaMallocHost(&answer_, sizeof *answer_), "allocating host memory");
  last_stream_ = own_stream_;
  counters_ = DeviceMemory(options.allocator, sizeof(GpuCounters));
  CheckCuda(cudaMemsetAsync(counters_.as<void>(), 0, sizeof(GpuCounters), own_stream_),
            "clearing counters");
  if (const std::vector<float>& l2 = options.prior.l2(); !l2.empty()) {
    l2_ = DeviceMemory(options.allocator, sizeof(float) * l2.size());
    CheckCuda(cudaMemcpyAsync(l2_.as<void>(), l2.data(), l2_.bytes(), cudaMemcpyHostToDevice,
                              own_stream_),
              "writing the prior");
  }
  if (policies_.evict()) {
    const std::vector<ShardMarks> marks = policies_.marks();
    marks_ = DeviceMemory(options.allocator, sizeof(ShardMarks) * marks.size());
    CheckCuda(cudaMemcpyAsync(marks_.as<void>(), marks.data(), marks_.bytes(),
                              cudaMemcpyHostToDevice, own_stream_),
              "writing the marks of shards");
  }
  index_.Begin(counters()->part_keys, own_stream_);
  epochs_.resize(policies_.shards());
  epoch_numbers_ = DeviceMemory(options.allocator, sizeof(uint32_t) * epochs_.size());
  EndEpochs(policies_.all_shards(), own_stream_);
  CheckCuda(cudaEventRecord(last_done_, own_stream_), "recording an event");
}

GpuTable::~GpuTable() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(options_.device);
  cudaEventSynchronize(last_done_);
  full_moves_.reset();
  half_moves_.reset();
  full_disk_.reset();
  half_disk_.reset();
  cudaEventDestroy(last_done_);
  cudaEventDestroy(answered_);
  cudaStreamDestroy(own_stream_);
  cudaFreeHost(answer_);
  cudaSetDevice(before);
}

IndexView GpuTable::index() const {
  IndexView view = index_.View();
  if (policies_.evict()) view.shard_keys = counters()->shard_keys;
  view.log2_shards = policies_.log2_shards();
  return view;
}

RowsView GpuTable::full_rows() const {
  return full_.View(dim(), slot_floats(), &counters()->full, counters());
}

MixedRowsView GpuTable::mixed_rows() const {
  return {full_rows(),
          half_->View(dim(), slot_floats(), &counters()->half, counters()),
          options_.half,
          full_.geometry().stride,
          static_cast<uint32_t>(dim()),
          static_cast<uint32_t>(slot_floats()),
          counters(),
          policies_.evict(),
          policies_.log2_shards()};
}

void GpuTable::CheckBatch(int64_t n) const {
  Require(n >= 0 && n <= (1 << 30), "table '" + options_.name + "': at most 2^30 keys in a call, " +
                                        "got " + std::to_string(n) + ": split the batch");
}

template <class Rows>
LookupBatch<Rows> GpuTable::BatchOf(const Rows& rows, const int64_t* keys, int64_t n, float* out,
                                    const StampsView& stamps) const {
  const bool vector = dim() % 4 == 0 && IsAligned(out);
  LookupBatch<Rows> batch{};
  batch.index = index();
  batch.rows = rows;
  batch.keys = keys;
  batch.n = static_cast<uint32_t>(n);
  batch.out = out;
  batch.vectors = static_cast<uint32_t>(vector ? dim() / 4 : dim());
  batch.step = static_cast<uint32_t>(step_);
  batch.moves = options_.prior.empty();
  batch.initializer = options_.initializer;
  batch.initial_slot = initial_slot_;
  batch.missing = missing_.as<uint32_t>();
  batch.turn = turn_;
  batch.rare_no_more = rare_no_more_.as<int64_t>();
  batch.stamps = stamps;
  return batch;
}

void GpuTable::Lookup(const int64_t* keys, int64_t n, float* out, cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  Find(keys, n, out, {}, stream);
}

void GpuTable::Peek(const int64_t* keys, int64_t n, float* out, int64_t* written,
                    cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  StampsView view = stamps();
  view.written = written;
  Find(keys, n, out, view, stream);
}

void GpuTable::LookupOrInsert(const int64_t* keys, int64_t n, bool distinct, float* out,
                              cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  FindOrInsert(keys, n, distinct, out, {}, stream);
}

void GpuTable::Reread(const int64_t* keys, int64_t n, bool insert, bool distinct,
                      const float* peeked, const int64_t* peeked_stamps, float* out,
                      int64_t* changed, cudaStream_t stream) {
  CheckBatch(n);
  const Turn turn(this, stream);
  StampsView view = stamps();
  view.peeked = peeked_stamps;
  view.changed = reinterpret_cast<unsigned long long*>(changed);
  CheckCuda(cudaMemsetAsync(changed, 0, sizeof *changed, stream), "clearing a count");
  if (peeked != out && n > 0) {
    CheckCuda(cudaMemcpyAsync(out, peeked, sizeof(float) * static_cast<size_t>(n) * dim(),
                              cudaMemcpyDeviceToDevice, stream),
              "copying peeked rows");
  }
  if (insert) {
    FindOrInsert(keys, n, distinct, out, view, stream);
  } else {
    Find(keys, n, out, view, stream);
  }
}

void GpuTable::EndEpochs(uint64_t shards, cudaStream_t stream) {
  std::vector<uint32_t> numbers;
  for (size_t i = 0; i < epochs_.size(); ++i) {
    if ((shards >> i & 1) != 0) epochs_[i].End();
    numbers.push_back(epochs_[i].number());
  }
  CheckCuda(cudaMemcpyAsync(epoch_numbers_.as<void>(), numbers.data(), epoch_numbers_.bytes(),
                            cudaMemcpyHostToDevice, stream),
            "writing epochs");
}

void GpuTable::Find(const int64_t* keys, int64_t n, float* out, const StampsView& stamps,
                    cudaStream_t stream) {
  if (n == 0) return;
  InstallArrived(stream);
  if (stamps.is_used()) BringRows(keys, n, nullptr, stream);
  WithRows([&](const auto& rows) {
    const auto batch = BatchOf(rows, keys, n, out, stamps);
    LaunchFind(batch, batch.vectors != dim(), Uses::kNone, stream);
  });
  if (!stamps.is_used() && HasRowsOnDisk()) ReadFromDisk(keys, n, out, stream);
}

void GpuTable::FindOrInsert(const int64_t* keys, int64_t n, bool distinct, float* out,
                            const StampsView& stamps, cudaStream_t stream) {
  if (n == 0) return;
  InstallArrived(stream);
  if (listed_ != 0) PromoteListed(listed_, stream);
  EvictFor(keys, n, stream);
  const auto most_new = static_cast<uint64_t>(n);  // all of one form
  EnsureRoomAndBring(half_ ? 0 : most_new, half_ ? most_new : 0, keys, n, stream);
  WithRows([&](const auto& rows) { FindAndInsert(rows, keys, n, distinct, out, stamps, stream); });
  NoteNew(static_cast<uint64_t>(n));
  since_asked_ += static_cast<uint64_t>(n);
  if (half_) PromoteListed(static_cast<uint64_t>(n), stream);
  AskForSize(static_cast<uint64_t>(n), stream);
}

void GpuTable::MakeRoomIn(DeviceMemory* memory, size_t bytes, cudaStream_t stream) {
  if (memory->bytes() >= bytes) return;
  CheckCuda(cudaStreamSynchronize(stream), "waiting for a table's batches");
  *memory = DeviceMemory();
  *memory = DeviceMemory(options_.allocator, RoundUp(bytes * 5 / 4, 4096));
}

template <class Rows>
void GpuTable::FindAndInsert(const Rows& rows, const int64_t* keys, int64_t n, bool distinct,
                             float* out, const StampsView& stamps, cudaStream_t stream) {
  MakeRoomIn(&missing_, static_cast<size_t>(n) * sizeof(uint32_t), stream);
  if (Rows::kMixed) MakeRoomIn(&rare_no_more_, static_cast<size_t>(n) * sizeof(int64_t), stream);
  const LookupBatch<Rows> batch = BatchOf(rows, keys, n, out, stamps);
  const bool vector = batch.vectors != dim();
  LaunchFind(batch, vector, distinct ? Uses::kDistinct : Uses::kShared, stream);
  turn_ ^= 1;
  NoteGiven(stream);
  const uint8_t* const admitted = policies_.admits_some() ? Admit(batch, stream) : nullptr;
  LaunchInsert(batch, vector, admitted, distinct, stream);
}

template <class Rows>
const uint8_t* GpuTable::Admit(const LookupBatch<Rows>& batch, cudaStream_t stream) {
  const uint32_t count = ReadCounters(stream).missing[batch.turn];
  std::vector<uint32_t> positions(count);
  std::vector<int64_t> keys(batch.n);
  CheckCuda(cudaMemcpyAsync(positions.data(), batch.missing, sizeof(uint32_t) * count,
                            cudaMemcpyDeviceToHost, stream),
            "reading missing keys");
  CheckCuda(cudaMemcpyAsync(keys.data(), batch.keys, sizeof(int64_t) * batch.n,
                            cudaMemcpyDeviceToHost, stream),
            "reading a batch's keys");
  CheckCuda(cudaStreamSynchronize(stream), "reading missing keys");
  std::sort(positions.begin(), positions.end());
  std::vector<MissingKey> missing(count);
  for (uint32_t i = 0; i < count; ++i) missing[i] = {positions[i], keys[positions[i]]};
  uint8_t* const flags = static_cast<uint8_t*>(Scratch(count + 1, stream));
  const std::vector<uint8_t> verdicts = policies_.Admit(missing, batch.step);
  CheckCuda(cudaMemcpyAsync(batch.missing, positions.data(), sizeof(uint32_t) * count,
                            cudaMemcpyHostToDevice, stream),
            "writing missing keys");
  CheckCuda(cudaMemcpyAsync(flags, verdicts.data(), count, cudaMemcpyHostToDevice, stream),
            "writing what is admitted");
  CheckCuda(cudaStreamSynchronize(stream), "writing what is admitted");
  return flags;
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
  CoolDueShards(stream);
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
  CoolDueShards(stream);
  SweepDueShards(stream);
}

// If the optimizer needs a row's whole gradient at once, the sums are written to memory.
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
  RunUpdate(keys, u, count, sums, &segments, learning_rate, stream);
}

void GpuTable::RunUpdate(const int64_t* keys, int64_t n, const int32_t* count,
                         const float* gradients, const SegmentsView* segments, float learning_rate,
                         cudaStream_t stream) {
  const bool vector = dim() % 4 == 0 && IsAligned(gradients);
  const bool cools = options_.half.cools();
  if (cools) {
    if (listed_ != 0) PromoteListed(listed_, stream);
    MakeRoomIn(&rare_no_more_, static_cast<size_t>(n) * sizeof(int64_t), stream);
  }
  BringRows(keys, n, count, stream);
  WithRows([&](const auto& rows) {
    UpdateBatch<std::decay_t<decltype(rows)>> batch{};
    batch.index = index();
    batch.rows = rows;
    batch.keys = keys;
    batch.n = static_cast<uint32_t>(n);
    batch.count = count;
    batch.gradients = gradients;
    batch.summed = segments == nullptr || WritesSums();
    if (segments != nullptr) batch.segments = *segments;
    batch.vectors = static_cast<uint32_t>(vector ? dim() / 4 : dim());
    batch.log2_lanes = static_cast<uint32_t>(Log2Lanes(batch.vectors));
    batch.step = static_cast<uint32_t>(step_);
    batch.l2 = options_.prior.empty() ? nullptr : l2_.as<const float>();
    batch.most = MostStrength(learning_rate);
    batch.rounding = {options_.round_at_random, options_.initializer.seed};
    batch.rare_no_more = cools ? rare_no_more_.as<int64_t>() : nullptr;
    LaunchUpdate(batch, options_.optimizer, learning_rate, step_, vector, stream);
  });
  if (cools) {
    PromoteListed(static_cast<uint64_t>(n), stream);
    since_moved_ += static_cast<uint64_t>(n);  // an answer on its way doesn't count them
  }
}

void GpuTable::Clear() {
  const Turn turn(this);
  InstallMoves(0, own_stream_);
  index_.Clear(own_stream_);
  EmptyPools(own_stream_);
  EndEpochs(policies_.all_shards(), own_stream_);
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
  sum.capacity = index_.slots();
  sum.bytes = index_.bytes() + policies_.bytes();
  ForEachStore([&](GpuRowStore* store, StorePools* pools, RowMoves* moves, GpuDiskTier* disk) {
    sum.bytes += store->bytes() + (moves != nullptr ? moves->bytes() : 0);
    if (disk == nullptr) return;
    sum.bytes += disk->bytes();
    sum.disk_bytes += disk->file_bytes();
    sum.disk_rows += store->DiskRows(pools == &counters()->full ? now.full : now.half);
  });
  sum.host_rows = full_.FarRows(now.full);
  if (half_) {
    sum.host_rows += half_->FarRows(now.half);
    sum.half_rows = half_->NoteUsed(now.half);
  }
  sum.hits = now.hits;
  sum.misses = now.misses;
  sum.inserts = now.inserts;
  sum.removes = now.removes;
  sum.updates = now.updates;
  sum.ignored = now.ignored;
  sum.rejects = now.rejects;
  sum.evictions = evictions_;
  sum.brought = now.brought;
  sum.spilled = now.spilled;
  sum.crowded = now.crowded;
  return sum;
}

}  // namespace gmeta
