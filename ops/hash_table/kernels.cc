// CPU kernels of the dynamic hash table: they check what they are given, and hand it to table.h
// with TensorFlow's own thread pool. What saves and restores a table is in kernels_records.cc.

#include "ops/hash_table/kernels.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

namespace gmeta {
namespace {

class CreateOp : public OpKernel {
 public:
  explicit CreateOp(OpKernelConstruction* context) : OpKernel(context) {
    int64_t dim, seed, half_below;
    OP_REQUIRES_OK(context, context->GetAttr("table_name", &name_));
    OP_REQUIRES_OK(context, context->GetAttr("dim", &dim));
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed));
    OP_REQUIRES_OK(context, context->GetAttr("optimizer", &optimizer_));
    OP_REQUIRES_OK(context, context->GetAttr("initializer", &initializer_));
    OP_REQUIRES_OK(context, context->GetAttr("admission", &admission_));
    OP_REQUIRES_OK(context, context->GetAttr("eviction", &eviction_));
    OP_REQUIRES_OK(context, context->GetAttr("half_below", &half_below));
    options_.half_below = static_cast<uint32_t>(half_below);
    options_.dim = static_cast<size_t>(dim);
    options_.initializer.seed = static_cast<uint64_t>(seed);
  }

  void Compute(OpKernelContext* context) override {
    TableOptions options = options_;
    const std::vector<double> parameters = Values(context->input(0));
    const std::optional<SparseOptimizer> optimizer = MakeOptimizer(optimizer_, parameters);
    OP_REQUIRES(context, optimizer.has_value(),
                Invalid("table '", name_, "': optimizer '", optimizer_, "' doesn't take ",
                        parameters.size(), " hyperparameters"));
    options.optimizer = *optimizer;
    OP_REQUIRES_OK(context, SetInitializer(Values(context->input(1)), &options.initializer));
    OP_REQUIRES_OK(context, SetAdmission(Values(context->input(2)), &options));
    OP_REQUIRES_OK(context, SetEviction(Values(context->input(3)), &options));
    Tensor* handle;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &handle));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(new HashTableResource(name_, options),
                                                          context->device()->name());
  }

 private:
  static std::vector<double> Values(const Tensor& tensor) {
    const auto flat = tensor.flat<double>();
    return std::vector<double>(flat.data(), flat.data() + flat.size());
  }

  absl::Status SetInitializer(const std::vector<double>& p, Initializer* out) const {
    const bool constant = initializer_ == "constant";
    if (p.size() != (constant ? 1 : 2)) {
      return Invalid("table '", name_, "': initializer '", initializer_, "' doesn't take ",
                     p.size(), " parameters");
    }
    out->kind = constant                    ? Initializer::Kind::kConstant
                : initializer_ == "uniform" ? Initializer::Kind::kUniform
                : initializer_ == "normal"  ? Initializer::Kind::kNormal
                                            : Initializer::Kind::kTruncatedNormal;
    out->a = static_cast<float>(p[0]);
    out->b = constant ? 0.0f : static_cast<float>(p[1]);
    return absl::OkStatus();
  }

  absl::Status SetAdmission(const std::vector<double>& p, TableOptions* out) const {
    const std::optional<Admission> admission = MakeAdmission(admission_, p, out->initializer.seed);
    if (!admission) {
      return Invalid("table '", name_, "': admission '", admission_, "' doesn't take ", p.size(),
                     " settings");
    }
    out->admission = *admission;
    return absl::OkStatus();
  }

  // Bounds in rows and bytes and the steps between sweeps, then the policy's own settings.
  absl::Status SetEviction(const std::vector<double>& p, TableOptions* out) const {
    if (eviction_ == "none") return absl::OkStatus();
    constexpr size_t kCommon = 3;
    std::optional<EvictionPolicy> policy;
    if (p.size() >= kCommon) policy = MakeEvictionPolicy(eviction_, {p.begin() + kCommon, p.end()});
    if (!policy) {
      return Invalid("table '", name_, "': eviction '", eviction_, "' doesn't take ", p.size(),
                     " settings");
    }
    out->eviction = Eviction{*policy, static_cast<uint64_t>(p[0]), static_cast<uint64_t>(p[1]),
                             static_cast<uint32_t>(p[2])};
    return absl::OkStatus();
  }

  std::string name_, optimizer_, initializer_, admission_, eviction_;
  TableOptions options_;
};

class LookupOp : public TableOp {
 public:
  explicit LookupOp(OpKernelConstruction* context) : TableOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dim", &dim_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    OP_REQUIRES(
        context, dim_ == static_cast<int64_t>(table.dim()),
        Invalid("table '", name, "' has dim ", table.dim(), ", but the lookup says ", dim_));
    OP_REQUIRES_OK(context, CheckShape(context, name, "insert", 2, TensorShape({})));
    Tensor* rows;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({KeyCount(context), dim_}),
                                                     &rows, NearGpu()));
    table.Lookup(Keys(context), KeyCount(context), context->input(2).scalar<bool>()(),
                 rows->flat<float>().data(), PoolParallelFor(context));
  }

 private:
  int64_t dim_;
};

class UpdateOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    const int64_t dim = static_cast<int64_t>(table.dim());
    OP_REQUIRES_OK(
        context, CheckShape(context, name, "gradients", 2, TensorShape({KeyCount(context), dim})));
    OP_REQUIRES_OK(context, CheckShape(context, name, "learning_rate", 3, TensorShape({})));
    table.Update(Keys(context), context->input(2).flat<float>().data(), KeyCount(context),
                 context->input(3).scalar<float>()(), PoolParallelFor(context));
  }
};

class RemoveOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Table& table) override {
    SetScalar(context, 0, table.Remove(Keys(context), KeyCount(context), PoolParallelFor(context)));
  }
};

class ContainsOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Table& table) override {
    Tensor* found;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({KeyCount(context)}), &found));
    table.Contains(Keys(context), KeyCount(context), found->flat<bool>().data(),
                   PoolParallelFor(context));
  }
};

class ReserveOp : public TableOp {
 public:
  explicit ReserveOp(OpKernelConstruction* context) : TableOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("rows", &rows_));
  }

 protected:
  void Run(OpKernelContext*, const std::string&, Table& table) override {
    table.Reserve(static_cast<uint64_t>(rows_));
  }

 private:
  int64_t rows_;
};

class EvictOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Table& table) override {
    SetScalar(context, 0, static_cast<int64_t>(table.Evict(PoolParallelFor(context))));
  }
};

class StatisticsOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Table& table) override {
    const TableStatistics s = table.Statistics();
    Tensor* out;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({12}), &out));
    const uint64_t values[] = {s.size,    s.capacity, s.bytes,     s.hits,
                               s.misses,  s.inserts,  s.removes,   s.updates,
                               s.ignored, s.rejects,  s.evictions, s.half_rows};
    std::copy(std::begin(values), std::end(values), out->flat<int64_t>().data());
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaHashTable").Device(DEVICE_CPU), CreateOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableLookup").Device(DEVICE_CPU), LookupOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableUpdate").Device(DEVICE_CPU), UpdateOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableRemove").Device(DEVICE_CPU), RemoveOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableContains").Device(DEVICE_CPU), ContainsOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableReserve").Device(DEVICE_CPU), ReserveOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableStatistics").Device(DEVICE_CPU), StatisticsOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableSize").Device(DEVICE_CPU), ScalarOp<&Table::size>);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableStep").Device(DEVICE_CPU), ScalarOp<&Table::step>);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableEvict").Device(DEVICE_CPU), EvictOp);

}  // namespace
}  // namespace gmeta
