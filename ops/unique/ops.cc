// Registration of GmetaUnique.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("GmetaUnique")
    .Input("ids: int64")
    .Output("keys: int64")
    .Output("inverse: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->input(0));
      return absl::OkStatus();
    });

}  // namespace gmeta
