// The CPU kernel of GmetaHashText.

#include "ops/hash_text/md5.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

namespace gmeta {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::tstring;

constexpr int64_t kCyclesPerText = 500;

class HashTextOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& texts = context->input(0);
    Tensor* numbers;
    OP_REQUIRES_OK(context, context->allocate_output(0, texts.shape(), &numbers));
    const tstring* from = texts.flat<tstring>().data();
    int64_t* to = numbers->flat<int64_t>().data();
    const auto* workers = context->device()->tensorflow_cpu_worker_threads();
    tensorflow::Shard(workers->num_threads, workers->workers, texts.NumElements(), kCyclesPerText,
                      [from, to](int64_t first, int64_t last) {
                        for (int64_t i = first; i < last; ++i) {
                          to[i] = HashText(from[i].data(), from[i].size());
                        }
                      });
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaHashText").Device(tensorflow::DEVICE_CPU), HashTextOp);

}  // namespace
}  // namespace gmeta
