// Registers the RowBatches dataset op.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/full_type_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta::rows {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("GmetaRowBatchesDataset")
    .Input("input_dataset: variant")
    .Input("batch_size: int64")
    .Input("drop_remainder: bool")
    .Output("handle: variant")
    .Attr("column_kinds: list({'row', 'list', 'group'}) >= 1")
    .Attr("output_types: list({int64, float}) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetTypeConstructor(tensorflow::full_type::VariadicTensorContainer(tensorflow::TFT_DATASET,
                                                                       "output_types"))
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle scalar;
      for (int i = 0; i < c->num_inputs(); ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 0, &scalar));
      }
      return tensorflow::shape_inference::ScalarShape(c);
    })
    .Doc(R"doc(
Divides the rows of groups into batches, shuffled within each element.

An element of the input holds the numbers that determine its order, int64: (seed, epoch, number), or
none to keep the order of the rows; the row splits (G + 1) of its G groups; then every column: its
values, followed by their row splits if it is a list column.

An element of the output holds every column's values in the batch's rows, each followed by row
splits if it is a list column.

batch_size: Number of rows of a batch; the last one may hold fewer.
drop_remainder: Whether to drop a last batch with fewer rows.
column_kinds: For each column: a value per row, a list per row, or a value per group.
)doc");

}  // namespace gmeta::rows
