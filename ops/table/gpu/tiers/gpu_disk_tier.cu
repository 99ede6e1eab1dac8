#include <algorithm>
#include <utility>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/tiers/disk.cuh"
#include "ops/table/gpu/tiers/gpu_disk_tier.cuh"

namespace gmeta {
namespace {

constexpr size_t kStagingBytes = size_t{16} << 20;
// The most that a request reads; the lookup reads the rest.
constexpr size_t kAskedBytes = size_t{64} << 20;
// One copy brings its list.
constexpr size_t kAskedRows = (PinnedMemory::kPiece >> 1) / sizeof(FoundRow);
// The least that a spill writes, if so much may go: it scans the index twice.
constexpr size_t kSpillBytes = size_t{64} << 20;

void Copy(void* to, const void* from, size_t bytes, const char* doing, cudaStream_t stream) {
  if (bytes == 0) return;
  CheckCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), doing);
}

}  // namespace

struct GpuDiskTier::Asked {
  disk::AheadReader::Request request;
  disk::AheadReader* reader = nullptr;
  std::vector<char*> to;          // the records of the staging area, for the host
  Found found;                    // as kernels list them; `rows` isn't used
  DeviceMemory counts;            // DiskCounts
  DeviceMemory copied;            // in host memory: DiskCounts, and the list
  uint32_t staged = 0, most = 0;  // the staging area
  uint32_t batch = 0;
  cudaEvent_t used = nullptr;  // what reads or writes the above last

  DiskCounts* copied_counts() const { return reinterpret_cast<DiskCounts*>(copied.host()); }
  FoundRow* copied_rows() const { return reinterpret_cast<FoundRow*>(copied.host() + kRowsAt); }
  FoundRow* rows_of_kernels() const {
    return reinterpret_cast<FoundRow*>(copied.as<char>() + kRowsAt);
  }
  // Starts reading the listed rows. Runs when the list has arrived.
  static void Read(void* asked) {
    auto* const self = static_cast<Asked*>(asked);
    const uint32_t n = std::min(self->copied_counts()->found, self->most);
    self->request.wishes.clear();
    for (uint32_t i = 0; i < n; ++i) {
      self->request.wishes.push_back({self->copied_rows()[i].row, self->to[i]});
    }
    self->reader->Ask(&self->request);
  }

 private:
  static constexpr size_t kRowsAt = 256;
  static_assert(sizeof(DiskCounts) <= kRowsAt);
};

GpuDiskTier::GpuDiskTier(const std::string& owner, const gmeta_gpu_allocator& allocator,
                         const std::string& folder, GpuRowStore* store, uint32_t form,
                         uint32_t form_mask, uint32_t pins)
    : owner_(owner),
      allocator_(allocator),
      store_(store),
      form_(form),
      form_mask_(form_mask),
      pins_(pins),
      records_(folder, store->record_bytes()),
      counts_(allocator, sizeof(DiskCounts)) {}

GpuDiskTier::~GpuDiskTier() {
  Clear();
  for (auto& asked : idle_) cudaEventDestroy(asked->used);
}

DiskView GpuDiskTier::View(const TablePlace& place, const Found& found) const {
  DiskView view{};
  view.index = place.index;
  view.rows = place.rows;
  view.form = form_;
  view.form_mask = form_mask_;
  view.batch = batch_;
  view.pinned_from = batch_ >= pins_ ? batch_ - pins_ + 1 : 1;
  view.step = place.step;
  view.staged = staged_;
  view.counts = counts_.as<DiskCounts>();
  view.found = found.memory.as<FoundRow>();
  view.most = static_cast<uint32_t>(found.memory.bytes() / sizeof(FoundRow));
  return view;
}

void GpuDiskTier::Begin(Found* found, uint32_t n, cudaStream_t stream) {
  if (found->memory.bytes() < n * sizeof(FoundRow)) {
    CheckCuda(cudaStreamSynchronize(stream), "waiting for a table's batches");
    found->memory = DeviceMemory();
    found->memory = DeviceMemory(allocator_, (size_t{n} + n / 4 + 256) * sizeof(FoundRow));
  }
  CheckCuda(cudaMemsetAsync(counts_.as<void>(), 0, counts_.bytes(), stream), "clearing counts");
}

void GpuDiskTier::Read(Found* found, cudaStream_t stream) {
  uint32_t count = 0;
  Copy(&count, &counts_.as<DiskCounts>()->found, sizeof count, "counting rows", stream);
  CheckCuda(cudaStreamSynchronize(stream), "counting rows");
  found->rows.resize(std::min<size_t>(count, found->memory.bytes() / sizeof(FoundRow)));
  Copy(found->rows.data(), found->memory.as<void>(), found->rows.size() * sizeof(FoundRow),
       "listing rows", stream);
  CheckCuda(cudaStreamSynchronize(stream), "listing rows");
}

uint32_t GpuDiskTier::Find(const TablePlace& place, const int64_t* keys, uint32_t n,
                           const int32_t* count, cudaStream_t stream) {
  Begin(&found_, n, stream);
  if (++batch_ == kUsed) batch_ = 1;  // marks of an older round pin some rows longer
  Launch(ListOnDisk, BlocksOf(n), kBlockThreads, 0, stream, "finding rows on disk",
         View(place, found_), keys, n, count);
  Read(&found_, stream);
  return static_cast<uint32_t>(found_.rows.size());
}

void GpuDiskTier::ReadRecords(uint32_t first, uint32_t n) {
  std::vector<disk::NumberedRecords::Wish> wishes(n);
  for (uint32_t i = 0; i < n; ++i) {
    wishes[i] = {found_.rows[first + i].row, store_->HostRecord(staged_ + i)};
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    records_.Read(wishes);
  } catch (const disk::DiskError& error) {
    throw CudaError(GMETA_CUDA_OUT_OF_MEMORY, owner_ + error.what());
  }
}

void GpuDiskTier::Bring(const TablePlace& place, cudaStream_t stream) {
  const auto count = static_cast<uint32_t>(found_.rows.size());
  const bool vector = place.rows.stride % 4 == 0;
  for (uint32_t done = 0; done < count; done += staged_rows_) {
    const uint32_t n = std::min(staged_rows_, count - done);
    if (done != 0) CheckCuda(cudaStreamSynchronize(stream), "waiting for staged rows");
    ReadRecords(done, n);
    Launch(vector ? BringRows<uint4> : BringRows<uint32_t>, BlocksOf(n), kBlockThreads, 0, stream,
           "bringing rows from disk", View(place, found_), done, n, place.counters);
  }
}

std::unique_ptr<GpuDiskTier::Asked> GpuDiskTier::TakeAsked(uint32_t n, cudaStream_t stream) {
  if (reader_ == nullptr) reader_ = std::make_unique<disk::AheadReader>(&records_, &mutex_);
  if (!idle_.empty()) {
    std::unique_ptr<Asked> asked = std::move(idle_.back());
    idle_.pop_back();
    CheckCuda(cudaEventSynchronize(asked->used), "waiting for rows from disk");
    return asked;
  }
  auto asked = std::make_unique<Asked>();
  asked->reader = reader_.get();
  const uint64_t bound = std::min<uint64_t>(kAskedRows, kAskedBytes / store_->record_bytes());
  asked->most = static_cast<uint32_t>(std::max<uint64_t>(1, std::min<uint64_t>(n + n / 4, bound)));
  asked->staged = store_->AddStaging(asked->most, stream);
  for (uint32_t i = 0; i < asked->most; ++i) {
    asked->to.push_back(store_->HostRecord(asked->staged + i));
  }
  asked->found.memory = DeviceMemory(allocator_, asked->most * sizeof(FoundRow));
  asked->counts = DeviceMemory(allocator_, sizeof(DiskCounts));
  asked->copied = DeviceMemory::Pinned(256 + asked->most * sizeof(FoundRow));
  CheckCuda(cudaEventCreateWithFlags(&asked->used, cudaEventDisableTiming), "making an event");
  return asked;
}

void GpuDiskTier::Ask(const TablePlace& place, const int64_t* keys, uint32_t n,
                      cudaStream_t stream) {
  std::unique_ptr<Asked> asked = TakeAsked(n, stream);
  if (++batch_ == kUsed) batch_ = 1;
  asked->batch = batch_;
  DiskView view = View(place, asked->found);
  view.rows = store_->View(place.rows.dim, place.rows.slot_floats, place.pools, place.counters);
  view.counts = asked->counts.as<DiskCounts>();
  CheckCuda(cudaMemsetAsync(view.counts, 0, sizeof(DiskCounts), stream), "clearing counts");
  Launch(ListOnDisk, BlocksOf(n), kBlockThreads, 0, stream, "finding rows on disk", view, keys, n,
         nullptr);
  Copy(asked->copied_counts(), view.counts, sizeof(DiskCounts), "listing rows on disk", stream);
  Copy(asked->copied_rows(), asked->found.memory.as<void>(), asked->most * sizeof(FoundRow),
       "listing rows on disk", stream);
  CheckCuda(cudaLaunchHostFunc(stream, Asked::Read, asked.get()), "asking for rows on disk");
  CheckCuda(cudaEventRecord(asked->used, stream), "recording an event");
  asked_.push_back(std::move(asked));
}

bool GpuDiskTier::IsToInstall(size_t most, uint32_t* rows) {
  if (asked_.empty()) return false;
  Asked& asked = *asked_.front();
  if (asked_.size() > most) {
    CheckCuda(cudaEventSynchronize(asked.used), "waiting for rows from disk");
    reader_->Await(asked.request);
  } else if (cudaEventQuery(asked.used) != cudaSuccess || !reader_->IsDone(asked.request)) {
    cudaGetLastError();  // "not ready" is no error
    return false;
  }
  *rows = static_cast<uint32_t>(asked.request.versions.size());
  return true;
}

void GpuDiskTier::Install(const TablePlace& place, cudaStream_t stream) {
  std::unique_ptr<Asked> asked = std::move(asked_.front());
  asked_.pop_front();
  const auto n = static_cast<uint32_t>(asked->request.versions.size());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t i = 0; i < n; ++i) {
      FoundRow& row = asked->copied_rows()[i];
      if (records_.version(row.row) != asked->request.versions[i]) row.row = kNoNumber;
    }
  }
  if (n > 0) {
    DiskView view = View(place, asked->found);
    view.batch = asked->batch;
    view.found = asked->rows_of_kernels();
    view.staged = asked->staged;
    const bool vector = place.rows.stride % 4 == 0;
    Launch(vector ? BringRows<uint4> : BringRows<uint32_t>, BlocksOf(n), kBlockThreads, 0, stream,
           "bringing rows from disk", view, 0u, n, place.counters);
    CheckCuda(cudaEventRecord(asked->used, stream), "recording an event");
  }
  idle_.push_back(std::move(asked));
}

void GpuDiskTier::Stage(const TablePlace& place, uint32_t* numbers, uint32_t n,
                        cudaStream_t stream) {
  Require(n <= staged_rows_, owner_ + "more rows are to be staged than there is room for");
  Begin(&found_, n, stream);
  Launch(FindNumbersOnDisk, BlocksOf(n), kBlockThreads, 0, stream, "finding rows on disk",
         View(place, found_), numbers, n);
  Read(&found_, stream);
  const auto found = static_cast<uint32_t>(found_.rows.size());
  if (found == 0) return;
  ReadRecords(0, found);
  Launch(RenumberStaged, BlocksOf(found), kBlockThreads, 0, stream, "staging rows",
         View(place, found_), found, numbers);
}

void GpuDiskTier::Choose(const TablePlace& place, const GpuIndex& index, uint64_t rows,
                         cudaStream_t stream) {
  leaving_.rows.clear();
  CheckCuda(cudaMemsetAsync(counts_.as<void>(), 0, counts_.bytes(), stream), "clearing counts");
  index.ForEachPart([&](const KeySlot* slots, uint64_t count) {
    Launch(CountAges, BlocksOf(count), kBlockThreads, 0, stream, "counting rows by age",
           View(place, leaving_), slots, count);
  });
  DiskCounts counts;
  Copy(&counts, counts_.as<void>(), sizeof counts, "counting rows by age", stream);
  CheckCuda(cudaStreamSynchronize(stream), "counting rows by age");
  uint32_t oldest = kAges;
  uint64_t may_go = 0;
  while (oldest > 0 && may_go < rows) may_go += counts.ages[--oldest];
  const auto n = static_cast<uint32_t>(std::min(may_go, rows));
  if (n == 0) return;
  Begin(&leaving_, n, stream);
  DiskView view = View(place, leaving_);
  view.most = n;
  index.ForEachPart([&](const KeySlot* slots, uint64_t count) {
    Launch(ListOldest, BlocksOf(count), kBlockThreads, 0, stream, "choosing rows for the disk",
           view, slots, count, oldest);
  });
  Read(&leaving_, stream);
  leaving_.rows.resize(n);  // as many of the youngest as it takes
}

std::vector<uint32_t> GpuDiskTier::TakeNumbers(const TablePlace& place, uint32_t n,
                                               cudaStream_t stream) {
  PoolCounters pool;
  const auto read = [&](uint64_t from, uint64_t to) {
    std::vector<uint32_t> numbers(to - from);
    const uint64_t capacity = store_->disk_capacity();
    for (uint64_t at = from; at < to;) {
      const uint64_t count = std::min(to - at, capacity - at % capacity);
      Copy(numbers.data() + (at - from), store_->disk_ring() + at % capacity,
           count * sizeof(uint32_t), "reading numbers of the disk", stream);
      at += count;
    }
    CheckCuda(cudaStreamSynchronize(stream), "reading numbers of the disk");
    return numbers;
  };
  const auto read_pool = [&] {
    Copy(&pool, &place.pools->disk, sizeof pool, "reading a pool's state", stream);
    CheckCuda(cudaStreamSynchronize(stream), "reading a pool's state");
  };
  read_pool();
  const std::vector<uint32_t> given = read(settled_, pool.given);
  settled_ = pool.given;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const uint32_t number : given) records_.Free(number);
  }
  if (pool.free() < n) {
    store_->GrowDisk(std::max<uint64_t>(n - pool.free(), store_->disk_capacity() / 8), place.pools,
                     stream);
    read_pool();
    settled_ = pool.given;
  }
  return read(pool.taken, pool.taken + n);
}

void GpuDiskTier::WriteRecords(const std::vector<uint32_t>& numbers) {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t written = 0;
  try {
    for (; written < numbers.size(); ++written) {
      records_.Put(numbers[written], store_->HostRecord(leaving_.rows[written].row));
    }
  } catch (const disk::DiskError& error) {
    while (written > 0) records_.Free(numbers[--written]);
    throw CudaError(GMETA_CUDA_OUT_OF_MEMORY, owner_ + error.what());
  }
}

void GpuDiskTier::Spill(TablePlace place, const GpuIndex& index, uint64_t rows,
                        cudaStream_t stream) {
  if (staged_rows_ == 0) {
    const uint64_t most = std::max<uint64_t>(
        1, std::min<uint64_t>(kStagingBytes / store_->record_bytes(), place.rows.far.capacity));
    const uint64_t block = store_->geometry().block_rows();
    staged_rows_ = static_cast<uint32_t>((most + block - 1) / block * block);
    staged_ = store_->AddStaging(staged_rows_, stream);
  }
  any_ = true;
  const auto update = [&] {
    place.rows = store_->View(place.rows.dim, place.rows.slot_floats, place.pools, place.counters);
  };
  update();
  const uint64_t some =
      std::min<uint64_t>(kSpillBytes / store_->record_bytes(), place.rows.far.capacity / 8);
  Choose(place, index, std::max(rows, some), stream);
  const auto n = static_cast<uint32_t>(leaving_.rows.size());
  if (n == 0) return;
  const std::vector<uint32_t> numbers = TakeNumbers(place, n, stream);
  update();
  WriteRecords(numbers);
  const DeviceMemory to(allocator_, n * sizeof(uint32_t));
  Copy(to.as<void>(), numbers.data(), to.bytes(), "writing numbers of the disk", stream);
  Launch(LeaveMemory, BlocksOf(n), kBlockThreads, 0, stream, "moving rows to disk",
         View(place, leaving_), to.as<const uint32_t>(), n, place.counters);
  PoolCounters pool;
  Copy(&pool, &place.pools->disk, sizeof pool, "reading a pool's state", stream);
  CheckCuda(cudaStreamSynchronize(stream), "moving rows to disk");
  pool.taken += n;
  Copy(&place.pools->disk.taken, &pool.taken, sizeof pool.taken, "writing a pool's state", stream);
  CheckCuda(cudaStreamSynchronize(stream), "writing a pool's state");
}

void GpuDiskTier::Clear() {
  for (; !asked_.empty(); asked_.pop_front()) {
    cudaEventSynchronize(asked_.front()->used);
    reader_->Await(asked_.front()->request);
    idle_.push_back(std::move(asked_.front()));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  records_.Clear();
  settled_ = store_->disk_capacity();
  any_ = false;
}

}  // namespace gmeta
