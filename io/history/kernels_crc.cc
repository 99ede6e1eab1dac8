// The HistoryCrc kernel: history_crc.h over histories that are divided among the threads.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "io/history/history_crc.h"
#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/work_sharder.h"

namespace gmeta::history {
namespace {

namespace tf = tensorflow;

class HistoryCrcOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tf::OpKernelContext* c) override {
    OP_REQUIRES_OK(c, Check(c));
    const auto splits = c->input(0).vec<int64_t>();
    const int64_t histories = splits.size() - 1;
    tf::Tensor* crcs = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, {histories}, &crcs));
    int64_t* const out = crcs->vec<int64_t>().data();
    const int64_t events = histories > 0 ? splits(histories) / histories : 0;
    const auto* threads = c->device()->tensorflow_cpu_worker_threads();
    tf::Shard(
        threads->num_threads, threads->workers, histories, 3 * (events + 1) * (c->num_inputs() - 1),
        [&](int64_t begin, int64_t end) {
          const auto count = static_cast<size_t>(end - begin);
          std::fill(out + begin, out + end, 0);
          for (int i = 1; i < c->num_inputs(); ++i) {
            const tf::Tensor& column = c->input(i);
            if (column.dtype() == tf::DT_FLOAT) {
              AddColumn(column.vec<float>().data(), splits.data() + begin, count, out + begin);
            } else {
              AddColumn(column.vec<int64_t>().data(), splits.data() + begin, count, out + begin);
            }
          }
        });
  }

 private:
  static absl::Status Check(const tf::OpKernelContext* c) {
    for (int i = 0; i < c->num_inputs(); ++i) {
      if (c->input(i).dims() == 1) continue;
      return Invalid("HistoryCrc takes vectors, got shape ", c->input(i).shape().DebugString());
    }
    const auto splits = c->input(0).vec<int64_t>();
    bool ascends = splits.size() > 0 && splits(0) == 0;
    for (int64_t i = 1; ascends && i < splits.size(); ++i) ascends = splits(i) >= splits(i - 1);
    if (!ascends) {
      return Invalid("HistoryCrc: row_splits must ascend from 0");
    }
    for (int i = 1; i < c->num_inputs(); ++i) {
      if (c->input(i).NumElements() == splits(splits.size() - 1)) continue;
      return Invalid("HistoryCrc: column ", i - 1, " has ", c->input(i).NumElements(),
                     " values, and row_splits has ", splits(splits.size() - 1));
    }
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaHistoryCrc").Device(tf::DEVICE_CPU), HistoryCrcOp);

}  // namespace
}  // namespace gmeta::history
