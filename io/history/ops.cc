// Registers the ops that read histories, compute their checksums, and check them.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta::history {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("GmetaReadHistories")
    .Input("users: int64")
    .Input("start: int64")
    .Input("until: int64")
    .Input("generation: int64")
    .Output("row_splits: int64")
    .Output("counts: int64")
    .Output("values: column_types")
    .Attr("store: string")
    .Attr("digest: string")
    .Attr("opened: int >= 1")
    .Attr("indexes: list(string) >= 1")
    .Attr("group: int >= 0")
    .Attr("columns: list(int)")
    .Attr("column_types: list({int64, float}) >= 1")
    .Attr("longest: int >= 0")
    .Attr("on_bad: {'raise', 'skip'} = 'raise'")
    .Attr("stats: int = 0")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle users, other;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &users));
      for (int i = 1; i < c->num_inputs(); ++i) {
        TF_RETURN_IF_ERROR(c->Merge(users, c->input(i), &other));
      }
      tensorflow::shape_inference::DimensionHandle ends;
      TF_RETURN_IF_ERROR(c->Add(c->Dim(users, 0), 1, &ends));
      c->set_output(0, c->Vector(ends));
      c->set_output(1, c->Vector(3));
      for (int i = 2; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Rebuilds the histories of users as of a moment, from a store on any file system.

A history has the newest `longest` of a user's events with start <= time < until that `generation`
held, in the order of (time, birth).

users: (R) the users, of any shards and in any order.
start: (R) the first time that counts.
until: (R) the first time that doesn't.
generation: (R) the newest generation whose events count.
row_splits: (R + 1) history i is row_splits[i] to row_splits[i + 1] - 1 of the values.
counts: (3) reads from files, bytes read, and histories left empty because a stripe is damaged.
values: For each column its values.
store: The store's folder.
digest: That of the manifest of the generation `opened`.
opened: The generation whose indexes are used.
indexes: For each shard of the generation the SHA-256 of its index, in hexadecimal.
group: The number of the group of columns.
columns: The numbers of the columns in its stripes.
column_types: Their types.
longest: The most events of a history.
on_bad: 'skip' leaves the history of a damaged stripe empty, and counts it.
stats: The number of the counters to update; 0: none.
)doc");

REGISTER_OP("GmetaCheckHistories")
    .Input("users: int64")
    .Input("generations: int64")
    .Input("rows: int64")
    .Input("found: int64")
    .Input("logged: int64")
    .Output("sound: bool")
    .Attr("examples: string")
    .Attr("store: string")
    .Attr("check: {'crc', 'length'}")
    .Attr("on_bad: {'raise', 'skip'} = 'raise'")
    .Attr("stats: int = 0")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle users, other;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &users));
      for (int i = 1; i < c->num_inputs(); ++i) {
        TF_RETURN_IF_ERROR(c->Merge(users, c->input(i), &other));
      }
      c->set_output(0, users);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Compares what is known of R histories with what the ranker logged.

users: (R) whose history each is.
generations: (R) the generation that it was read at.
rows: (R) the examples' rows that have it, which are counted as skipped if they are left out.
found: (R) the history's checksum or length.
logged: (R) the ranker's.
sound: (R) whether both are equal.
examples: The split of the examples, for messages.
store: The store's folder, for messages.
check: What the numbers are.
on_bad: 'raise' ends at the first history that differs; 'skip' counts it.
stats: The number of the counters to update; 0: none.
)doc");

REGISTER_OP("GmetaDeletedHistories")
    .Input("users: int64")
    .Input("generation: int64")
    .Output("deleted: bool")
    .Attr("store: string")
    .Attr("digest: string")
    .Attr("opened: int >= 1")
    .Attr("indexes: list(string) >= 1")
    .SetDoNotOptimize()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle users;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &users));
      TF_RETURN_IF_ERROR(c->Merge(users, c->input(1), &users));
      c->set_output(0, users);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Tells users whose events were deleted from users who had none.

users: (R) the users, of any shards and in any order.
generation: (R) a generation.
deleted: (R) whether events of the user that this generation held were deleted later.
store: The store's folder.
digest: That of the manifest of the generation `opened`.
opened: The generation whose indexes are used.
indexes: For each shard of the generation the SHA-256 of its index, in hexadecimal.
)doc");

REGISTER_OP("GmetaHistoryCrc")
    .Input("row_splits: int64")
    .Input("columns: column_types")
    .Output("crcs: int64")
    .Attr("column_types: list({int64, float}) >= 1")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle vector;
      for (int i = 0; i < c->num_inputs(); ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
      }
      tensorflow::shape_inference::DimensionHandle histories;
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(c->input(0), 0), 1, &histories));
      c->set_output(0, c->Vector(histories));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Computes the checksum of each of R histories: the CRC-32C of its columns, one after another.

row_splits: (R + 1) history i is row_splits[i] to row_splits[i + 1] - 1 of the values.
columns: For each column its values, as words of 64 bits; a float is its bits.
crcs: (R) from 0 to 2^32 - 1; 0 for a history without events.
)doc");

}  // namespace gmeta::history
