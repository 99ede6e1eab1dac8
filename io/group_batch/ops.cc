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
    .Input("seed: int64")
    .Input("groups_per_element: int64")
    .Input("shuffle_buffer: int64")
    .Input("min_rows: int64")
    .Input("stats: int64")
    .Output("handle: variant")
    .Attr("column_names: list(string) >= 2")
    .Attr("column_types: list({int64, float}) >= 2")
    .Attr("column_lists: list(bool) >= 2")
    .Attr("task_column: string")
    .Attr("batch_column: string")
    .Attr("on_bad: {'raise', 'skip'} = 'raise'")
    .Attr("output_types: list(type) >= 3")
    .Attr("output_shapes: list(shape) >= 3")
    // A source without inputs that change would otherwise be folded into a constant.
    .SetDoNotOptimize()
    .SetTypeConstructor(tensorflow::full_type::VariadicTensorContainer(tensorflow::TFT_DATASET,
                                                                       "output_types"))
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &shape));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &shape));
      tensorflow::shape_inference::DimensionHandle two;
      TF_RETURN_IF_ERROR(c->WithValue(c->Dim(shape, 0), 2, &two));
      for (int i = 2; i < c->num_inputs(); ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &shape));
      }
      return tensorflow::shape_inference::ScalarShape(c);
    })
    .Doc(R"doc(
Reads files of tf.train.Example records and groups consecutive ones by (task, batch).

An element is the task ids (G), the batch ids (G) and the row splits (G + 1) of its G groups, then
for every other column its values, followed by their row splits if it is a list column.

files: TFRecord files, read in this order where nothing is shuffled.
seed: Two numbers that give the order where something is.
groups_per_element: Groups in an element; the last element may hold fewer.
shuffle_buffer: Groups that the shuffle buffer holds; 0 keeps the files' order.
min_rows: A smaller group is bad.
stats: Number of the counters to count into, or 0.
)doc");

}  // namespace gmeta::group_batch
