// Registration of GmetaTrieStep.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;

// `allowed` has a value for each child, or none: then all are allowed.
REGISTER_OP("GmetaTrieStep")
    .Input("logits: float")
    .Input("scores: float")
    .Input("nodes: int64")
    .Input("starts: int64")
    .Input("digits: int32")
    .Input("allowed: bool")
    .Attr("k: int >= 1")
    .Output("next_scores: float")
    .Output("next_nodes: int64")
    .Output("beams: int32")
    .SetShapeFn([](InferenceContext* c) {
      tensorflow::shape_inference::ShapeHandle scores;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &scores));
      int64_t k;
      TF_RETURN_IF_ERROR(c->GetAttr("k", &k));
      for (int i = 0; i < 3; ++i) c->set_output(i, c->Matrix(c->Dim(scores, 0), k));
      return absl::OkStatus();
    });

}  // namespace gmeta
