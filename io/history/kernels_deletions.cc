// The DeletedHistories kernel: reads from the indexes of a store's shards whose events were
// deleted.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/history/kernels_shards.h"
#include "io/history/user_shard.h"
#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace gmeta::history {
namespace {

using tf::OpKernelContext;
using tf::Tensor;

class DeletedHistoriesOp : public tf::OpKernel {
 public:
  explicit DeletedHistoriesOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, opened_.Read(c));
  }

  void Compute(OpKernelContext* c) override {
    const Tensor& users = c->input(0);
    const Tensor& generations = c->input(1);
    OP_REQUIRES(c, users.dims() == 1 && users.shape() == generations.shape(),
                Invalid("DeletedHistories takes vectors of one length, got shapes ",
                        users.shape().DebugString(), " and ", generations.shape().DebugString()));
    Tensor* deleted = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, users.shape(), &deleted));
    std::vector<std::shared_ptr<OpenShard>> shards(opened_.indexes.size());
    for (int64_t i = 0; i < users.NumElements(); ++i) {
      const int64_t user = users.vec<int64_t>()(i);
      const int64_t number = UserShard(user, opened_.shards());
      std::shared_ptr<OpenShard>& shard = shards[static_cast<size_t>(number)];
      if (shard == nullptr) {
        OP_REQUIRES_OK(c, OpenShards::Of()->Get(opened_, number, &shard));
      }
      deleted->vec<bool>()(i) = shard->index().IsDeleted(user, generations.vec<int64_t>()(i));
    }
  }

 private:
  Opened opened_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaDeletedHistories").Device(tf::DEVICE_CPU), DeletedHistoriesOp);

}  // namespace
}  // namespace gmeta::history
