// Registration of GmetaNearGpu.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace gmeta {

// A copy of a batch's column in pinned memory (kernels.cc).
REGISTER_OP("GmetaNearGpu")
    .Input("column: T")
    .Output("copy: T")
    .Attr("T: {numbertype, bool}")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

}  // namespace gmeta
