// Registration of the lane's ops.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gmeta {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ScalarShape;
using tensorflow::shape_inference::ShapeHandle;

// Finds what a lane of GPUs needs: the address of this process's GPU, the version of NCCL, which is
// loaded from the first of `files` that can be, and on the rank that is to make it the `id` of a
// communicator. `why` says what is missing.
REGISTER_OP("GmetaLaneFind")
    .Input("files: string")
    .Input("make_id: bool")
    .Output("gpu: string")
    .Output("version: int32")
    .Output("id: string")
    .Output("why: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 4; ++i) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    });

// Makes a lane that listens at `host`, an address or a name; `port` is where. Made on a GPU it is
// the lane of the tensors there.
REGISTER_OP("GmetaLane")
    .Input("host: string")
    .Output("lane: resource")
    .Output("port: int32")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

// Connects a lane with those of the other ranks, which `hosts` and `ports` name in the order of
// ranks. All have the same `key`, prove it to each other, and don't send it. It waits `start`
// seconds for them, and later `patience` seconds (0: without limit) for a rank that doesn't join a
// collective. `id` is empty, or on a GPU what GmetaLaneFind made on rank 0.
REGISTER_OP("GmetaLaneConnect")
    .Input("lane: resource")
    .Input("rank: int32")
    .Input("hosts: string")
    .Input("ports: int32")
    .Input("key: string")
    .Input("start: int32")
    .Input("patience: int32")
    .Input("id: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs);

// Sends rank r the `splits[r]` rows after those for the ranks before r. All ranks pass the same
// `label`, type and shape of a row. `expected` says how many rows come from each rank, and is
// checked on a CPU, where it may be empty. `place` is that of the lane, for the gradient. If only
// some `ranks` take part, the others have no rows, and no frame is sent to them.
REGISTER_OP("GmetaLaneAlltoall")
    .Input("lane: resource")
    .Input("rows: T")
    .Input("splits: int32")
    .Input("expected: int32")
    .Output("received: T")
    .Output("received_splits: int32")
    .Attr("T: type")
    .Attr("label: string")
    .Attr("place: {'cpu', 'gpu'}")
    .Attr("ranks: list(int) = []")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 1, &rows));
      if (c->RankKnown(rows)) {
        TF_RETURN_IF_ERROR(c->ReplaceDim(rows, 0, c->UnknownDim(), &rows));
      }
      c->set_output(0, rows);
      c->set_output(1, c->input(2));
      return absl::OkStatus();
    });

// Sums each tensor over the ranks: on a CPU in their order, on a GPU in NCCL's. All ranks get the
// same bits.
REGISTER_OP("GmetaLaneAllreduce")
    .Input("lane: resource")
    .Input("terms: N * T")
    .Output("sums: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {float, double, int32, int64}")
    .Attr("label: string")
    .Attr("place: {'cpu', 'gpu'}")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i + 1 < c->num_inputs(); ++i) c->set_output(i, c->input(i + 1));
      return absl::OkStatus();
    });

// Rows: alltoalls and allreduces. Columns: how many have begun, how many have ended in any way, how
// many have succeeded, and the bytes that this rank sent in these: in an alltoall, to others.
REGISTER_OP("GmetaLaneCounts")
    .Input("lane: resource")
    .Output("counts: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(2, 4));
      return absl::OkStatus();
    });

}  // namespace gmeta
