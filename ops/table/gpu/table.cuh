// GpuTable: the dynamic embedding table in the memory of one GPU.
//
//        batch of keys
//             |            GpuIndex    key -> row number, 64-byte buckets       (gpu_index.cuh)
//             v            Rows        row number -> record, in blocks          (rows.cuh)
//   few kernels per call   Pools       numbers of free rows
//                          Policies    on the host: admission, eviction, journal   (policies.h)
//
// It has the same content as the CPU's table (ops/table/host/table.h): the same records, initial
// rows to the last bit, optimizers, policies, statistics and saved content. It differs in how it
// works:
//
//   Lookups  One kernel finds keys and copies rows; a second inserts missing keys (lookup.cuh).
//            Memory access bounds them: for a row of 64 floats, they read 256 bytes and write 256,
//            and the index adds one access of 64.
//   Updates  One kernel finds rows, sums gradients, and runs the optimizer (update.cuh). If keys
//            may occur twice, gradients are first put in order (ops/unique/gpu/segments.cuh), so
//            that sums are added in the order of the batch and results are the same in every run.
//   Growth   The index grows a part at a time, and few parts in a batch, so that no batch waits for
//            long (gpu_index.cuh). Memory for rows is added in chunks; no record ever moves. A
//            chunk is an eighth of the memory so far, but at most half a GiB or two batches' rows.
//   Forms    A table of two precisions has a store of rows for each precision, and kernels of its
//            own that are compiled from the same source (mixed_rows.cuh). New rows are made in the
//            half store; a row that has been used often enough is promoted at the end of the
//            lookup. If rows cool down, an update ends with a scan of the index for those of the
//            shards whose turn it is, and waits for their number.
//   Waiting  A kernel can't make the table grow. So the host keeps an upper bound of the number of
//            rows: the last number it read, plus all keys of inserting batches since. As long as
//            the bound leaves room, nothing waits. When the bound comes near the capacity, a copy
//            of the true number to the host is queued behind the batches; usually it has arrived
//            when it is needed. The number of rows that a batch promotes is known once its keys are
//            found. A table of two precisions waits for that number if there is no room to promote
//            the rows of all keys, so that it needn't keep room for them.
//   Tiers    A table may keep a bounded number of rows in GPU memory and the others in host memory
//            (tiers/flights.cuh). A prefetch moves a later batch's rows to GPU memory beside
//            compute; lookups install what has arrived, and wait for a batch that was prefetched
//            `lookahead` batches ago.
//   Disk     A table of three tiers bounds its rows in host memory too (tiers/disk.cuh). A batch's
//            rows on disk are brought to memory before its kernels run; a prefetch makes a thread
//            read them ahead. A lookup that inserts nothing, and a save, read them where they are.
//   Evicting Victims are selected and erased on the GPU (eviction.cuh). The GPU counts the rows of
//            each shard; the host reads the counts once their upper bound exceeds a high mark.
//   Ahead    A peek is a lookup that writes stamps, and a reread one that compares them
//            (stamps.cuh).
//   Order    Calls take turns (a mutex); if a call's stream differs from the last call's, an event
//            makes its work wait for that of the last call. So kernels of a table never overlap,
//            and each may rely on the results of the previous one.

#ifndef GMETA_OPS_TABLE_GPU_TABLE_CUH_
#define GMETA_OPS_TABLE_GPU_TABLE_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/table/core/logical_shards.h"
#include "ops/table/core/optimizers.h"
#include "ops/table/core/row_prior.h"
#include "ops/table/core/row_record.h"
#include "ops/table/core/stamp.h"
#include "ops/table/core/statistics.h"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/mixed_rows.cuh"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/table/gpu/memory/device_memory.cuh"
#include "ops/table/gpu/memory/gpu_index.cuh"
#include "ops/table/gpu/memory/row_store.cuh"
#include "ops/table/gpu/policies.h"
#include "ops/table/gpu/tiers/gpu_disk_tier.cuh"
#include "ops/table/gpu/tiers/row_moves.cuh"
#include "ops/unique/gpu/segments.cuh"

namespace gmeta {

struct GpuTableOptions {
  std::string name;
  size_t dim = 1;
  SparseOptimizer optimizer = Sgd{};
  Initializer initializer;
  Admission admission;
  std::optional<Eviction> eviction;
  HalfRule half{0};              // which rows are half; none by default
  bool round_at_random = false;  // updates of half rows; else to nearest
  uint64_t hbm_rows = 0;         // rows beyond this many are in host memory; 0: none are
  uint32_t lookahead = 1;        // batches that a prefetch is ahead of its lookup
  uint64_t host_bytes = 0;       // rows beyond these bytes of host memory are on disk; 0: none are
  std::string disk_folder;       // where
  RowPrior prior;
  int device = 0;
  gmeta_gpu_allocator allocator{};
};

// The rows that a scan selects: those in the logical shards of `range` and in the set `shards` (one
// bit per shard; the top log2_shards bits of the hash number the shard), last used at min_last_step
// or later.
struct Scan {
  LogicalRange range;
  uint32_t min_last_step;
  uint64_t shards;
  int log2_shards;
};

class GpuTable {
 public:
  explicit GpuTable(const GpuTableOptions& options);
  ~GpuTable();
  GpuTable(const GpuTable&) = delete;
  GpuTable& operator=(const GpuTable&) = delete;

  size_t dim() const { return layout_.dim(); }
  size_t slot_floats() const { return layout_.slot_floats(); }

  // Batches: see table_abi.h.
  void Lookup(const int64_t* keys, int64_t n, float* out, cudaStream_t stream);
  void LookupOrInsert(const int64_t* keys, int64_t n, bool distinct, float* out,
                      cudaStream_t stream);
  void Peek(const int64_t* keys, int64_t n, float* out, int64_t* stamps, cudaStream_t stream);
  void Reread(const int64_t* keys, int64_t n, bool insert, bool distinct, const float* peeked,
              const int64_t* stamps, float* out, int64_t* changed, cudaStream_t stream);
  void Update(const int64_t* keys, const float* gradients, int64_t n, float learning_rate,
              bool distinct, cudaStream_t stream);
  void UpdateIndexed(const int64_t* keys, int64_t u, const float* gradients, const int32_t* inverse,
                     int64_t n, float learning_rate, cudaStream_t stream);
  void Prefetch(const int64_t* keys, int64_t n, cudaStream_t stream);
  void Contains(const int64_t* keys, int64_t n, uint8_t* found, cudaStream_t stream);
  // `removed` is null or receives the number of removed rows.
  void Remove(const int64_t* keys, int64_t n, int64_t* removed, cudaStream_t stream);
  uint64_t Evict(int64_t at, uint64_t turns, cudaStream_t stream);

  void Reserve(uint64_t rows);
  void Clear();
  uint64_t Size();
  int64_t Step();
  TableStatistics Statistics();

  // Saving (gpu_table_saving.cu).
  void ExportShards(LogicalRange range, uint32_t min_last_step, bool cut_journal,
                    gmeta_gpu_table_allocate allocate, void* context);
  struct ImportColumns {
    const int64_t* keys;
    const float* rows;
    const float* slots;
    const int64_t* frequency;
    const int64_t* last_step;
  };
  void Import(const ImportColumns& columns, int64_t n, int64_t step, bool replace);
  void StartJournal(size_t limit);
  void DropCutRemovals();
  bool JournalWhole();
  void ExportAdmission(gmeta_gpu_table_allocate_admission allocate, void* context);
  size_t FilterBytes();
  size_t filters() const { return policies_.shards(); }
  void ExportFilter(size_t shard, uint8_t* to);
  // Returns false if the filter has another size.
  bool ImportAdmission(const int64_t* keys, const int64_t* counts, int64_t n, const uint8_t* filter,
                       size_t filter_bytes, size_t first, bool replace);

 private:
  class Turn;  // the lock, the device and the order of streams, held during a call

  IndexView index() const;
  GpuCounters* counters() const { return counters_.as<GpuCounters>(); }
  RowsView full_rows() const;
  MixedRowsView mixed_rows() const;
  // Calls visit(view) with the table's view of its rows, which is one of the two above.
  template <class Visit>
  void WithRows(const Visit& visit) const {
    half_ ? visit(mixed_rows()) : visit(full_rows());
  }
  void CheckBatch(int64_t n) const;
  template <class Rows>
  LookupBatch<Rows> BatchOf(const Rows& rows, const int64_t* keys, int64_t n, float* out,
                            const StampsView& stamps) const;

  // Makes room for at least `full` and `half` more rows. Some of these rows may exist already.
  void EnsureRoom(uint64_t full, uint64_t half, cudaStream_t stream);
  bool HasRoom(uint64_t full, uint64_t half) const {
    return full_.HasRoom(full) && (!half_ || half_->HasRoom(half));
  }
  // Notes that up to n new rows may have been made.
  void NoteNew(uint64_t n) {
    index_.MayHaveTaken(n);
    policies_.MayHaveTaken(n);
    (half_ ? *half_ : full_).MayHaveTaken(n);
  }
  // Calls visit(store, pools, moves, disk) for the rows of either form.
  template <class Visit>
  void ForEachStore(const Visit& visit) {
    visit(&full_, &counters()->full, full_moves_.get(), full_disk_.get());
    if (half_) visit(&*half_, &counters()->half, half_moves_.get(), half_disk_.get());
  }
  TablePlace PlaceOf(const GpuRowStore& store, StorePools* pools) const;
  // Installs the rows that have arrived, and waits for all but the last `most` prefetches.
  void InstallMoves(size_t most, cudaStream_t stream);
  // The same, before a batch looks rows up.
  void InstallArrived(cudaStream_t stream) {
    InstallMoves(options_.lookahead, stream);
    InstallAsked(options_.lookahead, stream);
  }
  // Returns how many full rows and half rows n rows of an import are, from number `first` on.
  std::pair<uint64_t, uint64_t> CountForms(const ImportColumns& from, size_t first, size_t n,
                                           cudaStream_t stream);
  // Notes in the pools, before a kernel takes rows, which numbers have been given back.
  void NoteGiven(cudaStream_t stream);
  // Grows the index until it has room for n more keys. Reads the counters.
  void GrowIndex(uint64_t n, cudaStream_t stream);
  // Makes room for this many more rows of a store: by growth, and once it may grow no more, by
  // writing others to disk. The room is in `host` memory if possible, else anywhere.
  void MakeRoom(GpuRowStore* store, uint64_t rows, bool host, cudaStream_t stream);
  void EmptyPools(cudaStream_t stream);
  GpuCounters ReadCounters(cudaStream_t stream);
  void NoteSize(const GpuCounters& counters);
  void AskForSize(uint64_t n, cudaStream_t stream);
  // Notes the answer, if it has arrived.
  void NoteAnswer();

  // Rows on disk (disk.cu).
  bool HasRowsOnDisk() const;
  // Brings the rows of n keys, or of the first *count, to memory.
  void BringRows(const int64_t* keys, int64_t n, const int32_t* count, cudaStream_t stream);
  // Starts reading the rows of a later batch, and brings those that have been read: all but those
  // of the last `most` batches.
  void AskForRows(const int64_t* keys, int64_t n, cudaStream_t stream);
  void InstallAsked(size_t most, cudaStream_t stream);
  // Brings the rows, and makes room for new rows as EnsureRoom does.
  void EnsureRoomAndBring(uint64_t full, uint64_t half, const int64_t* keys, int64_t n,
                          cudaStream_t stream);
  // Puts the numbers of staged copies in place of the numbers of rows on disk. There are at most
  // MostStaged() numbers. The copies are there until the next call of this function.
  void Stage(uint32_t* numbers, uint32_t n, cudaStream_t stream);
  uint32_t MostStaged() const;
  // Writes the rows on disk of n keys to `out`.
  void ReadFromDisk(const int64_t* keys, int64_t n, float* out, cudaStream_t stream);

  // Makes a piece of memory at least `bytes` bytes long. Its content may be lost.
  void MakeRoomIn(DeviceMemory* memory, size_t bytes, cudaStream_t stream);
  // Returns scratch memory, which is valid until the next call of this function.
  void* Scratch(size_t bytes, cudaStream_t stream);

  // The lookups, with the stamps of a peek or a reread.
  void Find(const int64_t* keys, int64_t n, float* out, const StampsView& stamps,
            cudaStream_t stream);
  void FindOrInsert(const int64_t* keys, int64_t n, bool distinct, float* out,
                    const StampsView& stamps, cudaStream_t stream);
  template <class Rows>
  void FindAndInsert(const Rows& rows, const int64_t* keys, int64_t n, bool distinct, float* out,
                     const StampsView& stamps, cudaStream_t stream);
  StampsView stamps() const {
    return {epoch_numbers_.as<const uint32_t>(), policies_.log2_shards()};
  }
  // Ends the epochs of some shards (as bits), whose rows were removed or overwritten.
  void EndEpochs(uint64_t shards, cudaStream_t stream);
  // Promotes the rows of the keys that a lookup has listed, of which there are at most `most`.
  void PromoteListed(uint64_t most, cudaStream_t stream);
  // Makes the rows half that have cooled down, after an update.
  void CoolDueShards(cudaStream_t stream);
  // Decides which of a lookup's missing keys get a row. Returns flags in the order of
  // batch.missing, which this sorts.
  template <class Rows>
  const uint8_t* Admit(const LookupBatch<Rows>& batch, cudaStream_t stream);
  void RunUpdate(const int64_t* keys, int64_t n, const int32_t* count, const float* gradients,
                 const SegmentsView* segments, float learning_rate, cudaStream_t stream);
  // The bytes of workspace that it takes to sum gradients of n positions to u rows.
  size_t SumsBytes(int64_t n, int64_t u) const;
  bool WritesSums() const;
  void SumAndUpdate(const int64_t* keys, int64_t u, const int32_t* count, const float* gradients,
                    const int32_t* inverse, int64_t n, float learning_rate, void* workspace,
                    cudaStream_t stream);

  // Evict before a batch that inserts, and after an update.
  void EvictFor(const int64_t* keys, int64_t n, cudaStream_t stream);
  void SweepDueShards(cudaStream_t stream);
  // As of step `now`, if rows expire in a sweep. Call NoteSize before it.
  uint64_t EvictShards(uint64_t shards, bool sweep, uint32_t now, cudaStream_t stream);
  // The same for shards that have n rows.
  uint64_t EvictSome(uint64_t shards, uint32_t n, bool sweep, uint32_t now, cudaStream_t stream);
  // Notes the victims of each shard, whose keys are in `gone` if there is a journal. Returns their
  // number.
  uint64_t NoteEvicted(const std::vector<uint32_t>& victims, const int64_t* gone,
                       cudaStream_t stream);
  // Runs SelectRows (maintenance.cuh).
  void LaunchSelect(const Scan& scan, int64_t* keys, uint32_t* numbers, uint32_t* live,
                    uint32_t* found, cudaStream_t stream);

  const GpuTableOptions options_;
  const RowLayout layout_;
  float initial_slot_;
  std::mutex mutex_;
  cudaStream_t own_stream_ = nullptr;  // for calls without a stream
  cudaStream_t last_stream_ = nullptr;
  cudaEvent_t last_done_ = nullptr;

  GpuRowStore full_;
  std::optional<GpuRowStore> half_;                     // only in tables of two precisions
  std::unique_ptr<RowMoves> full_moves_, half_moves_;   // only in tables of several tiers
  std::unique_ptr<GpuDiskTier> full_disk_, half_disk_;  // only in tables of three
  GpuIndex index_;
  DeviceMemory counters_;
  DeviceMemory l2_;  // of the prior; empty: none
  DeviceMemory missing_;
  DeviceMemory rare_no_more_;  // keys whose rows are to be promoted
  uint64_t listed_ = 0;        // at most this many keys in it wait for memory
  DeviceMemory cold_;          // keys whose rows have cooled down
  DeviceMemory scratch_;
  uint32_t turn_ = 0;

  int64_t step_ = 0;
  uint64_t evictions_ = 0;
  // The last number of rows that was read. The index and the stores have bounds of their own. If a
  // copy of the counters is in progress (asked_), since_asked_ keys have come since it was
  // requested, and since_moved_ rows may have been given numbers of another tier.
  uint64_t known_rows_ = 0;
  uint64_t since_asked_ = 0;
  uint64_t since_moved_ = 0;
  bool asked_ = false;
  cudaEvent_t answered_ = nullptr;
  GpuCounters* answer_ = nullptr;  // in pinned host memory

  GpuTablePolicies policies_;
  DeviceMemory marks_;         // of its shards, if it evicts
  std::vector<Epoch> epochs_;  // of the shards of policies_
  DeviceMemory epoch_numbers_;
};

// The lock, the device and the place in the order of streams that a call holds while it runs.
class GpuTable::Turn {
 public:
  Turn(GpuTable* table, cudaStream_t stream)
      : lock_(table->mutex_), device_(table->options_.device), table_(table), stream_(stream) {
    if (table->last_stream_ == stream) return;
    CheckCuda(cudaStreamWaitEvent(stream, table->last_done_, 0), "waiting for another stream");
    table->last_stream_ = stream;
  }
  // For a call on the table's own stream.
  explicit Turn(GpuTable* table) : Turn(table, table->own_stream_) {}
  ~Turn() { cudaEventRecord(table_->last_done_, stream_); }

 private:
  std::lock_guard<std::mutex> lock_;
  DeviceScope device_;
  GpuTable* table_;
  cudaStream_t stream_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_TABLE_CUH_
