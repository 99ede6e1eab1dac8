// Registration of GmetaHstuAttention and its gradient.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;

// The plan says which of a batch's scores to compute (strips.cuh). It has no bytes on a CPU, whose
// kernels don't need it. It depends on offsets and mask alone, so all layers and gradients share
// one.
REGISTER_OP("GmetaHstuPlan")
    .Input("offsets: int64")
    .Input("visible: int32")
    .Output("plan: uint8")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

// The map of times (time_map.cuh) has no bytes on a CPU either. All layers and gradients with the
// plan share it.
REGISTER_OP("GmetaHstuTimeMap")
    .Input("offsets: int64")
    .Input("plan: uint8")
    .Input("row_times: int64")
    .Input("column_times: int64")
    .Attr("bucket_starts: list(int)")
    .Output("time_map: uint8")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->UnknownDim()));
      return absl::OkStatus();
    });

// q and k have no elements for attention by the bias alone; an absent table has no elements.
REGISTER_OP("GmetaHstuAttention")
    .Input("q: T")
    .Input("k: T")
    .Input("v: T")
    .Input("offsets: int64")
    .Input("visible: int32")
    .Input("positions: float")
    .Input("time_buckets: float")
    .Input("row_times: int64")
    .Input("column_times: int64")
    .Input("time_map: uint8")
    .Input("plan: uint8")
    .Attr("T: {float, bfloat16, half}")
    .Attr("scale: float")
    .Attr("alpha: float")
    .Attr("bucket_starts: list(int)")
    .Output("out: T")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(2));
      return absl::OkStatus();
    });

REGISTER_OP("GmetaHstuAttentionGradient")
    .Input("q: T")
    .Input("k: T")
    .Input("v: T")
    .Input("offsets: int64")
    .Input("visible: int32")
    .Input("positions: float")
    .Input("time_buckets: float")
    .Input("row_times: int64")
    .Input("column_times: int64")
    .Input("time_map: uint8")
    .Input("plan: uint8")
    .Input("of_out: T")
    .Attr("T: {float, bfloat16, half}")
    .Attr("scale: float")
    .Attr("alpha: float")
    .Attr("bucket_starts: list(int)")
    .Output("of_q: T")
    .Output("of_k: T")
    .Output("of_v: T")
    .Output("of_positions: float")
    .Output("of_time_buckets: float")
    .SetShapeFn([](InferenceContext* c) {
      for (int output = 0; output < 3; ++output) c->set_output(output, c->input(output));
      c->set_output(3, c->input(5));
      c->set_output(4, c->input(6));
      return absl::OkStatus();
    });

}  // namespace gmeta
