// Tables of the CPU and of an emulated GPU that are made alike, and the comparison of what they
// hold. Include this before anything else that includes CUDA's headers.

#ifndef GMETA_TESTS_NATIVE_EMULATED_TABLE_H_
#define GMETA_TESTS_NATIVE_EMULATED_TABLE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#define GMETA_PART_SLOTS 1024  // so that the index of a small table has several parts

#include "device_memory.h"
#include "ops/common/gpu/cuda_error.cu"
#include "ops/table/gpu/batch/lookup.cu"
#include "ops/table/gpu/batch/lookup_mixed.cu"
#include "ops/table/gpu/batch/update.cu"
#include "ops/table/gpu/batch/update_mixed.cu"
#include "ops/table/gpu/forms.cu"
#include "ops/table/gpu/memory/gpu_index.cu"
#include "ops/table/gpu/memory/row_store.cu"
#include "ops/table/gpu/table.cu"
#include "ops/table/gpu/table_abi.cu"
#include "ops/table/gpu/tiers/disk.cu"
#include "ops/table/gpu/tiers/gpu_disk_tier.cu"
#include "ops/table/gpu/tiers/prefetch.cu"
#include "ops/table/gpu/tiers/row_moves.cu"
#include "ops/table/gpu/upkeep/eviction.cu"
#include "ops/table/gpu/upkeep/growth.cu"
#include "ops/table/gpu/upkeep/removal.cu"
#include "ops/table/gpu/upkeep/saving.cu"
#include "ops/table/host/table.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

namespace gmeta {

// Deduplication and sums, which have tests of their own, on the host.
inline size_t UniqueBytes(int64_t, int32_t) { return 0; }
inline void Unique(const int64_t* ids, int64_t n, int32_t, int64_t* keys, int32_t* inverse,
                   int32_t*, int32_t* count, void*, cudaStream_t) {
  *count = 0;
  for (int64_t i = 0; i < n; ++i) {
    inverse[i] = static_cast<int32_t>(std::find(keys, keys + *count, ids[i]) - keys);
    if (inverse[i] == *count) keys[(*count)++] = ids[i];
  }
}
inline size_t SegmentsBytes(int64_t n, int64_t u, int64_t) { return sizeof(int32_t) * (n + u + 1); }
inline SegmentsView MakeSegments(const float*, int64_t, const int32_t* inverse, int64_t n,
                                 int64_t u, const int32_t*, void* workspace, cudaStream_t) {
  int32_t* const starts = static_cast<int32_t*>(workspace);
  int32_t* const positions = starts + u + 1;
  std::iota(positions, positions + n, 0);
  std::stable_sort(positions, positions + n,
                   [&](int32_t a, int32_t b) { return inverse[a] < inverse[b]; });
  for (int64_t j = 0, at = 0; j <= u; ++j) {
    while (at < n && inverse[positions[at]] < j) ++at;
    starts[j] = static_cast<int32_t>(at);
  }
  return {starts, positions, nullptr, nullptr};  // batches are too small for long segments
}
inline void SumSegments(const float* values, int64_t dim, const SegmentsView& segments, int64_t u,
                        const int32_t* count, float* out, cudaStream_t) {
  for (int64_t j = 0; j < (count != nullptr ? *count : u); ++j) {
    for (int64_t d = 0; d < dim; ++d) {
      const auto row = [&](int32_t place) { return values[segments.positions[place] * dim + d]; };
      float sum = row(segments.starts[j]);
      for (int32_t i = segments.starts[j] + 1; i < segments.starts[j + 1]; ++i) sum += row(i);
      out[j * dim + d] = sum;
    }
  }
}

}  // namespace gmeta

namespace emulated_table {

using gmeta::Eviction;
using gmeta::Table;
using gmeta::TableOptions;
using std::vector;

struct Settings {
  size_t dim;
  const char* optimizer;
  vector<double> optimizer_parameters;
  gmeta::HalfRule half;
  int64_t hbm_rows = 0;
  int64_t lookahead = 1;
  int64_t host_bytes = 0;
  const char* disk_folder = "/tmp";
  const char* admission = "all";
  vector<double> admission_parameters = {};
  const char* eviction = "none";
  vector<double> eviction_parameters = {};
};

struct Records {
  vector<int64_t> keys, frequency, last_step, removed;
  vector<float> rows, slots;
  int64_t step = 0;

  void Resize(size_t n, size_t dim, size_t slot_floats) {
    for (auto* column : {&keys, &frequency, &last_step}) column->resize(n);
    rows.resize(n * dim);
    slots.resize(n * slot_floats);
  }
};

inline constexpr uint64_t kSeed = 77;

// Half rows are rounded in both ways.
inline bool IsRandom(const Settings& settings) { return settings.half.half_below % 2 == 1; }

class Gpu {
 public:
  explicit Gpu(const Settings& settings) {
    const double spread[] = {0.0, 1.0};
    gmeta_gpu_table_options options{};
    options.name = "emulated";
    options.dim = static_cast<int64_t>(settings.dim);
    options.seed = kSeed;
    const auto set = [](const vector<double>& from, const double** values, int64_t* count) {
      *values = from.data();
      *count = static_cast<int64_t>(from.size());
    };
    options.optimizer = settings.optimizer;
    set(settings.optimizer_parameters, &options.optimizer_parameters,
        &options.optimizer_parameter_count);
    options.initializer = "normal";
    options.initializer_parameters = spread;
    options.initializer_parameter_count = 2;
    options.admission = settings.admission;
    set(settings.admission_parameters, &options.admission_parameters,
        &options.admission_parameter_count);
    options.eviction = settings.eviction;
    set(settings.eviction_parameters, &options.eviction_parameters,
        &options.eviction_parameter_count);
    options.half_below = settings.half.half_below;
    options.half_life = settings.half.half_life;
    options.round_at_random = IsRandom(settings) ? 1 : 0;
    options.hbm_rows = settings.hbm_rows;
    options.lookahead = settings.lookahead;
    options.host_bytes = settings.host_bytes;
    options.disk_folder = settings.disk_folder;
    options.device = -1;
    CHECK_EQ(gmeta_gpu_table_create(&options, &table), 0);
  }
  Gpu(const Gpu&) = delete;
  ~Gpu() { gmeta_gpu_table_destroy(table); }

  Records Export(bool cut_journal = false) const {
    Records records;
    struct Context {
      Records* records;
      const gmeta_gpu_table* table;
    } context{&records, table};
    const auto allocate = [](void* to, const gmeta_gpu_table_export_sizes* sizes,
                             gmeta_gpu_table_export_columns* columns) {
      auto [r, own] = *static_cast<Context*>(to);
      r->Resize(static_cast<size_t>(sizes->rows), gmeta_gpu_table_dim(own),
                gmeta_gpu_table_slot_floats(own));
      r->step = sizes->step;
      columns->keys = r->keys.data();
      columns->rows = r->rows.data();
      columns->slots = r->slots.data();
      columns->frequency = r->frequency.data();
      columns->last_step = r->last_step.data();
      r->removed.resize(static_cast<size_t>(sizes->removed));
      columns->removed = r->removed.data();
      return 0;
    };
    CHECK_EQ(gmeta_gpu_table_export_shards(table, 0, 1024, 0, cut_journal, allocate, &context), 0);
    return records;
  }

  gmeta_gpu_table* table = nullptr;
};

inline TableOptions OptionsOf(const Settings& settings) {
  TableOptions options;
  options.dim = settings.dim;
  options.optimizer = *gmeta::MakeOptimizer(settings.optimizer, settings.optimizer_parameters);
  options.initializer = {gmeta::Initializer::Kind::kNormal, 0.0f, 1.0f, kSeed};
  options.admission =
      *gmeta::MakeAdmission(settings.admission, settings.admission_parameters, kSeed);
  const vector<double>& p = settings.eviction_parameters;
  if (!p.empty()) {
    options.eviction = Eviction{
        *gmeta::MakeEvictionPolicy(settings.eviction, {p.begin() + 3, p.end()}),
        static_cast<uint64_t>(p[0]), static_cast<uint64_t>(p[1]), static_cast<uint32_t>(p[2])};
  }
  options.half = settings.half;
  options.round_at_random = IsRandom(settings);
  return options;
}

inline Records Export(Table* table) {
  Records records;
  const auto allocate = [&](uint64_t rows, int64_t step) -> std::optional<gmeta::RecordColumns> {
    records.Resize(rows, table->dim(), table->slot_floats());
    records.step = step;
    return gmeta::RecordColumns{records.keys.data(), records.rows.data(), records.slots.data(),
                                records.frequency.data(), records.last_step.data()};
  };
  CHECK(table->Export(allocate, Serial()));
  return records;
}

template <class T>
bool SameBits(const T* a, const T* b, size_t n) {
  return n == 0 || std::memcmp(a, b, n * sizeof(T)) == 0;
}

inline void CheckSame(const Gpu& gpu, Table* table) {
  const Records mine = gpu.Export(), theirs = Export(table);
  const size_t n = theirs.keys.size(), dim = table->dim(), slots = table->slot_floats();
  CHECK_EQ(mine.keys.size(), n);
  CHECK_EQ(mine.step, theirs.step);
  std::vector<size_t> by_key(n), of_mine(n);
  std::iota(by_key.begin(), by_key.end(), size_t{0});
  of_mine = by_key;
  const auto sort = [](vector<size_t>* order, const Records& of) {
    std::sort(order->begin(), order->end(),
              [&](size_t a, size_t b) { return of.keys[a] < of.keys[b]; });
  };
  sort(&by_key, theirs);
  sort(&of_mine, mine);
  for (size_t i = 0; i < n; ++i) {
    const size_t a = of_mine[i], b = by_key[i];
    CHECK_EQ(mine.keys[a], theirs.keys[b]);
    CHECK_EQ(mine.frequency[a], theirs.frequency[b]);
    CHECK_EQ(mine.last_step[a], theirs.last_step[b]);
    CHECK(SameBits(&mine.rows[a * dim], &theirs.rows[b * dim], dim));
    CHECK(slots == 0 || SameBits(&mine.slots[a * slots], &theirs.slots[b * slots], slots));
  }
  const gmeta::TableStatistics s = table->Statistics();
  const uint64_t expected[] = {s.hits,    s.misses,  s.inserts,   s.removes,  s.updates,
                               s.ignored, s.rejects, s.evictions, s.half_rows};
  int64_t found[18];
  CHECK_EQ(gmeta_gpu_table_statistics(gpu.table, found), 0);
  for (int i = 0; i < 9; ++i) CHECK_EQ(static_cast<uint64_t>(found[3 + i]), expected[i]);
  CHECK_EQ(static_cast<uint64_t>(found[0]), n);
  CHECK(0 <= found[16] && found[16] <= found[0]);
}

}  // namespace emulated_table

#endif  // GMETA_TESTS_NATIVE_EMULATED_TABLE_H_
