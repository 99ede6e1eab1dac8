// The dynamic embedding table on the GPU: gmeta::Table (ops/table/host/table.h) with its index, its
// rows and its optimizer in device memory. Keys, rows, records, policies, statistics and saved
// content mean the same as in gmeta::Table; table.cuh describes how the GPU table works.
//
// Pointers
//   Arrays of a batch (keys, rows, gradients, inverse, found) are in device memory. `float` arrays
//   of rows should be aligned to 16 bytes (allocators align them so); else copies are slower.
//   Arrays of import and export may be in device or in host memory, as described at those
//   functions. Pointers to single results (`out`) are to host memory, and a function that has one
//   waits until the result is known.
//
// Streams
//   Batches are queued on `stream`, and a call doesn't wait for them, except in these cases: the
//   table grows; it has a policy (admission other than "all", eviction other than "none"); a lookup
//   in a table of two precisions may promote more rows than there is room for; or the function
//   returns a number. A table orders its calls, including those on different streams: the second
//   call's work starts after the first's is done. Several threads may call; they take turns. The
//   arrays of a batch must stay valid until the work on the stream is done.
//
// All functions return a gmeta_cuda_status; gmeta_cuda_error() explains an error.

#ifndef GMETA_OPS_TABLE_GPU_TABLE_ABI_H_
#define GMETA_OPS_TABLE_GPU_TABLE_ABI_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/gpu/cuda_abi.h"

extern "C" {

typedef struct gmeta_gpu_table gmeta_gpu_table;

// The functions by which a table allocates and releases device memory; if they are null, the table
// uses cudaMalloc and cudaFree. `allocate` returns memory aligned to 256 bytes, or null if there is
// none. Work queued on the GPU may still use that memory; the table waits for it. Any function
// below may call both, on the thread that calls it. The table releases memory once nothing uses it.
typedef struct {
  void* (*allocate)(void* context, size_t bytes);
  void (*release)(void* context, void* memory, size_t bytes);
  void* context;
} gmeta_gpu_allocator;

// Names and parameters are the same as for the GmetaHashTable op (gmeta.ops' `kind` and
// `hyperparameters`, `parameters`, `settings`).
typedef struct {
  const char* name;  // for messages
  int64_t dim;
  int64_t seed;
  const char* optimizer;  // sgd adagrad adam momentum rowwise_adagrad adamw ftrl
  const double* optimizer_parameters;
  int64_t optimizer_parameter_count;
  const char* initializer;  // constant uniform normal truncated_normal
  const double* initializer_parameters;
  int64_t initializer_parameter_count;
  const char* admission;  // all count filter chance
  const double* admission_parameters;
  int64_t admission_parameter_count;
  const char* eviction;  // none age frequency expired norm
  const double* eviction_parameters;
  int64_t eviction_parameter_count;
  int64_t half_below;       // rows with a lower frequency are kept in half precision; 0: none are
  int64_t half_life;        // in steps, after which rows cool down (core/half_rule.h); 0: none do
  int32_t round_at_random;  // updates of half rows (core/half_rounding.h); 0: to nearest
  // Rows beyond this many are kept in pinned host memory; 0: none are. With half_below, the GPU's
  // memory holds half as many float32 rows and this many half rows, which together take no more
  // memory.
  int64_t hbm_rows;
  // With hbm_rows: rows beyond these bytes of host memory are on disk, in this folder; 0: none are.
  int64_t host_bytes;
  const char* disk_folder;
  int64_t lookahead;  // how many batches a prefetch is ahead of its lookup
  const float* l2;    // of the rows' prior (core/row_prior.h), one for each column
  int64_t l2_count;   // dim, or 0: no prior
  int32_t device;     // the GPU's number; -1: the current one
  gmeta_gpu_allocator allocator;
} gmeta_gpu_table_options;

// Makes a table. Returns GMETA_CUDA_UNSUPPORTED for options that the CPU table supports and the GPU
// table doesn't.
GMETA_CUDA_API int gmeta_gpu_table_create(const gmeta_gpu_table_options* options,
                                          gmeta_gpu_table** out);
// Frees a table, after waiting for its queued work. `table` may be null.
GMETA_CUDA_API int gmeta_gpu_table_destroy(gmeta_gpu_table* table);

GMETA_CUDA_API int64_t gmeta_gpu_table_dim(const gmeta_gpu_table* table);
GMETA_CUDA_API int64_t gmeta_gpu_table_slot_floats(const gmeta_gpu_table* table);

// Batches. At most 2^30 keys in a call.

// Writes the row of each key to rows (n, dim). A missing key gets its initial row. Only the
// statistics change.
GMETA_CUDA_API int gmeta_gpu_table_lookup(gmeta_gpu_table* table, const int64_t* keys, int64_t n,
                                          float* rows, void* stream);

// The same, but missing keys that are admitted get a row, rows may be evicted before that, and each
// occurrence of a key that has a row counts as a use (frequency, last step). `distinct` other than
// 0 promises that no key occurs twice, which is faster. For a table of two precisions,
// GMETA_CUDA_OUT_OF_MEMORY may mean that the lookup is complete except for promoting rows, for
// which there was no memory: the next lookup that may insert first tries that again.
GMETA_CUDA_API int gmeta_gpu_table_lookup_or_insert(gmeta_gpu_table* table, const int64_t* keys,
                                                    int64_t n, int32_t distinct, float* rows,
                                                    void* stream);

// Reads rows ahead: like gmeta_gpu_table_lookup, but not even the statistics change. Also writes
// stamps (n,), by which a reread sees what has changed since (core/stamp.h).
GMETA_CUDA_API int gmeta_gpu_table_peek(gmeta_gpu_table* table, const int64_t* keys, int64_t n,
                                        float* rows, int64_t* stamps, void* stream);

// Looks up keys that were peeked, with all effects of gmeta_gpu_table_lookup_or_insert (or, if
// `insert` is 0, of gmeta_gpu_table_lookup), and with its rows. `peeked` and `stamps` are what the
// peek wrote; only rows that may have changed since are read again. `rows` may be `peeked`.
// `changed`, in device memory, receives how many rows were read again.
GMETA_CUDA_API int gmeta_gpu_table_reread(gmeta_gpu_table* table, const int64_t* keys, int64_t n,
                                          int32_t insert, int32_t distinct, const float* peeked,
                                          const int64_t* stamps, float* rows, int64_t* changed,
                                          void* stream);

// Runs one optimizer step; the table's step increases by one. gradients (n, dim): gradients of
// equal keys are summed first, in a fixed order (gmeta_gpu_segment_sum's); gradients of absent keys
// are ignored. `distinct` as above. In a table whose rows cool down, GMETA_CUDA_OUT_OF_MEMORY may
// mean that the update is complete except for moving rows from one precision to the other.
GMETA_CUDA_API int gmeta_gpu_table_update(gmeta_gpu_table* table, const int64_t* keys,
                                          const float* gradients, int64_t n, float learning_rate,
                                          int32_t distinct, void* stream);

// The same for distinct keys (u,) and gradients (n, dim), one for each position of a batch. The
// gradient of keys[j] is the sum of gradients[i] over all i with inverse[i] == j; the function
// computes the sums without writing them to memory. inverse (n,), as gmeta_gpu_unique returns it.
// Keys that inverse doesn't name stay as they are.
GMETA_CUDA_API int gmeta_gpu_table_update_indexed(gmeta_gpu_table* table, const int64_t* keys,
                                                  int64_t u, const float* gradients,
                                                  const int32_t* inverse, int64_t n,
                                                  float learning_rate, void* stream);

// Moves the rows of a later batch from host memory to GPU memory, and others the other way, beside
// the work that follows (tiers/flights.cuh). Changes no number.
GMETA_CUDA_API int gmeta_gpu_table_prefetch(gmeta_gpu_table* table, const int64_t* keys, int64_t n,
                                            void* stream);

// Sets found[i] to 1 if the table has keys[i], else to 0.
GMETA_CUDA_API int gmeta_gpu_table_contains(gmeta_gpu_table* table, const int64_t* keys, int64_t n,
                                            uint8_t* found, void* stream);

// Removes keys with their records. `removed` receives how many of them the table had; if it is
// null, the function doesn't wait for that number.
GMETA_CUDA_API int gmeta_gpu_table_remove(gmeta_gpu_table* table, const int64_t* keys, int64_t n,
                                          int64_t* removed, void* stream);

// Evicts as of step `at` (-1: the table's own), in the shards whose turn `turns` has
// (step_times.h).
GMETA_CUDA_API int gmeta_gpu_table_evict(gmeta_gpu_table* table, int64_t at, uint64_t turns,
                                         int64_t* evicted, void* stream);

// Makes room for `rows` rows in total.
GMETA_CUDA_API int gmeta_gpu_table_reserve(gmeta_gpu_table* table, int64_t rows);

// Removes all rows and the state of admission and of the journal; statistics and step stay.
GMETA_CUDA_API int gmeta_gpu_table_clear(gmeta_gpu_table* table);

GMETA_CUDA_API int gmeta_gpu_table_size(gmeta_gpu_table* table, int64_t* out);
GMETA_CUDA_API int gmeta_gpu_table_step(gmeta_gpu_table* table, int64_t* out);

// Writes size, capacity, bytes, hits, misses, inserts, removes, updates, ignored, rejects,
// evictions, half_rows, disk_rows, disk_bytes, brought, spilled, host_rows, crowded to out[18], as
// GmetaHashTableStatistics does.
GMETA_CUDA_API int gmeta_gpu_table_statistics(gmeta_gpu_table* table, int64_t* out);

// Saving.

typedef struct {
  int64_t rows;
  int64_t removed;
  int64_t waiting;
  int64_t step;
  int32_t journal_whole;  // `removed` is complete: the save may be an increment
} gmeta_gpu_table_export_sizes;

// The output buffers of an export. Any pointer may be null: the export leaves that column out. The
// buffers of records may be in host or device memory, the others are in host memory.
typedef struct {
  int64_t* keys;            // (rows,)
  float* rows;              // (rows, dim)
  float* slots;             // (rows, slot_floats)
  int64_t* frequency;       // (rows,)
  int64_t* last_step;       // (rows,)
  int64_t* row_splits;      // (logical shards + 1,), as in a ragged tensor; other splits likewise
  int64_t* live;            // (logical shards,) number of rows of each, saved or not
  int64_t* removed;         // (removed,)
  int64_t* removed_splits;  // (logical shards + 1,)
  int64_t* waiting;         // (waiting,)
  int64_t* waiting_counts;  // (waiting,)
  int64_t* waiting_splits;  // (logical shards + 1,)
} gmeta_gpu_table_export_columns;

// Fills `to` and returns 0. If it returns anything else, the export stops and returns
// GMETA_CUDA_CANCELLED. It must not call functions of the table.
typedef int (*gmeta_gpu_table_allocate)(void* context, const gmeta_gpu_table_export_sizes* sizes,
                                        gmeta_gpu_table_export_columns* to);

// Exports the records of the logical shards [first, last) whose last step is min_last_step or later
// (0: all), sorted by logical shard, then by key. If `cut_journal` isn't 0, also exports the keys
// that the journal has noted for these shards, which it cuts (removal_journal.h), and the keys that
// wait for admission; else there are 0 of either. No batch runs meanwhile, and all copies are
// complete on return.
GMETA_CUDA_API int gmeta_gpu_table_export_shards(gmeta_gpu_table* table, int64_t first,
                                                 int64_t last, int64_t min_last_step,
                                                 int32_t cut_journal,
                                                 gmeta_gpu_table_allocate allocate, void* context);

// Imports n records of distinct keys, from host or device memory (to which nothing may still be
// writing), and returns when the table has them. With `replace`, they are then the whole content,
// `step` is the table's step, and the state of admission is empty; else they overwrite the records
// of keys that the table already has, and the step stays.
GMETA_CUDA_API int gmeta_gpu_table_import(gmeta_gpu_table* table, const int64_t* keys,
                                          const float* rows, const float* slots,
                                          const int64_t* frequency, const int64_t* last_step,
                                          int64_t n, int64_t step, int32_t replace);

// The same as Table's StartJournal, DropCutRemovals and JournalWhole.
GMETA_CUDA_API int gmeta_gpu_table_start_journal(gmeta_gpu_table* table, int64_t limit);
GMETA_CUDA_API int gmeta_gpu_table_journal_saved(gmeta_gpu_table* table);
GMETA_CUDA_API int gmeta_gpu_table_journal_whole(gmeta_gpu_table* table, int32_t* out);

// The state of admission: exact counts, in no particular order, and the filters of the table's own
// shards one after another. All in host memory.
typedef struct {
  int64_t* keys;    // (counters,)
  int64_t* counts;  // (counters,)
  uint8_t* filter;  // (filter_bytes,)
} gmeta_gpu_table_admission_columns;
typedef int (*gmeta_gpu_table_allocate_admission)(void* context, int64_t counters,
                                                  int64_t filter_bytes,
                                                  gmeta_gpu_table_admission_columns* to);
GMETA_CUDA_API int gmeta_gpu_table_export_admission(gmeta_gpu_table* table,
                                                    gmeta_gpu_table_allocate_admission allocate,
                                                    void* context);

// The first function returns the number of filters, one per shard, and the bytes of each (0: there
// is no filter). The second copies the filter of one shard to host memory.
GMETA_CUDA_API int gmeta_gpu_table_filters(gmeta_gpu_table* table, int64_t* filters,
                                           int64_t* filter_bytes);
GMETA_CUDA_API int gmeta_gpu_table_export_filter(gmeta_gpu_table* table, int64_t shard,
                                                 uint8_t* to);

// The same as Table's ReplaceAdmission (`replace` other than 0) or MergeAdmission, from host
// memory. Returns GMETA_CUDA_INVALID if the filter has another size.
GMETA_CUDA_API int gmeta_gpu_table_import_admission(gmeta_gpu_table* table, const int64_t* keys,
                                                    const int64_t* counts, int64_t n,
                                                    const uint8_t* filter, int64_t filter_bytes,
                                                    int64_t first_filter, int32_t replace);

}  // extern "C"

#endif  // GMETA_OPS_TABLE_GPU_TABLE_ABI_H_
