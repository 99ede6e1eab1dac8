// The ops GmetaTrieStep, GmetaTrieLogProbs and its gradient on any device: their checks and their
// outputs. A device has the functions Step, LogProbs and Gradient, which are called below.

#ifndef GMETA_OPS_TRIE_KERNELS_OPS_H_
#define GMETA_OPS_TRIE_KERNELS_OPS_H_

#include <cstdint>

#include "ops/trie/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

template <class Device>
class TrieStepOp : public tensorflow::OpKernel {
 public:
  explicit TrieStepOp(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("k", &k_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    Batch batch;
    trie::Level level;
    NextBatch next;
    OP_REQUIRES_OK(context, BatchOf(context, "trie_step", &batch));
    OP_REQUIRES_OK(context, LevelOf(context, 3, "trie_step", &level));
    OP_REQUIRES_OK(context, next.Allocate(context, batch.users, k_));
    OP_REQUIRES_OK(context, Device::Step(context, level, batch, k_, next));
  }

 private:
  int64_t k_;
};

template <class Device>
class TrieLogProbsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    trie::Rows rows;
    trie::Level level;
    OP_REQUIRES_OK(context, RowsOf(context, 0, &rows));
    OP_REQUIRES_OK(context, LevelOf(context, 3, "trie_log_probs", &level));
    const tensorflow::TensorShape& shape = context->input(1).shape();
    tensorflow::Tensor* out;
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &out));
    OP_REQUIRES_OK(context, Device::LogProbs(context, level, rows, shape.num_elements(),
                                             out->flat<float>().data()));
  }
};

template <class Device>
class TrieLogProbsGradientOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    trie::Rows rows;
    trie::Level level;
    OP_REQUIRES_OK(context, RowsOf(context, 1, &rows));
    OP_REQUIRES_OK(context, LevelOf(context, 4, "trie_log_probs", &level));
    const tensorflow::Tensor &of_log_probs = context->input(0), &nodes = context->input(2);
    OP_REQUIRES(context, of_log_probs.shape() == nodes.shape(),
                Invalid("trie_log_probs: the gradient of ", nodes.NumElements(), " rows has shape ",
                        of_log_probs.shape().DebugString()));
    tensorflow::Tensor* out;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(1).shape(), &out));
    OP_REQUIRES_OK(context, Device::Gradient(context, of_log_probs.flat<float>().data(), level,
                                             rows, nodes.NumElements(), out->flat<float>().data()));
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TRIE_KERNELS_OPS_H_
