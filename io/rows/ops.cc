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
Deals the rows of groups out in batches, shuffled within each element.

An element of the input is what draws its order, int64: (seed, epoch, number), or empty to keep the
rows as they stand; the row splits (G + 1) of its G groups; then every column: its values, followed by
their row splits if it is a list column.

An element of the output is every column's values in the batch's rows, each followed by row splits if
it is a list column.

batch_size: Rows of a batch; the last one may hold fewer.
drop_remainder: Whether that one is left out.
column_kinds: Of each column: a value a row, a list a row, or a value a group.
)doc");

}  // namespace gmeta::rows
