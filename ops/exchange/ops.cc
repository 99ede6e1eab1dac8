// Registration of the ops before and after the exchanges of keys and of rows.

#include <algorithm>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// Sets outputs [first, first + count) to vectors of unknown length.
int SetVectors(InferenceContext* c, int first, int count) {
  for (int i = 0; i < count; ++i)
    c->set_output(first + i, c->Vector(InferenceContext::kUnknownDim));
  return first + count;
}

absl::Status CheckRanks(InferenceContext* c, int rank) {
  for (int i = 0; i < c->num_inputs(); ++i) {
    ShapeHandle ignored;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(i), rank, &ignored));
  }
  return absl::OkStatus();
}

}  // namespace

// Stage 1: the keys of each table, distinct and ordered by owner; the messages to all ranks;
// counts[r][t], the number of keys of table t for rank r; and for each position of a batch the
// place of its key.
REGISTER_OP("GmetaRouteKeys")
    .Input("batches: tables * int64")
    .Input("note: int64")
    .Output("message: int64")
    .Output("splits: int32")
    .Output("keys: tables * int64")
    .Output("counts: int32")
    .Output("inverse: tables * int32")
    .Attr("tables: int >= 1")
    .Attr("world_size: int >= 1")
    .Attr("dedup: bool = true")
    .SetShapeFn([](InferenceContext* c) {
      int tables, world_size;
      TF_RETURN_IF_ERROR(c->GetAttr("tables", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
      TF_RETURN_IF_ERROR(CheckRanks(c, 1));
      int next = SetVectors(c, 0, 1);
      c->set_output(next++, c->Vector(world_size));
      next = SetVectors(c, next, tables);
      c->set_output(next++, c->Matrix(world_size, tables));
      for (int i = 0; i < tables; ++i) c->set_output(next++, c->Vector(c->Dim(c->input(i), 0)));
      return absl::OkStatus();
    });

// Stage 2: the distinct keys of each table in the received messages, and for each received key its
// place among them.
REGISTER_OP("GmetaReceiveKeys")
    .Input("message: int64")
    .Input("splits: int32")
    .Output("keys: tables * int64")
    .Output("positions: tables * int32")
    .Output("counts: int32")
    .Output("notes: int64")
    .Output("wire_keys: tables * int64")
    .Attr("tables: int >= 1")
    .Attr("note_size: int >= 0")
    .Attr("dedup: bool = true")
    .SetShapeFn([](InferenceContext* c) {
      int tables, note_size;
      TF_RETURN_IF_ERROR(c->GetAttr("tables", &tables));
      TF_RETURN_IF_ERROR(c->GetAttr("note_size", &note_size));
      TF_RETURN_IF_ERROR(CheckRanks(c, 1));
      const auto ranks = c->Dim(c->input(1), 0);
      int next = SetVectors(c, 0, 2 * tables);
      c->set_output(next++, c->Matrix(ranks, c->MakeDim(tables)));
      c->set_output(next++, c->Matrix(ranks, c->MakeDim(note_size)));
      SetVectors(c, next, tables);
      return absl::OkStatus();
    });

// The rows of all tables in one buffer, by rank, then by table. As halves, each row has a scale
// before it. `positions`, if any, say where in `rows` each row is.
REGISTER_OP("GmetaPackRows")
    .Input("rows: tables * float")
    .Input("positions: gathered * int32")
    .Input("counts: int32")
    .Output("buffer: wire_dtype")
    .Output("splits: int32")
    .Attr("tables: int >= 1")
    .Attr("gathered: int >= 0")
    .Attr("wire_dtype: {float, half, bfloat16} = DT_FLOAT")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle counts;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 1), 2, &counts));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(c->Dim(counts, 0)));
      return absl::OkStatus();
    });

// The inverse: the rows of each table, in wire order.
REGISTER_OP("GmetaUnpackRows")
    .Input("buffer: wire_dtype")
    .Input("counts: int32")
    .Output("rows: tables * float")
    .Attr("tables: int >= 1")
    .Attr("dims: list(int) >= 1")
    .Attr("wire_dtype: {float, half, bfloat16}")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      const int tables = std::min<int>(c->num_outputs(), static_cast<int>(dims.size()));
      for (int i = 0; i < tables; ++i) {
        c->set_output(i, c->Matrix(InferenceContext::kUnknownDim, dims[i]));
      }
      return absl::OkStatus();
    });

}  // namespace gmeta
