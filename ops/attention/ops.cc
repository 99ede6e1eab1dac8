// Registration of GmetaHstuAttention and its gradient.

#include <string>

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
// Softmax keeps the logarithm of each row's sum, (heads, tokens), which its gradient takes beside
// the output; with SiLU, the gradient takes tensors without elements in their place.
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
    .Attr("form: {'silu', 'softmax'} = 'silu'")
    .Output("out: T")
    .Output("log_sums: float")
    .SetShapeFn([](InferenceContext* c) {
      std::string form;
      TF_RETURN_IF_ERROR(c->GetAttr("form", &form));
      c->set_output(0, c->input(2));
      c->set_output(1, form == "softmax" ? c->UnknownShapeOfRank(2) : c->Vector(0));
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
    .Input("out: T")
    .Input("log_sums: float")
    .Attr("T: {float, bfloat16, half}")
    .Attr("scale: float")
    .Attr("alpha: float")
    .Attr("bucket_starts: list(int)")
    .Attr("form: {'silu', 'softmax'} = 'silu'")
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
