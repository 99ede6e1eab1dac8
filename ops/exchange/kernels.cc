// CPU kernels of the exchanges. They check their inputs, and call key_exchange.h and row_exchange.h
// with TensorFlow's own thread pool.

#include "ops/common/kernels.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "ops/common/kernels_vectors.h"
#include "ops/exchange/key_exchange.h"
#include "ops/exchange/row_exchange.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

template <class T>
absl::Status Allocate(OpKernelContext* context, const char* name, const TensorShape& shape,
                      T** data) {
  Tensor* tensor;
  TF_RETURN_IF_ERROR(context->allocate_output(name, shape, &tensor, NearGpu()));
  *data = tensor->flat<T>().data();
  return absl::OkStatus();
}

// Checks the counts of an exchange of rows of `tables` tables: a matrix without negative numbers.
absl::Status CheckCounts(const char* op, const Tensor& counts, int64_t tables) {
  if (counts.dims() != 2 || counts.dim_size(1) != tables) {
    return Invalid(op, ": counts must have shape [ranks,", tables, "], got ",
                   counts.shape().DebugString());
  }
  const auto flat = counts.flat<int32_t>();
  for (int64_t i = 0; i < flat.size(); ++i) {
    if (flat(i) < 0) {
      return Invalid(op, ": counts of rank ", i / tables, ", table ", i % tables,
                     " must be at least 0, got ", flat(i));
    }
  }
  return absl::OkStatus();
}

class RouteKeysOp : public OpKernel {
 public:
  explicit RouteKeysOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("world_size", &world_size_));
    OP_REQUIRES_OK(context, context->GetAttr("dedup", &dedup_));
    OP_REQUIRES(
        context, world_size_ <= int64_t{kLogicalShards},
        Invalid("route_keys: world_size must lie in [1, ", kLogicalShards, "], got ", world_size_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList batches;
    OP_REQUIRES_OK(context, context->input_list("batches", &batches));
    const Tensor& note = context->input(context->num_inputs() - 1);
    OP_REQUIRES_OK(context, CheckVector("route_keys", "note", note));
    std::vector<KeySpan> tables;
    int64_t total = 0;
    for (const Tensor& keys : batches) {
      OP_REQUIRES_OK(context, CheckVector("route_keys", "keys", keys));
      tables.push_back({keys.flat<int64_t>().data(), static_cast<size_t>(keys.NumElements())});
      total += keys.NumElements();
    }
    OP_REQUIRES(context, total <= kMost,
                Invalid("route_keys: at most 2^31 - 1 keys in a call, got ", total,
                        " in all tables: split the batch"));

    const PoolParallelFor parallel_for(context);
    const RoutedKeys routed(tables, world_size_, dedup_, parallel_for);
    const size_t ranks = routed.ranks();
    int32_t *splits = nullptr, *counts = nullptr;
    OP_REQUIRES_OK(context, Allocate(context, "splits", TensorShape({world_size_}), &splits));
    OP_REQUIRES_OK(
        context,
        Allocate(context, "counts", TensorShape({world_size_, static_cast<int64_t>(tables.size())}),
                 &counts));
    int64_t size = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const int64_t split = routed.MessageSize(rank, note.NumElements());
      OP_REQUIRES(context, split <= kMost,
                  Invalid("route_keys: the message to rank ", rank, " would have ", split,
                          " values; at most 2^31 - 1 can be sent: split the batch"));
      splits[rank] = static_cast<int32_t>(split);
      size += split;
      for (size_t table = 0; table < tables.size(); ++table) {
        *counts++ = routed.count(rank, table);
      }
    }
    int64_t* message = nullptr;
    OP_REQUIRES_OK(context, Allocate(context, "message", TensorShape({size}), &message));
    std::vector<int64_t*> keys;
    std::vector<int32_t*> inverse;
    OP_REQUIRES_OK(
        context,
        AllocateVectors(context, "keys", [&](int table) { return routed.count(table); }, &keys));
    OP_REQUIRES_OK(
        context, AllocateVectors(
                     context, "inverse", [&](int table) { return tables[table].size; }, &inverse));
    routed.Write(note.flat<int64_t>().data(), note.NumElements(), message, keys.data(),
                 inverse.data(), parallel_for);
  }

 private:
  int64_t world_size_;
  bool dedup_;
};

class ReceiveKeysOp : public OpKernel {
 public:
  explicit ReceiveKeysOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("tables", &tables_));
    OP_REQUIRES_OK(context, context->GetAttr("note_size", &note_size_));
    OP_REQUIRES_OK(context, context->GetAttr("dedup", &dedup_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& message = context->input(0);
    const Tensor& splits = context->input(1);
    OP_REQUIRES_OK(context, CheckVector("receive_keys", "message", message));
    OP_REQUIRES_OK(context, CheckVector("receive_keys", "splits", splits));
    const int64_t ranks = splits.NumElements();
    const KeyMessages messages(message.flat<int64_t>().data(), splits.flat<int32_t>().data(), ranks,
                               tables_, note_size_);
    const std::optional<std::string> fault = messages.Fault(message.NumElements());
    OP_REQUIRES(context, !fault.has_value(),
                Invalid("receive_keys: ", *fault,
                        ": all ranks must run the same model, its tables in the same order"));

    int32_t* counts = nullptr;
    int64_t* notes = nullptr;
    OP_REQUIRES_OK(context, Allocate(context, "counts", TensorShape({ranks, tables_}), &counts));
    OP_REQUIRES_OK(context, Allocate(context, "notes", TensorShape({ranks, note_size_}), &notes));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      notes = std::copy_n(messages.note(rank), note_size_, notes);
      for (int64_t table = 0; table < tables_; ++table) *counts++ = messages.count(rank, table);
    }
    int64_t total = 0;
    for (int64_t table = 0; table < tables_; ++table) total += messages.count(table);
    OP_REQUIRES(context, total <= kMost,
                Invalid("receive_keys: at most 2^31 - 1 keys in a call, got ", total, " of ", ranks,
                        " ranks: make the batch smaller"));

    const PoolParallelFor parallel_for(context);
    std::vector<int64_t*> wire_keys;
    std::vector<int32_t*> positions;
    const auto size = [&](int table) { return messages.count(table); };
    OP_REQUIRES_OK(context, AllocateVectors(context, "wire_keys", size, &wire_keys));
    OP_REQUIRES_OK(context, AllocateVectors(context, "positions", size, &positions));
    messages.WriteWireKeys(wire_keys.data(), parallel_for);
    if (!dedup_) return ForwardWireKeys(context, messages, positions);

    std::vector<KeySpan> spans;
    for (int64_t table = 0; table < tables_; ++table) {
      spans.push_back({wire_keys[table], static_cast<size_t>(size(table))});
    }
    const OwnedKeys owned(spans, parallel_for);
    std::vector<int64_t*> keys;
    OP_REQUIRES_OK(
        context,
        AllocateVectors(context, "keys", [&](int table) { return owned.count(table); }, &keys));
    owned.Write(keys.data(), positions.data(), [](size_t, size_t, const int64_t*) {}, parallel_for);
  }

 private:
  // Outputs the received keys as they are: each counts as distinct.
  void ForwardWireKeys(OpKernelContext* context, const KeyMessages& messages,
                       const std::vector<int32_t*>& positions) const {
    OpOutputList keys, wire_keys;
    OP_REQUIRES_OK(context, context->output_list("keys", &keys));
    OP_REQUIRES_OK(context, context->output_list("wire_keys", &wire_keys));
    for (int table = 0; table < keys.size(); ++table) {
      keys.set(table, *wire_keys[table]);
      std::iota(positions[table], positions[table] + messages.count(table), 0);
    }
  }

  int64_t tables_;
  int64_t note_size_;
  bool dedup_;
};

// Outputs the buffer itself: the rows of a single table are already in wire order, so nothing is
// copied.
void Reshape(OpKernelContext* context, const Tensor& numbers, const TensorShape& shape) {
  Tensor reshaped;
  OP_REQUIRES(context, reshaped.CopyFrom(numbers, shape),
              absl::InternalError("dedup_alltoall: a reshape that doesn't keep the size"));
  context->set_output(0, reshaped);
}

// Calls visit(wire) with the wire type for numbers of this dtype.
template <class Visit>
void WithWire(tensorflow::DataType dtype, const Visit& visit) {
  if (dtype == tensorflow::DT_HALF) return visit(Float16Wire());
  if (dtype == tensorflow::DT_BFLOAT16) return visit(Bfloat16Wire());
  visit(Float32Wire());
}

// Returns how many numbers precede a row's own on the wire.
size_t HeadOf(tensorflow::DataType dtype) {
  size_t head = 0;
  WithWire(dtype, [&](auto wire) { head = decltype(wire)::kHead; });
  return head;
}

class PackRowsOp : public OpKernel {
 public:
  explicit PackRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("wire_dtype", &wire_dtype_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList rows, positions;
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    OP_REQUIRES_OK(context, context->input_list("positions", &positions));
    OP_REQUIRES(context, positions.size() == 0 || positions.size() == rows.size(),
                Invalid("pack_rows: ", rows.size(), " tables of rows, but positions of ",
                        positions.size()));
    const Tensor& counts = context->input(context->num_inputs() - 1);
    OP_REQUIRES_OK(context, CheckCounts("pack_rows", counts, rows.size()));

    std::vector<RowSource> sources;
    std::vector<size_t> dims;
    for (int table = 0; table < rows.size(); ++table) {
      OP_REQUIRES(
          context, rows[table].dims() == 2 && rows[table].dim_size(1) > 0,
          Invalid("pack_rows: rows of table ", table, " must have shape [rows, width], got ",
                  rows[table].shape().DebugString()));
      const bool gathers = positions.size() > 0;
      sources.push_back({rows[table].flat<float>().data(),
                         static_cast<size_t>(rows[table].dim_size(0)),
                         gathers ? positions[table].flat<int32_t>().data() : nullptr});
      dims.push_back(static_cast<size_t>(rows[table].dim_size(1)));
    }
    const int64_t ranks = counts.dim_size(0);
    const WireLayout layout(counts.flat<int32_t>().data(), ranks, dims, HeadOf(wire_dtype_));
    for (int table = 0; table < rows.size(); ++table) {
      const bool gathers = positions.size() > 0;
      const int64_t given = gathers ? positions[table].NumElements() : rows[table].dim_size(0);
      OP_REQUIRES(context, given == layout.rows(table),
                  Invalid("pack_rows: counts of table ", table, " say ", layout.rows(table),
                          " rows, but ", gathers ? "positions" : "rows", " has ", given));
    }
    int32_t* splits = nullptr;
    OP_REQUIRES_OK(context, Allocate(context, "splits", TensorShape({ranks}), &splits));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      OP_REQUIRES(context, layout.split(rank) <= kMost,
                  Invalid("pack_rows: the rows for rank ", rank, " are ", layout.split(rank),
                          " numbers; at most 2^31 - 1 can be sent: make the batch smaller"));
      splits[rank] = static_cast<int32_t>(layout.split(rank));
    }
    if (rows.size() == 1 && positions.size() == 0 && wire_dtype_ == tensorflow::DT_FLOAT) {
      return Reshape(context, rows[0], TensorShape({layout.size()}));
    }
    Tensor* buffer;
    OP_REQUIRES_OK(context, context->allocate_output("buffer", TensorShape({layout.size()}),
                                                     &buffer, NearGpu()));
    bool good = true;
    WithWire(wire_dtype_, [&](auto wire) {
      using Wire = decltype(wire);
      good = PackRows<Wire>(layout, sources, static_cast<typename Wire::Number*>(buffer->data()),
                            PoolParallelFor(context));
    });
    OP_REQUIRES(context, good, BadPosition(rows, positions));
  }

 private:
  static absl::Status BadPosition(const OpInputList& rows, const OpInputList& positions) {
    for (int table = 0; table < rows.size(); ++table) {
      const auto flat = positions[table].flat<int32_t>();
      for (int64_t i = 0; i < flat.size(); ++i) {
        if (flat(i) < 0 || flat(i) >= rows[table].dim_size(0)) {
          return Invalid("pack_rows: position ", i, " of table ", table, " must lie in [0, ",
                         rows[table].dim_size(0), "), got ", flat(i));
        }
      }
    }
    return absl::OkStatus();
  }

  tensorflow::DataType wire_dtype_;
};

class UnpackRowsOp : public OpKernel {
 public:
  explicit UnpackRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    std::vector<int64_t> dims;
    OP_REQUIRES_OK(context, context->GetAttr("dims", &dims));
    OP_REQUIRES(context, static_cast<int>(dims.size()) == num_outputs(),
                Invalid("unpack_rows: ", num_outputs(), " tables with ", dims.size(), " dims"));
    OP_REQUIRES(context, *std::min_element(dims.begin(), dims.end()) > 0,
                Invalid("unpack_rows: dims must be at least 1"));
    dims_.assign(dims.begin(), dims.end());
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& buffer = context->input(0);
    const Tensor& counts = context->input(1);
    OP_REQUIRES_OK(context, CheckVector("unpack_rows", "buffer", buffer));
    OP_REQUIRES_OK(context, CheckCounts("unpack_rows", counts, dims_.size()));
    const WireLayout layout(counts.flat<int32_t>().data(), counts.dim_size(0), dims_,
                            HeadOf(buffer.dtype()));
    OP_REQUIRES(
        context, buffer.NumElements() == layout.size(),
        Invalid("unpack_rows: counts and dims say ", layout.size(), " numbers, but the buffer has ",
                buffer.NumElements(), ": all ranks must give a table the same width"));
    if (dims_.size() == 1 && buffer.dtype() == tensorflow::DT_FLOAT) {
      return Reshape(context, buffer,
                     TensorShape({layout.rows(0), static_cast<int64_t>(dims_[0])}));
    }
    std::vector<float*> rows;
    for (size_t table = 0; table < dims_.size(); ++table) {
      Tensor* tensor;
      OP_REQUIRES_OK(context,
                     context->allocate_output(
                         static_cast<int>(table),
                         TensorShape({layout.rows(table), static_cast<int64_t>(dims_[table])}),
                         &tensor, NearGpu()));
      rows.push_back(tensor->flat<float>().data());
    }
    WithWire(buffer.dtype(), [&](auto wire) {
      using Wire = decltype(wire);
      UnpackRows<Wire>(layout, static_cast<const typename Wire::Number*>(buffer.data()), rows,
                       PoolParallelFor(context));
    });
  }

 private:
  std::vector<size_t> dims_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaRouteKeys").Device(DEVICE_CPU), RouteKeysOp);
REGISTER_KERNEL_BUILDER(Name("GmetaReceiveKeys").Device(DEVICE_CPU), ReceiveKeysOp);
REGISTER_KERNEL_BUILDER(Name("GmetaPackRows").Device(DEVICE_CPU), PackRowsOp);
REGISTER_KERNEL_BUILDER(Name("GmetaUnpackRows").Device(DEVICE_CPU), UnpackRowsOp);

}  // namespace
}  // namespace gmeta
