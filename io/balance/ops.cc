// Registration of GmetaKarmarkarKarp.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta::balance {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("GmetaKarmarkarKarp")
    .Input("costs: double")
    .Input("ranks: int32")
    .Output("rank_of: int32")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle costs, ranks;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &costs));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &ranks));
      c->set_output(0, costs);
      return absl::OkStatus();
    });

}  // namespace gmeta::balance
