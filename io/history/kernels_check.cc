// The CheckHistories kernel: whether rebuilt histories are those that the ranker logged.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "io/group_batch/reader_stats.h"
#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace gmeta::history {
namespace {

namespace tf = tensorflow;

class CheckHistoriesOp : public tf::OpKernel {
 public:
  explicit CheckHistoriesOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    std::string on_bad;
    OP_REQUIRES_OK(c, c->GetAttr("examples", &examples_));
    OP_REQUIRES_OK(c, c->GetAttr("store", &store_));
    OP_REQUIRES_OK(c, c->GetAttr("check", &check_));
    OP_REQUIRES_OK(c, c->GetAttr("on_bad", &on_bad));
    OP_REQUIRES_OK(c, c->GetAttr("stats", &stats_));
    skip_ = on_bad == "skip";
  }

  void Compute(tf::OpKernelContext* c) override {
    for (int i = 0; i < c->num_inputs(); ++i) {
      OP_REQUIRES(
          c, c->input(i).dims() == 1 && c->input(i).shape() == c->input(0).shape(),
          Invalid("CheckHistories takes vectors of one length, got shapes ",
                  c->input(0).shape().DebugString(), " and ", c->input(i).shape().DebugString()));
    }
    tf::Tensor* sound = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, c->input(0).shape(), &sound));
    const auto stats = group_batch::StatsRegistry::Global().Find(stats_);
    const auto rows = c->input(2).vec<int64_t>(), found = c->input(3).vec<int64_t>(),
               logged = c->input(4).vec<int64_t>();
    for (int64_t i = 0; i < found.size(); ++i) {
      sound->vec<bool>()(i) = found(i) == logged(i);
      if (found(i) == logged(i)) continue;
      const std::string message = Describe(c->input(0).vec<int64_t>()(i),
                                           c->input(1).vec<int64_t>()(i), found(i), logged(i));
      OP_REQUIRES(c, skip_, absl::DataLossError("gmeta: " + message));
      if (stats != nullptr) stats->LeaveOut(records::Fault::kOtherHistory, rows(i), message);
    }
  }

 private:
  std::string Describe(int64_t user, int64_t generation, int64_t found, int64_t logged) const {
    const bool is_crc = check_ == "crc";
    const std::string has = is_crc ? absl::StrCat("the checksum ", found, ", and the ranker's ")
                                   : absl::StrCat(found, " events, and the ranker's ");
    return absl::StrCat(
        examples_, ": user ", user, ", generation ", generation, ": the history has ", has, logged,
        "; read from ", store_,
        is_crc ? " the columns that the ranker read, in its order and with its longest,"
               : " what the ranker read, with its generation and tail,",
        " or pass on_bad='skip' to leave such examples out");
  }

  std::string examples_, store_, check_;
  int64_t stats_ = 0;
  bool skip_ = false;
};

REGISTER_KERNEL_BUILDER(Name("GmetaCheckHistories").Device(tf::DEVICE_CPU), CheckHistoriesOp);

}  // namespace
}  // namespace gmeta::history
