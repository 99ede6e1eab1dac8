// Registration of GmetaUnique and GmetaOrderByOwner.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;

// With `ranks`, keys are ordered by the rank that owns them, and `counts` is each rank's number of
// keys.
REGISTER_OP("GmetaUnique")
    .Input("ids: int64")
    .Attr("ranks: int >= 0 = 0")
    .Output("keys: int64")
    .Output("inverse: int32")
    .Output("counts: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->input(0));
      int64_t ranks;
      TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
      c->set_output(2, c->Vector(ranks));
      return absl::OkStatus();
    });

// Orders all ids by the rank that owns them.
REGISTER_OP("GmetaOrderByOwner")
    .Input("ids: int64")
    .Attr("ranks: int >= 1")
    .Output("keys: int64")
    .Output("inverse: int32")
    .Output("counts: int32")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle ids;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &ids));
      c->set_output(0, ids);
      c->set_output(1, ids);
      int64_t ranks;
      TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
      c->set_output(2, c->Vector(ranks));
      return absl::OkStatus();
    });

}  // namespace gmeta
