// Registers the GroupBatch dataset op.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/full_type_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta::group_batch {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("GmetaGroupBatchDataset")
    .Input("files: string")
    .Input("groups: int64")
    .Input("index_crcs: int64")
    .Input("seed: int64")
    .Input("shuffle_window: int64")
    .Input("lanes: int64")
    .Input("begins: int64")
    .Input("ends: int64")
    .Input("groups_per_element: int64")
    .Input("balance: double")
    .Input("steps: int64")
    .Input("first_step: int64")
    .Input("min_rows: int64")
    .Input("threads: int64")
    .Input("stats: int64")
    .Output("handle: variant")
    .Attr("column_names: list(string) >= 2")
    .Attr("column_types: list({int64, float}) >= 2")
    .Attr("column_lists: list(bool) >= 2")
    .Attr("task_column: string")
    .Attr("batch_column: string")
    .Attr("layout: {'example', 'columnar'}")
    .Attr("on_bad: {'raise', 'skip'} = 'raise'")
    .Attr("token_column: string = ''")
    .Attr("output_types: list(type) >= 4")
    .Attr("output_shapes: list(shape) >= 4")
    // Otherwise a source whose inputs never change would be folded into a constant.
    .SetDoNotOptimize()
    .SetTypeConstructor(tensorflow::full_type::VariadicTensorContainer(tensorflow::TFT_DATASET,
                                                                       "output_types"))
    .SetShapeFn([](InferenceContext* c) {
      const int ranks[] = {1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0};
      ShapeHandle shape;
      for (int i = 0; i < c->num_inputs(); ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), ranks[i], &shape));
      }
      return tensorflow::shape_inference::ScalarShape(c);
    })
    .Doc(R"doc(
Reads ranges of an epoch's groups out of shards that have an index beside them.

An element holds a cursor for each lane (L), the number of the lane's groups taken so far; the task
ids (G), the batch ids (G) and the row splits (G + 1) of the element's G groups; then for every
other column its values, followed by their row splits if it is a list column.

files: The shards; the index of each is beside it.
groups: The number of groups in each shard.
index_crcs: The checksum of each shard's index, or -1.
seed: Two numbers that determine the order of the epoch.
shuffle_window: Number of groups permuted among each other; 0 keeps the order of the shards.
lanes: For each span its lane, ascending from 0.
begins: For each span its first position in the epoch's order.
ends: For each span the position after its last one.
groups_per_element: Number of groups that an element takes from each lane.
balance: Empty, or, instead of a number of groups: target, linear and quadratic cost, the most
  tokens of a batch, and the most tokens of a sequence that count; 0 removes either limit.
steps: Number of elements, including those without groups at the end; -1: until all lanes are read.
first_step: Number of elements to skip; they are neither read nor output.
min_rows: The fewest rows of a sound group.
threads: Number of parser threads for each lane.
stats: The number of the counters to update, or 0.
)doc");

}  // namespace gmeta::group_batch
