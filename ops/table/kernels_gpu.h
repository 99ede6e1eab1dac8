// The engine of tables in a GPU's memory: the C interface of ops/table/gpu, on the op's stream and
// with memory from TensorFlow, which may have taken all of the GPU's memory.

#ifndef GMETA_OPS_TABLE_KERNELS_GPU_H_
#define GMETA_OPS_TABLE_KERNELS_GPU_H_

#include <memory>
#include <optional>
#include <utility>

#include "ops/common/kernels_beside.h"
#include "ops/table/gpu/table_abi.h"
#include "ops/table/host/table.h"
#include "ops/table/kernels.h"

namespace gmeta {

class GpuEngine {
 public:
  static constexpr char kDevice[] = "GPU";
  static constexpr int64_t kMaxKeys = int64_t{1} << 30;

  GpuEngine(gmeta_gpu_table* table, bool has_tiers) : table_(table), has_tiers_(has_tiers) {}
  GpuEngine(const GpuEngine&) = delete;
  GpuEngine& operator=(const GpuEngine&) = delete;
  ~GpuEngine() { gmeta_gpu_table_destroy(table_); }

  // Returns Unimplemented for settings that a table in host memory supports and a GPU table
  // doesn't.
  static absl::Status Make(OpKernelContext* context, const TableSettings& settings,
                           std::unique_ptr<GpuEngine>* out) {
    gmeta_gpu_table_options options{};
    options.name = settings.name.c_str();
    options.dim = settings.dim;
    options.seed = settings.seed;
    const auto set = [](const TableSettings::Part& part, const char** kind, const double** values,
                        int64_t* count) {
      *kind = part.kind.c_str();
      *values = part.parameters.data();
      *count = static_cast<int64_t>(part.parameters.size());
    };
    set(settings.optimizer, &options.optimizer, &options.optimizer_parameters,
        &options.optimizer_parameter_count);
    set(settings.initializer, &options.initializer, &options.initializer_parameters,
        &options.initializer_parameter_count);
    set(settings.admission, &options.admission, &options.admission_parameters,
        &options.admission_parameter_count);
    set(settings.eviction, &options.eviction, &options.eviction_parameters,
        &options.eviction_parameter_count);
    options.half_below = settings.half_below;
    options.half_life = settings.half_life;
    options.round_at_random = settings.round_at_random ? 1 : 0;
    options.hbm_rows = settings.hbm_rows;
    options.host_bytes = settings.memory_bytes;
    options.disk_folder = settings.disk_folder.c_str();
    options.lookahead = settings.lookahead;
    options.l2 = settings.l2.data();
    options.l2_count = static_cast<int64_t>(settings.l2.size());
    options.device = -1;  // the current device: an op runs with its own device as the current one
    options.allocator = {&Allocate, &Release,
                         context->device()->GetAllocator(tensorflow::AllocatorAttributes())};
    gmeta_gpu_table* table = nullptr;
    TF_RETURN_IF_ERROR(CudaStatus(gmeta_gpu_table_create(&options, &table)));
    *out = std::make_unique<GpuEngine>(table, settings.hbm_rows > 0);
    return absl::OkStatus();
  }

  int64_t dim() const { return gmeta_gpu_table_dim(table_); }
  int64_t slot_floats() const { return gmeta_gpu_table_slot_floats(table_); }

  absl::Status Lookup(OpKernelContext* context, const int64_t* keys, int64_t n, bool insert,
                      bool distinct, float* rows) {
    void* const stream = CudaStream(context);
    return CudaStatus(
        insert ? gmeta_gpu_table_lookup_or_insert(table_, keys, n, distinct, rows, stream)
               : gmeta_gpu_table_lookup(table_, keys, n, rows, stream));
  }

  // Reads rows beside the compute stream. A table in tiers has streams of its own for the rows that
  // move, and takes memory while it reads, which isn't safe there.
  static void Peek(OpKernelContext* context, const FoundTable<GpuEngine>& found,
                   const int64_t* keys, int64_t n, float* rows, int64_t* stamps,
                   AsyncOpKernel::DoneCallback done) {
    const auto peek = [&](void* stream) {
      return CudaStatus(gmeta_gpu_table_peek(found.table->table_, keys, n, rows, stamps, stream));
    };
    if (n == 0) return done();
    if (found.table->has_tiers_) {
      OP_REQUIRES_OK_ASYNC(context, peek(CudaStream(context)), done);
      return done();
    }
    const auto begin = [&](SideStream* side) {
      TF_RETURN_IF_ERROR(CudaStatus(side->Follow()));
      return peek(side->stream());
    };
    RunBeside(context, begin, [found] { return absl::OkStatus(); }, std::move(done));
  }

  absl::Status Reread(OpKernelContext* context, const int64_t* keys, int64_t n, bool insert,
                      bool distinct, const float* peeked, const int64_t* stamps, float* rows,
                      int64_t* changed) {
    return CudaStatus(gmeta_gpu_table_reread(table_, keys, n, insert, distinct, peeked, stamps,
                                             rows, changed, CudaStream(context)));
  }

  absl::Status Update(OpKernelContext* context, const int64_t* keys, const float* gradients,
                      int64_t n, float learning_rate, bool distinct) {
    return CudaStatus(gmeta_gpu_table_update(table_, keys, gradients, n, learning_rate, distinct,
                                             CudaStream(context)));
  }

  // Positions are those of a lookup, and aren't checked.
  absl::Status UpdateIndexed(OpKernelContext* context, const int64_t* keys, int64_t u,
                             const float* gradients, const int32_t* positions, int64_t n,
                             float learning_rate) {
    return CudaStatus(gmeta_gpu_table_update_indexed(table_, keys, u, gradients, positions, n,
                                                     learning_rate, CudaStream(context)));
  }

  absl::Status Remove(OpKernelContext* context, const int64_t* keys, int64_t n, int64_t* removed) {
    return CudaStatus(gmeta_gpu_table_remove(table_, keys, n, removed, CudaStream(context)));
  }

  absl::Status Contains(OpKernelContext* context, const int64_t* keys, int64_t n, bool* found) {
    static_assert(sizeof(bool) == sizeof(uint8_t));
    return CudaStatus(gmeta_gpu_table_contains(table_, keys, n, reinterpret_cast<uint8_t*>(found),
                                               CudaStream(context)));
  }

  absl::Status Prefetch(OpKernelContext* context, const int64_t* keys, int64_t n) {
    return CudaStatus(gmeta_gpu_table_prefetch(table_, keys, n, CudaStream(context)));
  }

  absl::Status Reserve(int64_t rows) { return CudaStatus(gmeta_gpu_table_reserve(table_, rows)); }

  absl::Status Evict(OpKernelContext* context, int64_t at, uint64_t turns, int64_t* evicted) {
    return CudaStatus(gmeta_gpu_table_evict(table_, at, turns, evicted, CudaStream(context)));
  }

  absl::Status Size(OpKernelContext*, int64_t* size) {
    return CudaStatus(gmeta_gpu_table_size(table_, size));
  }

  absl::Status Step(OpKernelContext*, int64_t* step) {
    return CudaStatus(gmeta_gpu_table_step(table_, step));
  }

  absl::Status Statistics(StatisticsArray* out) const {
    return CudaStatus(gmeta_gpu_table_statistics(table_, out->data()));
  }

  template <class Allocate>
  absl::Status Export(OpKernelContext* context, bool with_slots, const Allocate& allocate) {
    const auto records = [&](const gmeta_gpu_table_export_sizes& sizes,
                             gmeta_gpu_table_export_columns* to) {
      const std::optional<RecordColumns> columns =
          allocate(static_cast<uint64_t>(sizes.rows), sizes.step);
      if (!columns) return false;
      SetRecords(*columns, to);
      return true;
    };
    return ExportRange({0, kLogicalShards}, 0, false, records);
  }

  template <class Allocate>
  absl::Status ExportShards(OpKernelContext* context, LogicalRange range, int64_t min_last_step,
                            const Allocate& allocate) {
    const auto everything = [&](const gmeta_gpu_table_export_sizes& sizes,
                                gmeta_gpu_table_export_columns* to) {
      const std::optional<ShardExportColumns> columns = allocate(ShardExportSizes{
          static_cast<uint64_t>(sizes.rows), static_cast<uint64_t>(sizes.removed),
          static_cast<uint64_t>(sizes.waiting), sizes.step, sizes.journal_whole != 0});
      if (!columns) return false;
      SetRecords(columns->records, to);
      to->row_splits = columns->row_splits;
      to->live = columns->live;
      to->removed = columns->removed;
      to->removed_splits = columns->removed_splits;
      to->waiting = columns->waiting;
      to->waiting_counts = columns->waiting_counts;
      to->waiting_splits = columns->waiting_splits;
      return true;
    };
    return ExportRange(range, min_last_step, true, everything);
  }

  absl::Status StartJournal(int64_t limit) {
    return CudaStatus(gmeta_gpu_table_start_journal(table_, limit));
  }

  absl::Status JournalSaved() { return CudaStatus(gmeta_gpu_table_journal_saved(table_)); }

  absl::Status JournalWhole(OpKernelContext*, int64_t* whole) {
    int32_t found = 0;
    TF_RETURN_IF_ERROR(CudaStatus(gmeta_gpu_table_journal_whole(table_, &found)));
    *whole = found;
    return absl::OkStatus();
  }

  absl::Status Import(OpKernelContext*, const ConstRecordColumns& columns, int64_t n, int64_t step,
                      bool replace) {
    return CudaStatus(gmeta_gpu_table_import(table_, columns.keys, columns.rows, columns.slots,
                                             columns.frequency, columns.last_step, n, step,
                                             replace));
  }

  template <class Allocate>
  absl::Status ExportAdmission(const Allocate& allocate) {
    const auto call = [](void* context, int64_t counters, int64_t filter_bytes,
                         gmeta_gpu_table_admission_columns* to) {
      const std::optional<AdmissionColumns> columns = (*static_cast<const Allocate*>(context))(
          static_cast<uint64_t>(counters), static_cast<uint64_t>(filter_bytes));
      if (!columns) return 1;
      *to = {columns->keys, columns->counts, columns->filter};
      return 0;
    };
    return CudaStatus(
        gmeta_gpu_table_export_admission(table_, +call, const_cast<Allocate*>(&allocate)));
  }

  absl::Status Filters(int64_t* filters, int64_t* bytes) {
    return CudaStatus(gmeta_gpu_table_filters(table_, filters, bytes));
  }

  absl::Status ExportFilter(int64_t shard, uint8_t* to) {
    return CudaStatus(gmeta_gpu_table_export_filter(table_, shard, to));
  }

  absl::Status ImportAdmission(const ConstAdmissionColumns& columns, int64_t n,
                               int64_t filter_bytes, int64_t first_filter, bool replace,
                               bool* fits) {
    const int code =
        gmeta_gpu_table_import_admission(table_, columns.keys, columns.counts, n, columns.filter,
                                         filter_bytes, first_filter, replace);
    *fits = code != GMETA_CUDA_INVALID;
    return *fits ? CudaStatus(code) : absl::OkStatus();
  }

 private:
  static void* Allocate(void* allocator, size_t bytes) {
    return static_cast<tensorflow::Allocator*>(allocator)->AllocateRaw(256, bytes);
  }

  static void Release(void* allocator, void* memory, size_t) {
    static_cast<tensorflow::Allocator*>(allocator)->DeallocateRaw(memory);
  }

  static void SetRecords(const RecordColumns& columns, gmeta_gpu_table_export_columns* to) {
    to->keys = columns.keys;
    to->rows = columns.rows;
    to->slots = columns.slots;
    to->frequency = columns.frequency;
    to->last_step = columns.last_step;
  }

  // Calls allocate(sizes, columns to fill), which returns whether it filled the columns.
  template <class Allocate>
  absl::Status ExportRange(LogicalRange range, int64_t min_last_step, bool cut_journal,
                           const Allocate& allocate) {
    const auto call = [](void* context, const gmeta_gpu_table_export_sizes* sizes,
                         gmeta_gpu_table_export_columns* to) {
      *to = {};
      return (*static_cast<const Allocate*>(context))(*sizes, to) ? 0 : 1;
    };
    return CudaStatus(gmeta_gpu_table_export_shards(table_, range.first, range.last, min_last_step,
                                                    cut_journal, +call,
                                                    const_cast<Allocate*>(&allocate)));
  }

  gmeta_gpu_table* const table_;
  const bool has_tiers_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_KERNELS_GPU_H_
