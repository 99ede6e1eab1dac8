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
// bits. Where `hashed[i]`, they are any numbers, which are folded into ids: into `mix_bits` bits by
// MixFold if `mix`, else into `id_bits` by XorFold.
REGISTER_OP("GmetaMergeKeys")
    .Input("mix: bool")
    .Input("ids: T")
    .Output("keys: int64")
    .Attr("T: list({int32, int64}) >= 1")
    .Attr("features: list(string) >= 1")
    .Attr("prefixes: list(int) >= 1")
    .Attr("hashed: list(bool) >= 1")
    .Attr("id_bits: int")
    .Attr("mix_bits: int")
    .SetShapeFn([](InferenceContext* c) {
      DimensionHandle total = c->MakeDim(0);
      ShapeHandle scalar;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &scalar));
      for (int i = 1; i < c->num_inputs(); ++i) {
        ShapeHandle vector;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &vector));
        TF_RETURN_IF_ERROR(c->Add(total, c->Dim(vector, 0), &total));
      }
      c->set_output(0, c->Vector(total));
      return absl::OkStatus();
    });

}  // namespace gmeta
