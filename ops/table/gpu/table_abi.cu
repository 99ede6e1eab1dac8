// The C interface of GpuTable, which checks its arguments.

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ops/table/gpu/table.cuh"
#include "ops/table/gpu/table_abi.h"

struct gmeta_gpu_table {
  explicit gmeta_gpu_table(const gmeta::GpuTableOptions& options) : table(options) {}
  gmeta::GpuTable table;
};

namespace gmeta {
namespace {

std::vector<double> Values(const double* values, int64_t count) {
  return std::vector<double>(values, values + count);
}

Initializer InitializerOf(const gmeta_gpu_table_options& from, const std::string& table) {
  const std::string kind = from.initializer;
  const std::vector<double> p =
      Values(from.initializer_parameters, from.initializer_parameter_count);
  Initializer to;
  const bool constant = kind == "constant";
  Require(constant || kind == "uniform" || kind == "normal" || kind == "truncated_normal",
          table + "there is no initializer '" + kind + "'");
  Require(p.size() == (constant ? 1 : 2), table + "initializer '" + kind + "' doesn't take " +
                                              std::to_string(p.size()) + " parameters");
  to.kind = constant            ? Initializer::Kind::kConstant
            : kind == "uniform" ? Initializer::Kind::kUniform
            : kind == "normal"  ? Initializer::Kind::kNormal
                                : Initializer::Kind::kTruncatedNormal;
  to.a = static_cast<float>(p[0]);
  to.b = constant ? 0.0f : static_cast<float>(p[1]);
  to.seed = static_cast<uint64_t>(from.seed);
  return to;
}

std::optional<Eviction> EvictionOf(const gmeta_gpu_table_options& from, const std::string& table) {
  const std::string name = from.eviction == nullptr ? "none" : from.eviction;
  if (name == "none") return std::nullopt;
  constexpr size_t kCommon = 3;
  const std::vector<double> p = Values(from.eviction_parameters, from.eviction_parameter_count);
  std::optional<EvictionPolicy> policy;
  if (p.size() >= kCommon) policy = MakeEvictionPolicy(name, {p.begin() + kCommon, p.end()});
  Require(policy.has_value(),
          table + "eviction '" + name + "' doesn't take " + std::to_string(p.size()) + " settings");
  return Eviction{*policy, static_cast<uint64_t>(p[0]), static_cast<uint64_t>(p[1]),
                  static_cast<uint32_t>(p[2])};
}

GpuTableOptions OptionsOf(const gmeta_gpu_table_options& from) {
  GpuTableOptions to;
  to.name = from.name == nullptr ? "" : from.name;
  const std::string table = "table '" + to.name + "': ";
  Require(from.dim >= 1 && from.dim <= (1 << 20),
          table + "dim must be 1 to 2^20, got " + std::to_string(from.dim));
  Require(from.half_below >= 0 && from.half_below != 1 && from.half_below <= UINT32_MAX,
          table + "half_below must be 0, or 2 to 2^32 - 1, got " + std::to_string(from.half_below));
  Require(from.half_life >= 0 && from.half_life <= HalfRule::kLongestHalfLife,
          table + "half_life must be 0 to 2^31 - 1, got " + std::to_string(from.half_life));
  to.half = {static_cast<uint32_t>(from.half_below), static_cast<uint32_t>(from.half_life)};
  to.round_at_random = from.round_at_random != 0;
  to.dim = static_cast<size_t>(from.dim);
  const std::optional<SparseOptimizer> optimizer = MakeOptimizer(
      from.optimizer, Values(from.optimizer_parameters, from.optimizer_parameter_count));
  Require(optimizer.has_value(), table + "optimizer '" + from.optimizer + "' doesn't take " +
                                     std::to_string(from.optimizer_parameter_count) +
                                     " hyperparameters");
  to.optimizer = *optimizer;
  to.initializer = InitializerOf(from, table);
  const std::string admission = from.admission == nullptr ? "all" : from.admission;
  const std::optional<Admission> policy =
      MakeAdmission(admission, Values(from.admission_parameters, from.admission_parameter_count),
                    to.initializer.seed);
  Require(policy.has_value(), table + "admission '" + admission + "' doesn't take " +
                                  std::to_string(from.admission_parameter_count) + " settings");
  to.admission = *policy;
  to.eviction = EvictionOf(from, table);
  Require(from.hbm_rows >= 0,
          table + "hbm_rows must be >= 0, got " + std::to_string(from.hbm_rows));
  to.hbm_rows = static_cast<uint64_t>(from.hbm_rows);
  Require(from.host_bytes >= 0 && (from.host_bytes == 0 || from.hbm_rows > 0),
          table + "host_bytes must be >= 0, and is for a table with hbm_rows, got " +
              std::to_string(from.host_bytes));
  to.host_bytes = static_cast<uint64_t>(from.host_bytes);
  to.disk_folder = from.disk_folder == nullptr ? "" : from.disk_folder;
  Require(from.lookahead >= 0 && from.lookahead <= 64,
          table + "lookahead must be 0 to 64, got " + std::to_string(from.lookahead));
  to.lookahead = static_cast<uint32_t>(from.lookahead);
  Require(from.l2_count == 0 || from.l2_count == from.dim,
          table + "the prior has " + std::to_string(from.l2_count) + " columns, but a row has " +
              std::to_string(from.dim));
  to.prior = RowPrior(std::vector<float>(from.l2, from.l2 + from.l2_count));
  to.device = from.device;
  if (from.device < 0) CheckCuda(cudaGetDevice(&to.device), "finding the current GPU");
  to.allocator = from.allocator;
  return to;
}

cudaStream_t StreamOf(void* stream) { return static_cast<cudaStream_t>(stream); }

template <class Body>
int With(gmeta_gpu_table* table, const Body& body) {
  return Guarded([&] {
    Require(table != nullptr, "a table is null");
    body(table->table);
  });
}

}  // namespace
}  // namespace gmeta

using gmeta::GpuTable;
using gmeta::Require;
using gmeta::StreamOf;
using gmeta::With;

int gmeta_gpu_table_create(const gmeta_gpu_table_options* options, gmeta_gpu_table** out) {
  return gmeta::Guarded([&] { *out = new gmeta_gpu_table(gmeta::OptionsOf(*options)); });
}

int gmeta_gpu_table_destroy(gmeta_gpu_table* table) {
  return gmeta::Guarded([&] { delete table; });
}

int64_t gmeta_gpu_table_dim(const gmeta_gpu_table* table) {
  return static_cast<int64_t>(table->table.dim());
}

int64_t gmeta_gpu_table_slot_floats(const gmeta_gpu_table* table) {
  return static_cast<int64_t>(table->table.slot_floats());
}

int gmeta_gpu_table_lookup(gmeta_gpu_table* table, const int64_t* keys, int64_t n, float* rows,
                           void* stream) {
  return With(table, [&](GpuTable& own) { own.Lookup(keys, n, rows, StreamOf(stream)); });
}

int gmeta_gpu_table_lookup_or_insert(gmeta_gpu_table* table, const int64_t* keys, int64_t n,
                                     int32_t distinct, float* rows, void* stream) {
  return With(table, [&](GpuTable& own) {
    own.LookupOrInsert(keys, n, distinct != 0, rows, StreamOf(stream));
  });
}

int gmeta_gpu_table_peek(gmeta_gpu_table* table, const int64_t* keys, int64_t n, float* rows,
                         int64_t* stamps, void* stream) {
  return With(table, [&](GpuTable& own) { own.Peek(keys, n, rows, stamps, StreamOf(stream)); });
}

int gmeta_gpu_table_reread(gmeta_gpu_table* table, const int64_t* keys, int64_t n, int32_t insert,
                           int32_t distinct, const float* peeked, const int64_t* stamps,
                           float* rows, int64_t* changed, void* stream) {
  return With(table, [&](GpuTable& own) {
    own.Reread(keys, n, insert != 0, distinct != 0, peeked, stamps, rows, changed,
               StreamOf(stream));
  });
}

int gmeta_gpu_table_update(gmeta_gpu_table* table, const int64_t* keys, const float* gradients,
                           int64_t n, float learning_rate, int32_t distinct, void* stream) {
  return With(table, [&](GpuTable& own) {
    own.Update(keys, gradients, n, learning_rate, distinct != 0, StreamOf(stream));
  });
}

int gmeta_gpu_table_update_indexed(gmeta_gpu_table* table, const int64_t* keys, int64_t u,
                                   const float* gradients, const int32_t* inverse, int64_t n,
                                   float learning_rate, void* stream) {
  return With(table, [&](GpuTable& own) {
    own.UpdateIndexed(keys, u, gradients, inverse, n, learning_rate, StreamOf(stream));
  });
}

int gmeta_gpu_table_prefetch(gmeta_gpu_table* table, const int64_t* keys, int64_t n, void* stream) {
  return With(table, [&](GpuTable& own) { own.Prefetch(keys, n, StreamOf(stream)); });
}

int gmeta_gpu_table_contains(gmeta_gpu_table* table, const int64_t* keys, int64_t n, uint8_t* found,
                             void* stream) {
  return With(table, [&](GpuTable& own) { own.Contains(keys, n, found, StreamOf(stream)); });
}

int gmeta_gpu_table_remove(gmeta_gpu_table* table, const int64_t* keys, int64_t n, int64_t* removed,
                           void* stream) {
  return With(table, [&](GpuTable& own) { own.Remove(keys, n, removed, StreamOf(stream)); });
}

int gmeta_gpu_table_evict(gmeta_gpu_table* table, int64_t at, uint64_t turns, int64_t* evicted,
                          void* stream) {
  return With(table, [&](GpuTable& own) {
    const uint64_t went = own.Evict(at, turns, StreamOf(stream));
    if (evicted != nullptr) *evicted = static_cast<int64_t>(went);
  });
}

int gmeta_gpu_table_reserve(gmeta_gpu_table* table, int64_t rows) {
  return With(table, [&](GpuTable& own) {
    Require(rows >= 0, "rows to reserve must be >= 0, got " + std::to_string(rows));
    own.Reserve(static_cast<uint64_t>(rows));
  });
}

int gmeta_gpu_table_clear(gmeta_gpu_table* table) {
  return With(table, [&](GpuTable& own) { own.Clear(); });
}

int gmeta_gpu_table_size(gmeta_gpu_table* table, int64_t* out) {
  return With(table, [&](GpuTable& own) { *out = static_cast<int64_t>(own.Size()); });
}

int gmeta_gpu_table_step(gmeta_gpu_table* table, int64_t* out) {
  return With(table, [&](GpuTable& own) { *out = own.Step(); });
}

int gmeta_gpu_table_statistics(gmeta_gpu_table* table, int64_t* out) {
  return With(table, [&](GpuTable& own) {
    const gmeta::TableStatistics s = own.Statistics();
    const uint64_t values[] = {s.size,      s.capacity,  s.bytes,     s.hits,       s.misses,
                               s.inserts,   s.removes,   s.updates,   s.ignored,    s.rejects,
                               s.evictions, s.half_rows, s.disk_rows, s.disk_bytes, s.brought,
                               s.spilled,   s.host_rows, s.crowded};
    std::copy(std::begin(values), std::end(values), out);
  });
}

int gmeta_gpu_table_export_shards(gmeta_gpu_table* table, int64_t first, int64_t last,
                                  int64_t min_last_step, int32_t cut_journal,
                                  gmeta_gpu_table_allocate allocate, void* context) {
  return With(table, [&](GpuTable& own) {
    Require(0 <= first && first <= last && last <= gmeta::kLogicalShards,
            "shards to export must be within [0, 1024], got " + std::to_string(first) + " to " +
                std::to_string(last));
    Require(0 <= min_last_step && min_last_step <= UINT32_MAX,
            "min_last_step must be within [0, 2^32), got " + std::to_string(min_last_step));
    own.ExportShards({static_cast<uint32_t>(first), static_cast<uint32_t>(last)},
                     static_cast<uint32_t>(min_last_step), cut_journal != 0, allocate, context);
  });
}

int gmeta_gpu_table_import(gmeta_gpu_table* table, const int64_t* keys, const float* rows,
                           const float* slots, const int64_t* frequency, const int64_t* last_step,
                           int64_t n, int64_t step, int32_t replace) {
  return With(table, [&](GpuTable& own) {
    Require(n >= 0, "records to import must be >= 0, got " + std::to_string(n));
    own.Import({keys, rows, slots, frequency, last_step}, n, step, replace != 0);
  });
}

int gmeta_gpu_table_start_journal(gmeta_gpu_table* table, int64_t limit) {
  return With(table, [&](GpuTable& own) {
    Require(limit >= 0, "keys to note must be >= 0, got " + std::to_string(limit));
    own.StartJournal(static_cast<size_t>(limit));
  });
}

int gmeta_gpu_table_journal_saved(gmeta_gpu_table* table) {
  return With(table, [&](GpuTable& own) { own.DropCutRemovals(); });
}

int gmeta_gpu_table_journal_whole(gmeta_gpu_table* table, int32_t* out) {
  return With(table, [&](GpuTable& own) { *out = own.JournalWhole(); });
}

int gmeta_gpu_table_export_admission(gmeta_gpu_table* table,
                                     gmeta_gpu_table_allocate_admission allocate, void* context) {
  return With(table, [&](GpuTable& own) { own.ExportAdmission(allocate, context); });
}

int gmeta_gpu_table_filters(gmeta_gpu_table* table, int64_t* filters, int64_t* filter_bytes) {
  return With(table, [&](GpuTable& own) {
    *filters = static_cast<int64_t>(own.filters());
    *filter_bytes = static_cast<int64_t>(own.FilterBytes());
  });
}

int gmeta_gpu_table_export_filter(gmeta_gpu_table* table, int64_t shard, uint8_t* to) {
  return With(table, [&](GpuTable& own) {
    Require(0 <= shard && shard < static_cast<int64_t>(own.filters()),
            "there is no filter number " + std::to_string(shard));
    own.ExportFilter(static_cast<size_t>(shard), to);
  });
}

int gmeta_gpu_table_import_admission(gmeta_gpu_table* table, const int64_t* keys,
                                     const int64_t* counts, int64_t n, const uint8_t* filter,
                                     int64_t filter_bytes, int64_t first_filter, int32_t replace) {
  return With(table, [&](GpuTable& own) {
    Require(n >= 0 && filter_bytes >= 0 && first_filter >= 0,
            "numbers of counters, bytes and filters must be >= 0");
    Require(own.ImportAdmission(keys, counts, n, filter, static_cast<size_t>(filter_bytes),
                                static_cast<size_t>(first_filter), replace != 0),
            "the filter has " + std::to_string(filter_bytes) +
                " bytes, which isn't the size of this table's: it is of another capacity or error");
  });
}
