// Registration of the ops that compute an HSTU layer on a GPU, besides products of matrices.

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;

// Absent scale and offset have no elements. With `passes`, `passed` is x; otherwise it has no
// elements. The gradient of another use of x arrives through `passed` and is added to the norm's in
// one pass.
REGISTER_OP("GmetaRowNorm")
    .Input("x: T")
    .Input("scale: T")
    .Input("offset: T")
    .Attr("T: {bfloat16, half}")
    .Attr("epsilon: float")
    .Attr("passes: bool = false")
    .Output("y: T")
    .Output("statistics: float")
    .Output("passed: T")
    .SetShapeFn([](InferenceContext* c) {
      bool passes;
      TF_RETURN_IF_ERROR(c->GetAttr("passes", &passes));
      c->set_output(0, c->input(0));
      c->set_output(1, c->Matrix(c->UnknownDim(), 2));
      c->set_output(2, passes ? c->input(0) : c->Vector(0));
      return absl::OkStatus();
    });

REGISTER_OP("GmetaRowNormGradient")
    .Input("x: T")
    .Input("scale: T")
    .Input("offset: T")
    .Input("statistics: float")
    .Input("of_y: T")
    .Input("of_passed: T")
    .Attr("T: {bfloat16, half}")
    .Attr("epsilon: float")
    .Output("of_x: T")
    .Output("of_scale: T")
    .Output("of_offset: T")
    .SetShapeFn([](InferenceContext* c) {
      for (int output = 0; output < 3; ++output) c->set_output(output, c->input(output));
      return absl::OkStatus();
    });

// x + (change + offset). x is optional, and so is the offset, which is one row; if absent, they
// have no elements.
REGISTER_OP("GmetaResidual")
    .Input("x: T")
    .Input("change: T")
    .Input("offset: T")
    .Attr("T: {bfloat16, half}")
    .Output("y: T")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

REGISTER_OP("GmetaColumnSums")
    .Input("x: T")
    .Attr("T: {bfloat16, half}")
    .Output("sums: T")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle x;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &x));
      c->set_output(0, c->Vector(c->Dim(x, 1)));
      return absl::OkStatus();
    });

// z = x w, and SiLU of its columns from `activated_from` on. Gradients treat the latter as a
// constant: they flow through z.
REGISTER_OP("GmetaSiluProjection")
    .Input("x: T")
    .Input("w: T")
    .Attr("T: {bfloat16, half}")
    .Attr("activated_from: int >= 0")
    .Output("z: T")
    .Output("activated: T")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle x, w;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &x));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &w));
      tensorflow::shape_inference::DimensionHandle inner, activated;
      TF_RETURN_IF_ERROR(c->Merge(c->Dim(x, 1), c->Dim(w, 0), &inner));
      int64_t from;
      TF_RETURN_IF_ERROR(c->GetAttr("activated_from", &from));
      TF_RETURN_IF_ERROR(c->Subtract(c->Dim(w, 1), from, &activated));
      c->set_output(0, c->Matrix(c->Dim(x, 0), c->Dim(w, 1)));
      c->set_output(1, c->Matrix(c->Dim(x, 0), activated));
      return absl::OkStatus();
    });

// `projected` is [u, v, q, k] of all heads, before their activation. `active` is for the research
// form: SiLU of [v, q, k], if it is computed already. The outputs besides `mixed` are what the
// gradient needs. Absent tables of a bias, times and `active` have no elements.
REGISTER_OP("GmetaHstuMix")
    .Input("projected: T")
    .Input("offsets: int64")
    .Input("visible: int32")
    .Input("plan: uint8")
    .Input("norm_scale: T")
    .Input("norm_offset: T")
    .Input("positions: float")
    .Input("time_buckets: float")
    .Input("row_times: int64")
    .Input("column_times: int64")
    .Input("time_map: uint8")
    .Input("active: T")
    .Attr("T: {bfloat16, half}")
    .Attr("heads: int >= 1")
    .Attr("scale: float")
    .Attr("alpha: float")
    .Attr("epsilon: float")
    .Attr("production: bool")
    .Attr("bucket_starts: list(int)")
    .Output("mixed: T")
    .Output("attended: T")
    .Output("statistics: float")
    .Output("activated: T")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle projected;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &projected));
      bool production;
      TF_RETURN_IF_ERROR(c->GetAttr("production", &production));
      tensorflow::shape_inference::DimensionHandle width, mixed;
      TF_RETURN_IF_ERROR(c->Divide(c->Dim(projected, 1), 4, true, &width));
      TF_RETURN_IF_ERROR(c->Multiply(width, production ? 3 : 1, &mixed));
      c->set_output(0, c->Matrix(c->Dim(projected, 0), mixed));
      for (int output : {1, 2, 3}) c->set_output(output, c->UnknownShapeOfRank(2));
      return absl::OkStatus();
    });

REGISTER_OP("GmetaHstuMixGradient")
    .Input("projected: T")
    .Input("offsets: int64")
    .Input("visible: int32")
    .Input("plan: uint8")
    .Input("norm_scale: T")
    .Input("norm_offset: T")
    .Input("positions: float")
    .Input("time_buckets: float")
    .Input("row_times: int64")
    .Input("column_times: int64")
    .Input("time_map: uint8")
    .Input("active: T")
    .Input("mixed: T")
    .Input("attended: T")
    .Input("statistics: float")
    .Input("activated: T")
    .Input("of_mixed: T")
    .Attr("T: {bfloat16, half}")
    .Attr("heads: int >= 1")
    .Attr("scale: float")
    .Attr("alpha: float")
    .Attr("epsilon: float")
    .Attr("production: bool")
    .Attr("bucket_starts: list(int)")
    .Output("of_projected: T")
    .Output("of_norm_scale: T")
    .Output("of_norm_offset: T")
    .Output("of_positions: float")
    .Output("of_time_buckets: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      for (int output = 1; output < 5; ++output) c->set_output(output, c->input(3 + output));
      return absl::OkStatus();
    });

}  // namespace gmeta
