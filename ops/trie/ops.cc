// Registration of GmetaTrieStep, GmetaTrieSample, GmetaTrieGumbelStep, GmetaTrieLogProbs and its
// gradient. `allowed` has a value for each child, or none: then all are allowed.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// All outputs are (users, k).
absl::Status ShapeOfStep(InferenceContext* c) {
  ShapeHandle scores;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &scores));
  int64_t k;
  TF_RETURN_IF_ERROR(c->GetAttr("k", &k));
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Matrix(c->Dim(scores, 0), k));
  return absl::OkStatus();
}

}  // namespace

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
    .SetShapeFn(ShapeOfStep);

// A child of each beam.
REGISTER_OP("GmetaTrieSample")
    .Input("logits: float")
    .Input("scores: float")
    .Input("nodes: int64")
    .Input("starts: int64")
    .Input("digits: int32")
    .Input("allowed: bool")
    .Input("seed: int64")
    .Input("step: int64")
    .Input("keys: int64")
    .Attr("level: int >= 0")
    .Output("next_scores: float")
    .Output("next_nodes: int64")
    .Output("beams: int32")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 3; ++i) c->set_output(i, c->input(1));
      return absl::OkStatus();
    });

REGISTER_OP("GmetaTrieGumbelStep")
    .Input("logits: float")
    .Input("scores: float")
    .Input("nodes: int64")
    .Input("starts: int64")
    .Input("digits: int32")
    .Input("allowed: bool")
    .Input("seed: int64")
    .Input("step: int64")
    .Input("keys: int64")
    .Input("ranks: float")
    .Attr("k: int >= 1")
    .Attr("level: int >= 0")
    .Output("next_scores: float")
    .Output("next_nodes: int64")
    .Output("beams: int32")
    .Output("next_ranks: float")
    .SetShapeFn(ShapeOfStep);

REGISTER_OP("GmetaTrieLogProbs")
    .Input("logits: float")
    .Input("nodes: int64")
    .Input("children: int64")
    .Input("starts: int64")
    .Input("digits: int32")
    .Input("allowed: bool")
    .Output("log_probs: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle logits, nodes;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &logits));
      TF_RETURN_IF_ERROR(c->Merge(c->Vector(c->Dim(logits, 0)), c->input(1), &nodes));
      TF_RETURN_IF_ERROR(c->Merge(nodes, c->input(2), &nodes));
      c->set_output(0, nodes);
      return absl::OkStatus();
    });

REGISTER_OP("GmetaTrieLogProbsGradient")
    .Input("of_log_probs: float")
    .Input("logits: float")
    .Input("nodes: int64")
    .Input("children: int64")
    .Input("starts: int64")
    .Input("digits: int32")
    .Input("allowed: bool")
    .Output("of_logits: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

}  // namespace gmeta
