// Registration of the ops on a dynamic hash table. A table is an anonymous resource: it lives as
// long as a handle to it does.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status ScalarInput(InferenceContext* c, int input) {
  ShapeHandle unused;
  return c->WithRank(c->input(input), 0, &unused);
}

absl::Status VectorInput(InferenceContext* c, int input) {
  ShapeHandle unused;
  return c->WithRank(c->input(input), 1, &unused);
}

}  // namespace

// The parameters are float64 inputs because float attributes are float32: 1 - beta2 would lose five
// digits.
REGISTER_OP("GmetaHashTable")
    .Input("optimizer_parameters: float64")
    .Input("initializer_parameters: float64")
    .Input("admission_parameters: float64")
    .Input("eviction_parameters: float64")
    .Output("table: resource")
    .Attr("table_name: string")
    .Attr("dim: int >= 1")
    .Attr("optimizer: {'sgd', 'adagrad', 'adam', 'momentum', 'rowwise_adagrad', 'adamw', 'ftrl'}")
    .Attr("initializer: {'constant', 'uniform', 'normal', 'truncated_normal'}")
    .Attr("admission: {'all', 'count', 'filter', 'chance'}")
    .Attr("eviction: {'none', 'age', 'frequency', 'expired', 'norm'}")
    .Attr("half_below: int >= 0")
    .Attr("half_life: int >= 0 = 0")
    .Attr("round_at_random: bool = false")
    .Attr("hbm_rows: int >= 0 = 0")
    .Attr("lookahead: int >= 0 = 0")
    .Attr("l2: list(float) = []")
    .Attr("disk_folder: string = ''")
    .Attr("memory_bytes: int >= 0 = 0")
    .Attr("seed: int")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 4; ++i) TF_RETURN_IF_ERROR(VectorInput(c, i));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

// `dim` repeats the table's, so that the shape of `rows` is known when a graph is built. `distinct`
// promises that no key occurs twice, which saves a table on a GPU some work; the same holds for
// GmetaHashTableUpdate.
REGISTER_OP("GmetaHashTableLookup")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("insert: bool")
    .Output("rows: float32")
    .Attr("dim: int >= 1")
    .Attr("distinct: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      TF_RETURN_IF_ERROR(ScalarInput(c, 2));
      int dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(0, c->Matrix(c->Dim(c->input(1), 0), dim));
      return absl::OkStatus();
    });

// Reads rows ahead, with their stamps (core/stamp.h), and changes nothing. It is stateful, so that
// no optimizer of graphs computes it once for all steps.
REGISTER_OP("GmetaHashTablePeek")
    .Input("table: resource")
    .Input("keys: int64")
    .Output("rows: float32")
    .Output("stamps: int64")
    .Attr("dim: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      int dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(0, c->Matrix(c->Dim(c->input(1), 0), dim));
      c->set_output(1, c->input(1));
      return absl::OkStatus();
    });

// A lookup of peeked keys, which reads again only the rows that may have changed since: `changed`
// rows.
REGISTER_OP("GmetaHashTableReread")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("peeked: float32")
    .Input("stamps: int64")
    .Input("insert: bool")
    .Output("rows: float32")
    .Output("changed: int64")
    .Attr("distinct: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle peeked, unused;
      tensorflow::shape_inference::DimensionHandle n;
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &peeked));
      TF_RETURN_IF_ERROR(c->Merge(c->Dim(c->input(1), 0), c->Dim(peeked, 0), &n));
      TF_RETURN_IF_ERROR(c->Merge(c->input(1), c->input(3), &unused));
      TF_RETURN_IF_ERROR(ScalarInput(c, 4));
      c->set_output(0, peeked);
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("GmetaHashTableUpdate")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("gradients: float32")
    .Input("learning_rate: float32")
    .Attr("distinct: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle gradients;
      tensorflow::shape_inference::DimensionHandle unused;
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &gradients));
      TF_RETURN_IF_ERROR(c->Merge(c->Dim(c->input(1), 0), c->Dim(gradients, 0), &unused));
      return ScalarInput(c, 3);
    });

// The update of distinct keys (u,) from one gradient for each position of a batch: the gradient of
// keys[j] is the sum of gradients[i] over all i with positions[i] == j, added in ascending order of
// i. Keys that no position names stay as they are.
REGISTER_OP("GmetaHashTableUpdateIndexed")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("gradients: float32")
    .Input("positions: int32")
    .Input("learning_rate: float32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle gradients;
      tensorflow::shape_inference::DimensionHandle unused;
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      TF_RETURN_IF_ERROR(VectorInput(c, 3));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &gradients));
      TF_RETURN_IF_ERROR(c->Merge(c->Dim(c->input(3), 0), c->Dim(gradients, 0), &unused));
      return ScalarInput(c, 4);
    });

REGISTER_OP("GmetaHashTableRemove")
    .Input("table: resource")
    .Input("keys: int64")
    .Output("removed: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

REGISTER_OP("GmetaHashTableContains")
    .Input("table: resource")
    .Input("keys: int64")
    .Output("found: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(VectorInput(c, 1));
      c->set_output(0, c->Vector(c->Dim(c->input(1), 0)));
      return absl::OkStatus();
    });

// Brings the keys' rows to the memory that lookups read (host/records.h).
REGISTER_OP("GmetaHashTablePrefetch")
    .Input("table: resource")
    .Input("keys: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return VectorInput(c, 1); });

REGISTER_OP("GmetaHashTableReserve")
    .Input("table: resource")
    .Attr("rows: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// size, capacity, bytes, hits, misses, inserts, removes, updates, ignored, rejects, evictions,
// half_rows, disk_rows, disk_bytes, brought, spilled, host_rows, crowded
REGISTER_OP("GmetaHashTableStatistics")
    .Input("table: resource")
    .Output("statistics: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(18));
      return absl::OkStatus();
    });

REGISTER_OP("GmetaHashTableSize")
    .Input("table: resource")
    .Output("size: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("GmetaHashTableStep")
    .Input("table: resource")
    .Output("step: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_OP("GmetaHashTableExport")
    .Input("table: resource")
    .Output("keys: int64")
    .Output("rows: float32")
    .Output("slots: float32")
    .Output("frequency: int64")
    .Output("last_step: int64")
    .Output("step: int64")
    .Attr("dim: int >= 1")
    .Attr("with_slots: bool = true")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      const auto rows = c->MakeDim(InferenceContext::kUnknownDim);
      int dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(0, c->Vector(rows));
      c->set_output(1, c->Matrix(rows, dim));
      c->set_output(2, c->Matrix(rows, InferenceContext::kUnknownDim));
      c->set_output(3, c->Vector(rows));
      c->set_output(4, c->Vector(rows));
      c->set_output(5, c->Scalar());
      return absl::OkStatus();
    });

// Exports from the logical shards [shards[0], shards[1]), sorted by shard and key: the rows with
// last_step >= min_last_step; the journal's removed keys; the number of rows of each shard,
// exported or not; and the keys that wait for admission, with their exact counts. The splits are by
// logical shard.
REGISTER_OP("GmetaHashTableExportShards")
    .Input("table: resource")
    .Input("shards: int64")
    .Input("min_last_step: int64")
    .Output("keys: int64")
    .Output("rows: float32")
    .Output("slots: float32")
    .Output("frequency: int64")
    .Output("last_step: int64")
    .Output("row_splits: int64")
    .Output("removed: int64")
    .Output("removed_splits: int64")
    .Output("live: int64")
    .Output("step: int64")
    .Output("journal_whole: bool")
    .Output("waiting: int64")
    .Output("waiting_counts: int64")
    .Output("waiting_splits: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (const int i : {0, 3, 4, 5, 6, 7, 8, 11, 12, 13}) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      for (const int i : {1, 2}) {
        c->set_output(i, c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim));
      }
      for (const int i : {9, 10}) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    });

// Exchanges two tables: each takes the other's place.
REGISTER_OP("GmetaHashTableSwap")
    .Input("table: resource")
    .Input("other: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Starts the journal, which notes up to about `limit` removed keys from now on; 0: none.
REGISTER_OP("GmetaHashTableStartJournal")
    .Input("table: resource")
    .Input("limit: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Forgets the removed keys that were exported, which are safely saved.
REGISTER_OP("GmetaHashTableJournalSaved")
    .Input("table: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// 1 if every removal since the journal was started has been noted, else 0.
REGISTER_OP("GmetaHashTableJournalWhole")
    .Input("table: resource")
    .Output("whole: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// Takes a snapshot: from now on, the table notes what records were before they change. Returns the
// number of the snapshot. Only for tables in host memory.
REGISTER_OP("GmetaHashTableTakeSnapshot")
    .Input("table: resource")
    .Output("snapshot: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

// Restores all records and the step as they were at a snapshot, and keeps the snapshot. The table
// must have it.
REGISTER_OP("GmetaHashTableRestoreSnapshot")
    .Input("table: resource")
    .Input("snapshot: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Forgets a snapshot. Does nothing if the table doesn't have it.
REGISTER_OP("GmetaHashTableDropSnapshot")
    .Input("table: resource")
    .Input("snapshot: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Writes records to the table. With `replace`, the table then holds these records and nothing else,
// and its step is `step`.
REGISTER_OP("GmetaHashTableImport")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("rows: float32")
    .Input("slots: float32")
    .Input("frequency: int64")
    .Input("last_step: int64")
    .Input("step: int64")
    .Attr("replace: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Evicts as of step `at` (-1: the table's own) in the shards whose turn `turns` has, a bit for each
// of 64 turns (core/step_times.h).
REGISTER_OP("GmetaHashTableEvict")
    .Input("table: resource")
    .Input("at: int64")
    .Input("turns: int64")
    .Output("evicted: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(ScalarInput(c, 1));
      TF_RETURN_IF_ERROR(ScalarInput(c, 2));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    });

// Notes a step in a record of steps and their times, both (n, 2), by a clock's seconds. `lifetime`
// and `every` are microseconds. `before` is the step below which rows have expired, and `turns` the
// turns that have come (core/step_times.h).
REGISTER_OP("GmetaNoteStepTime")
    .Input("pairs: int64")
    .Input("step: int64")
    .Input("seconds: float64")
    .Output("noted: int64")
    .Output("before: int64")
    .Output("turns: int64")
    .Attr("lifetime: int >= 1")
    .Attr("every: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &unused));
      TF_RETURN_IF_ERROR(ScalarInput(c, 1));
      TF_RETURN_IF_ERROR(ScalarInput(c, 2));
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, 2));
      for (const int i : {1, 2}) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    });

// The state of admission: exact counters, or the bytes of a filter.
REGISTER_OP("GmetaHashTableExportAdmission")
    .Input("table: resource")
    .Output("keys: int64")
    .Output("counts: int64")
    .Output("filter: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      const auto counters = c->MakeDim(InferenceContext::kUnknownDim);
      c->set_output(0, c->Vector(counters));
      c->set_output(1, c->Vector(counters));
      c->set_output(2, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

// The filter counters of the table's own shards [shards[0], shards[1]), one row per shard; the
// table has `count` shards. The rows have width 0 if admission has no filter.
REGISTER_OP("GmetaHashTableExportFilter")
    .Input("table: resource")
    .Input("shards: int64")
    .Output("counters: uint8")
    .Output("count: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

// Imports the state of admission. With `replace`, admission then holds this state and nothing else,
// and `filter` has the filters of all shards. Otherwise the state is merged, and `filter` has the
// filters of some shards, from number `first_filter` on.
REGISTER_OP("GmetaHashTableImportAdmission")
    .Input("table: resource")
    .Input("keys: int64")
    .Input("counts: int64")
    .Input("filter: uint8")
    .Input("first_filter: int64")
    .Attr("replace: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

}  // namespace gmeta
