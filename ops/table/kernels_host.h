// The engine of tables in host memory: table.h on TensorFlow's own threads.

#ifndef GMETA_OPS_TABLE_KERNELS_HOST_H_
#define GMETA_OPS_TABLE_KERNELS_HOST_H_

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "ops/table/host/table.h"
#include "ops/table/kernels.h"

namespace gmeta {

class HostEngine {
 public:
  static constexpr char kDevice[] = "CPU";
  static constexpr int64_t kMaxKeys = std::numeric_limits<int32_t>::max();

  explicit HostEngine(const TableOptions& options) : table_(options) {}

  static absl::Status Make(OpKernelContext*, const TableSettings& settings,
                           std::unique_ptr<HostEngine>* out) {
    TableOptions options;
    options.dim = static_cast<size_t>(settings.dim);
    options.half = {static_cast<uint32_t>(settings.half_below),
                    static_cast<uint32_t>(settings.half_life)};
    options.round_at_random = settings.round_at_random;
    options.prior = RowPrior(settings.l2);
    options.initializer.seed = static_cast<uint64_t>(settings.seed);
    if (!settings.disk_folder.empty()) {
      options.disk = DiskTier{settings.disk_folder, static_cast<uint64_t>(settings.memory_bytes)};
    }
    const std::optional<SparseOptimizer> optimizer =
        MakeOptimizer(settings.optimizer.kind, settings.optimizer.parameters);
    if (!optimizer) {
      return Refuse(settings, "optimizer", settings.optimizer, "hyperparameters");
    }
    options.optimizer = *optimizer;
    if (!SetInitializer(settings.initializer, &options.initializer)) {
      return Refuse(settings, "initializer", settings.initializer, "parameters");
    }
    const std::optional<Admission> admission = MakeAdmission(
        settings.admission.kind, settings.admission.parameters, options.initializer.seed);
    if (!admission) return Refuse(settings, "admission", settings.admission, "settings");
    options.admission = *admission;
    if (!SetEviction(settings.eviction, &options)) {
      return Refuse(settings, "eviction", settings.eviction, "settings");
    }
    *out = std::make_unique<HostEngine>(options);
    return absl::OkStatus();
  }

  int64_t dim() const { return static_cast<int64_t>(table_.dim()); }
  int64_t slot_floats() const { return static_cast<int64_t>(table_.slot_floats()); }

  // Repeated keys cost nothing extra here, so `distinct` is ignored.
  absl::Status Lookup(OpKernelContext* context, const int64_t* keys, int64_t n, bool insert,
                      bool /*distinct*/, float* rows) {
    table_.Lookup(keys, n, insert, rows, PoolParallelFor(context));
    return absl::OkStatus();
  }

  static void Peek(OpKernelContext* context, const FoundTable<HostEngine>& found,
                   const int64_t* keys, int64_t n, float* rows, int64_t* stamps,
                   const AsyncOpKernel::DoneCallback& done) {
    const auto peek = [&] {
      found.table->table_.Peek(keys, n, rows, stamps, PoolParallelFor(context));
      return absl::OkStatus();
    };
    OP_REQUIRES_OK_ASYNC(context, found.Try(peek), done);
    done();
  }

  absl::Status Reread(OpKernelContext* context, const int64_t* keys, int64_t n, bool insert,
                      bool /*distinct*/, const float* peeked, const int64_t* stamps, float* rows,
                      int64_t* changed) {
    const PoolParallelFor parallel_for(context);
    if (peeked != rows) {
      parallel_for(static_cast<size_t>(n * dim()), 1, [&](size_t first, size_t last) {
        std::copy(peeked + first, peeked + last, rows + first);
      });
    }
    *changed = static_cast<int64_t>(table_.Reread(keys, n, insert, stamps, rows, parallel_for));
    return absl::OkStatus();
  }

  absl::Status Update(OpKernelContext* context, const int64_t* keys, const float* gradients,
                      int64_t n, float learning_rate, bool /*distinct*/) {
    table_.Update(keys, gradients, n, learning_rate, PoolParallelFor(context));
    return absl::OkStatus();
  }

  absl::Status UpdateIndexed(OpKernelContext* context, const int64_t* keys, int64_t u,
                             const float* gradients, const int32_t* positions, int64_t n,
                             float learning_rate) {
    std::vector<int64_t> key_of(static_cast<size_t>(n));
    std::atomic<int64_t> bad{-1};
    const PoolParallelFor parallel_for(context);
    parallel_for(static_cast<size_t>(n), 2, [&](size_t first, size_t last) {
      for (size_t i = first; i < last; ++i) {
        const bool is_key = positions[i] >= 0 && positions[i] < u;
        if (!is_key) bad = static_cast<int64_t>(i);
        key_of[i] = is_key ? keys[positions[i]] : 0;
      }
    });
    if (bad >= 0) {
      return Invalid("position ", positions[bad], " of gradient ", bad.load(), " isn't one of ", u,
                     " keys");
    }
    return Update(context, key_of.data(), gradients, n, learning_rate, /*distinct=*/false);
  }

  absl::Status Remove(OpKernelContext* context, const int64_t* keys, int64_t n, int64_t* removed) {
    *removed = static_cast<int64_t>(table_.Remove(keys, n, PoolParallelFor(context)));
    return absl::OkStatus();
  }

  absl::Status Contains(OpKernelContext* context, const int64_t* keys, int64_t n, bool* found) {
    table_.Contains(keys, n, found, PoolParallelFor(context));
    return absl::OkStatus();
  }

  absl::Status Prefetch(OpKernelContext* context, const int64_t* keys, int64_t n) {
    table_.Prefetch(keys, static_cast<size_t>(n), PoolParallelFor(context));
    return absl::OkStatus();
  }

  absl::Status Reserve(int64_t rows) {
    table_.Reserve(static_cast<uint64_t>(rows));
    return absl::OkStatus();
  }

  absl::Status Evict(OpKernelContext* context, int64_t at, uint64_t turns, int64_t* evicted) {
    *evicted = static_cast<int64_t>(table_.Evict(PoolParallelFor(context), at, turns));
    return absl::OkStatus();
  }

  absl::Status Size(OpKernelContext*, int64_t* size) {
    *size = static_cast<int64_t>(table_.size());
    return absl::OkStatus();
  }

  absl::Status Step(OpKernelContext*, int64_t* step) {
    *step = table_.step();
    return absl::OkStatus();
  }

  absl::Status Statistics(StatisticsArray* out) const {
    const TableStatistics s = table_.Statistics();
    const uint64_t values[] = {s.size,      s.capacity,   s.bytes,     s.hits,       //
                               s.misses,    s.inserts,    s.removes,   s.updates,    //
                               s.ignored,   s.rejects,    s.evictions, s.half_rows,  //
                               s.disk_rows, s.disk_bytes, s.brought,   s.spilled,    //
                               s.host_rows, s.crowded};
    std::copy(std::begin(values), std::end(values), out->begin());
    return absl::OkStatus();
  }

  template <class Allocate>
  absl::Status Export(OpKernelContext* context, bool /*with_slots*/, const Allocate& allocate) {
    table_.Export(allocate, PoolParallelFor(context));
    return absl::OkStatus();
  }

  template <class Allocate>
  absl::Status ExportShards(OpKernelContext* context, LogicalRange range, int64_t min_last_step,
                            const Allocate& allocate) {
    table_.ExportShards(range, static_cast<uint32_t>(min_last_step), allocate,
                        PoolParallelFor(context));
    return absl::OkStatus();
  }

  absl::Status StartJournal(int64_t limit) {
    table_.StartJournal(static_cast<size_t>(limit));
    return absl::OkStatus();
  }

  absl::Status JournalSaved() {
    table_.DropCutRemovals();
    return absl::OkStatus();
  }

  absl::Status JournalWhole(OpKernelContext*, int64_t* whole) {
    *whole = table_.JournalWhole();
    return absl::OkStatus();
  }

  absl::Status TakeSnapshot(OpKernelContext*, int64_t* id) {
    *id = table_.TakeSnapshot();
    return absl::OkStatus();
  }

  // Returns false if there is no such snapshot.
  bool RestoreSnapshot(OpKernelContext* context, int64_t id) {
    return table_.RestoreSnapshot(id, PoolParallelFor(context));
  }

  bool DropSnapshot(OpKernelContext*, int64_t id) {
    table_.DropSnapshot(id);
    return true;
  }

  absl::Status Import(OpKernelContext* context, const ConstRecordColumns& columns, int64_t n,
                      int64_t step, bool replace) {
    if (replace) {
      table_.Replace(columns, n, step, PoolParallelFor(context));
    } else {
      table_.Merge(columns, n, PoolParallelFor(context));
    }
    return absl::OkStatus();
  }

  template <class Allocate>
  absl::Status ExportAdmission(const Allocate& allocate) {
    table_.ExportAdmission(allocate);
    return absl::OkStatus();
  }

  absl::Status Filters(int64_t* filters, int64_t* bytes) {
    *filters = static_cast<int64_t>(table_.filters());
    *bytes = static_cast<int64_t>(table_.filter_bytes());
    return absl::OkStatus();
  }

  absl::Status ExportFilter(int64_t shard, uint8_t* to) {
    table_.ExportFilter(static_cast<size_t>(shard), to);
    return absl::OkStatus();
  }

  // Sets `fits` to whether the filter has this table's size.
  absl::Status ImportAdmission(const ConstAdmissionColumns& columns, int64_t n,
                               int64_t filter_bytes, int64_t first_filter, bool replace,
                               bool* fits) {
    const size_t count = static_cast<size_t>(n), bytes = static_cast<size_t>(filter_bytes);
    *fits = replace ? table_.ReplaceAdmission(columns, count, bytes)
                    : first_filter >= 0 && table_.MergeAdmission(columns, count, bytes,
                                                                 static_cast<size_t>(first_filter));
    return absl::OkStatus();
  }

 private:
  static absl::Status Refuse(const TableSettings& settings, const char* what,
                             const TableSettings::Part& part, const char* parameters) {
    return Invalid("table '", settings.name, "': ", what, " '", part.kind, "' doesn't take ",
                   part.parameters.size(), " ", parameters);
  }

  static bool SetInitializer(const TableSettings::Part& part, Initializer* out) {
    const bool constant = part.kind == "constant";
    if (part.parameters.size() != (constant ? 1 : 2)) return false;
    out->kind = constant                 ? Initializer::Kind::kConstant
                : part.kind == "uniform" ? Initializer::Kind::kUniform
                : part.kind == "normal"  ? Initializer::Kind::kNormal
                                         : Initializer::Kind::kTruncatedNormal;
    out->a = static_cast<float>(part.parameters[0]);
    out->b = constant ? 0.0f : static_cast<float>(part.parameters[1]);
    return true;
  }

  // The parameters are the bounds in rows and in bytes, the steps between sweeps, and then the
  // policy's own settings.
  static bool SetEviction(const TableSettings::Part& part, TableOptions* out) {
    if (part.kind == "none") return true;
    constexpr size_t kCommon = 3;
    const std::vector<double>& p = part.parameters;
    if (p.size() < kCommon) return false;
    const std::optional<EvictionPolicy> policy =
        MakeEvictionPolicy(part.kind, {p.begin() + kCommon, p.end()});
    if (!policy) return false;
    out->eviction = Eviction{*policy, static_cast<uint64_t>(p[0]), static_cast<uint64_t>(p[1]),
                             static_cast<uint32_t>(p[2])};
    return true;
  }

  Table table_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_KERNELS_HOST_H_
