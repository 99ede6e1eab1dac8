// Registration of GmetaNearGpu and GmetaToGpu.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace gmeta {

// A copy of a batch's column in pinned memory (kernels.cc). It is stateful so that tf.data doesn't
// call it for several batches at once, which would take them from the data before they are wanted.
REGISTER_OP("GmetaNearGpu")
    .Input("column: T")
    .Output("copy: T")
    .Attr("T: {numbertype, bool}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

// A copy of a batch's column on the op's device (kernels_gpu.cc).
REGISTER_OP("GmetaToGpu")
    .Input("column: T")
    .Output("copy: T")
    .Attr("T: {numbertype, bool}")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

}  // namespace gmeta
