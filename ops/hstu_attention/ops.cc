// Registration of GmetaHstuAttention and its gradient.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;

// q and k have no elements for attention by the bias alone, a table none where it is absent.
REGISTER_OP("GmetaHstuAttention")
    .Input("q: float")
    .Input("k: float")
    .Input("v: float")
    .Input("offsets: int64")
    .Input("visible: int32")
    .Input("positions: float")
    .Input("time_buckets: float")
    .Input("row_times: int64")
    .Input("column_times: int64")
    .Attr("scale: float")
    .Attr("alpha: float")
    .Attr("bucket_starts: list(int)")
    .Output("out: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(2));
      return absl::OkStatus();
    });

REGISTER_OP("GmetaHstuAttentionGradient")
    .Input("q: float")
    .Input("k: float")
    .Input("v: float")
    .Input("offsets: int64")
    .Input("visible: int32")
    .Input("positions: float")
    .Input("time_buckets: float")
    .Input("row_times: int64")
    .Input("column_times: int64")
    .Input("of_out: float")
    .Attr("scale: float")
    .Attr("alpha: float")
    .Attr("bucket_starts: list(int)")
    .Output("of_q: float")
    .Output("of_k: float")
    .Output("of_v: float")
    .Output("of_positions: float")
    .Output("of_time_buckets: float")
    .SetShapeFn([](InferenceContext* c) {
      for (int output = 0; output < 3; ++output) c->set_output(output, c->input(output));
      c->set_output(3, c->input(5));
      c->set_output(4, c->input(6));
      return absl::OkStatus();
    });

}  // namespace gmeta
