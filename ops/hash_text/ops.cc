// Registration of GmetaHashText.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace gmeta {

// The last 8 bytes of each text's MD5, little endian, as a signed number.
REGISTER_OP("GmetaHashText")
    .Input("texts: string")
    .Output("numbers: int64")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape);

}  // namespace gmeta
