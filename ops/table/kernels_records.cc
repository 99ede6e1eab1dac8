// The kernels of the dynamic hash table in host memory that take whole records, and the kernels for
// snapshots, which no other engine has.

#include "ops/table/kernels_records.h"

#include "ops/table/kernels_host.h"

namespace gmeta {
namespace {

// An op that takes the number of a snapshot as its input: (table.*kDo)(context, id).
template <auto kDo>
class SnapshotOp : public TableOp<HostEngine> {
 public:
  using TableOp<HostEngine>::TableOp;

 protected:
  bool takes_keys() const override { return false; }

  void Run(OpKernelContext* context, const std::string& name, HostEngine& table) override {
    OP_REQUIRES_OK(context, CheckShape(context, name, "snapshot", 1, TensorShape({})));
    const int64_t id = context->input(1).scalar<int64_t>()();
    OP_REQUIRES(context, (table.*kDo)(context, id),
                Invalid("table '", name, "' has no snapshot ", id, ", or no longer has it"));
  }
};

}  // namespace

GMETA_REGISTER_RECORD_KERNELS(tensorflow::DEVICE_CPU, HostEngine);

REGISTER_KERNEL_BUILDER(Name("GmetaHashTableTakeSnapshot").Device(tensorflow::DEVICE_CPU),
                        ScalarOp<HostEngine, &HostEngine::TakeSnapshot>);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableRestoreSnapshot").Device(tensorflow::DEVICE_CPU),
                        SnapshotOp<&HostEngine::RestoreSnapshot>);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableDropSnapshot").Device(tensorflow::DEVICE_CPU),
                        SnapshotOp<&HostEngine::DropSnapshot>);

}  // namespace gmeta
