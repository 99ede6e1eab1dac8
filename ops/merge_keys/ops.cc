// Registration of GmetaMergeKeys.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// The keys of all features of a merged table, one feature after another. `ids[i]` are the ids of
// feature `features[i]`, whose table has the prefix `prefixes[i]`; an id has at most `id_bits`
// bits.
REGISTER_OP("GmetaMergeKeys")
    .Input("ids: T")
    .Output("keys: int64")
    .Attr("T: list({int32, int64}) >= 1")
    .Attr("features: list(string) >= 1")
    .Attr("prefixes: list(int) >= 1")
    .Attr("id_bits: int")
    .SetShapeFn([](InferenceContext* c) {
      DimensionHandle total = c->MakeDim(0);
      for (int i = 0; i < c->num_inputs(); ++i) {
        ShapeHandle vector;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
        TF_RETURN_IF_ERROR(c->Add(total, c->Dim(vector, 0), &total));
      }
      c->set_output(0, c->Vector(total));
      return absl::OkStatus();
    });

}  // namespace gmeta
