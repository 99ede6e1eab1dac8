// Registration of what a step in micro-batches does with its keys and its units.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;

namespace {

absl::Status SetVectors(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) {
    c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
  }
  return absl::OkStatus();
}

}  // namespace

// The distinct keys of a table by class, and for each micro-batch the place of each of its keys
// among those of the open classes (key_classes.h).
REGISTER_OP("GmetaKeyClasses")
    .Input("keys: micro_batches * int64")
    .Output("by_class: classes * int64")
    .Output("places: micro_batches * int32")
    .Attr("micro_batches: int >= 1")
    .Attr("classes: int >= 1")
    .SetShapeFn(SetVectors);

// The same places after the keys of each class were put in another order; `within` has the new
// places in the classes.
REGISTER_OP("GmetaMovePlaces")
    .Input("within: classes * int32")
    .Input("places: micro_batches * int32")
    .Output("moved: micro_batches * int32")
    .Attr("classes: int >= 1")
    .Attr("micro_batches: int >= 1")
    .SetShapeFn(SetVectors);

// The distinct keys of several vectors, and for each vector the places among them of the keys at
// some of its positions.
REGISTER_OP("GmetaCollectKeys")
    .Input("keys: vectors * int64")
    .Input("positions: vectors * int32")
    .Output("distinct: int64")
    .Output("places: vectors * int32")
    .Attr("vectors: int >= 1")
    .SetShapeFn(SetVectors);

// The numbers of a batch's units, one micro-batch after another, so that units which share keys
// come together (clusters.h). `units` has for each key the unit that has it.
REGISTER_OP("GmetaClusterUnits")
    .Input("keys: int64")
    .Input("units: int64")
    .Input("sizes: int64")
    .Output("order: int64")
    .SetShapeFn(SetVectors);

}  // namespace gmeta
