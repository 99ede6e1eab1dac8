// CPU kernels of the dynamic hash table: they check what they are given, and hand it to table.h
// with TensorFlow's own thread pool.

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/hash_table/table.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace gmeta {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

template <class... Words>
absl::Status Invalid(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat(words...));
}

class HashTableResource : public tensorflow::ResourceBase {
 public:
  HashTableResource(std::string name, const TableOptions& options)
      : name_(std::move(name)), table_(options) {}

  const std::string& name() const { return name_; }
  Table& table() { return table_; }

  std::string DebugString() const override {
    return absl::StrCat("gmeta hash table '", name_, "': dim ", table_.dim(), ", ", table_.size(),
                        " rows");
  }
  int64_t MemoryUsed() const override { return static_cast<int64_t>(table_.Statistics().bytes); }

 private:
  const std::string name_;
  Table table_;
};

// The engine's parallel_for on the pool of the op's device.
class PoolParallelFor {
 public:
  explicit PoolParallelFor(OpKernelContext* context)
      : pool_(context->device()->tensorflow_cpu_worker_threads()->workers) {}

  template <class Work>
  void operator()(size_t total, size_t cost, const Work& work) const {
    if (total <= 1) {
      if (total == 1) work(size_t{0}, size_t{1});
      return;
    }
    pool_->ParallelFor(static_cast<int64_t>(total), static_cast<int64_t>(cost),
                       [&work](int64_t begin, int64_t end) {
                         work(static_cast<size_t>(begin), static_cast<size_t>(end));
                       });
  }

 private:
  tensorflow::thread::ThreadPool* pool_;
};

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

// An op on a table: finds it and, if the op has keys, checks them.
class TableOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) final {
    tensorflow::core::RefCountPtr<HashTableResource> resource;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &resource));
    if (takes_keys() && context->num_inputs() > 1) {
      const Tensor& keys = context->input(1);
      OP_REQUIRES(context, TensorShapeUtils::IsVector(keys.shape()),
                  Invalid("table '", resource->name(), "': keys must be a vector, got shape ",
                          keys.shape().DebugString()));
      OP_REQUIRES(context, keys.NumElements() <= std::numeric_limits<int32_t>::max(),
                  Invalid("table '", resource->name(), "': at most 2^31 - 1 keys in a call, got ",
                          keys.NumElements(), ": split the batch"));
    }
    Run(context, resource->name(), resource->table());
  }

 protected:
  virtual void Run(OpKernelContext* context, const std::string& name, Table& table) = 0;

  // Whether the input after the table, if there is one, is a vector of keys.
  virtual bool takes_keys() const { return true; }

  static const int64_t* Keys(OpKernelContext* context) {
    return context->input(1).flat<int64_t>().data();
  }
  static int64_t KeyCount(OpKernelContext* context) { return context->input(1).NumElements(); }

  static void SetScalar(OpKernelContext* context, int output, int64_t value) {
    Tensor* tensor;
    OP_REQUIRES_OK(context, context->allocate_output(output, TensorShape({}), &tensor));
    tensor->scalar<int64_t>()() = value;
  }

  // Whether an input has the shape that goes with this table.
  static absl::Status CheckShape(OpKernelContext* context, const std::string& name,
                                 const char* what, int input, const TensorShape& expected) {
    const TensorShape& shape = context->input(input).shape();
    if (shape == expected) return absl::OkStatus();
    return Invalid("table '", name, "': ", what, " must have shape ", expected.DebugString(),
                   ", got ", shape.DebugString());
  }
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
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, TensorShape({KeyCount(context), dim_}), &rows));
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

// One number that the table knows.
template <auto kValue>
class ScalarOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Table& table) override {
    SetScalar(context, 0, static_cast<int64_t>((table.*kValue)()));
  }
};

class ExportOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Table& table) override {
    const int64_t dim = static_cast<int64_t>(table.dim());
    const int64_t slot_floats = static_cast<int64_t>(table.slot_floats());
    absl::Status status;
    const auto allocate = [&](uint64_t rows, int64_t step) -> std::optional<RecordColumns> {
      const int64_t n = static_cast<int64_t>(rows);
      const TensorShape shapes[] = {
          TensorShape({n}), TensorShape({n, dim}), TensorShape({n, slot_floats}),
          TensorShape({n}), TensorShape({n}),      TensorShape({})};
      Tensor* tensors[6];
      for (int i = 0; i < 6 && status.ok(); ++i) {
        status = context->allocate_output(i, shapes[i], &tensors[i]);
      }
      if (!status.ok()) return std::nullopt;
      tensors[5]->scalar<int64_t>()() = step;
      return RecordColumns{tensors[0]->flat<int64_t>().data(), tensors[1]->flat<float>().data(),
                           tensors[2]->flat<float>().data(), tensors[3]->flat<int64_t>().data(),
                           tensors[4]->flat<int64_t>().data()};
    };
    table.Export(allocate, PoolParallelFor(context));
    OP_REQUIRES_OK(context, status);
  }
};

class ExportShardsOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  bool takes_keys() const override { return false; }

  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    OP_REQUIRES_OK(context, CheckShape(context, name, "shards", 1, TensorShape({2})));
    OP_REQUIRES_OK(context, CheckShape(context, name, "min_last_step", 2, TensorShape({})));
    const auto shards = context->input(1).flat<int64_t>();
    const int64_t min_last_step = context->input(2).scalar<int64_t>()();
    OP_REQUIRES(context, 0 <= shards(0) && shards(0) <= shards(1) && shards(1) <= kLogicalShards,
                Invalid("table '", name, "': logical shards are [first, last) within [0, ",
                        kLogicalShards, "), got [", shards(0), ", ", shards(1), ")"));
    const int64_t limit = std::numeric_limits<uint32_t>::max();
    OP_REQUIRES(context, 0 <= min_last_step && min_last_step <= limit,
                Invalid("table '", name, "': min_last_step must lie in [0, ", limit, "], got ",
                        min_last_step));
    const LogicalRange range{static_cast<uint32_t>(shards(0)), static_cast<uint32_t>(shards(1))};
    absl::Status status;
    const auto allocate = [&](const ShardExportSizes& sizes) -> std::optional<ShardExportColumns> {
      const int64_t n = static_cast<int64_t>(sizes.rows);
      const int64_t count = static_cast<int64_t>(range.size());
      const TensorShape shapes[] = {TensorShape({n}),
                                    TensorShape({n, static_cast<int64_t>(table.dim())}),
                                    TensorShape({n, static_cast<int64_t>(table.slot_floats())}),
                                    TensorShape({n}),
                                    TensorShape({n}),
                                    TensorShape({count + 1}),
                                    TensorShape({static_cast<int64_t>(sizes.removed)}),
                                    TensorShape({count + 1}),
                                    TensorShape({count}),
                                    TensorShape({}),
                                    TensorShape({})};
      Tensor* tensors[11];
      for (int i = 0; i < 11 && status.ok(); ++i) {
        status = context->allocate_output(i, shapes[i], &tensors[i]);
      }
      if (!status.ok()) return std::nullopt;
      tensors[9]->scalar<int64_t>()() = sizes.step;
      tensors[10]->scalar<bool>()() = sizes.journal_whole;
      const auto ints = [&](int i) { return tensors[i]->flat<int64_t>().data(); };
      return ShardExportColumns{{ints(0), tensors[1]->flat<float>().data(),
                                 tensors[2]->flat<float>().data(), ints(3), ints(4)},
                                ints(5),
                                ints(6),
                                ints(7),
                                ints(8)};
    };
    table.ExportShards(range, static_cast<uint32_t>(min_last_step), allocate,
                       PoolParallelFor(context));
    OP_REQUIRES_OK(context, status);
  }
};

class StartJournalOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  bool takes_keys() const override { return false; }

  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    OP_REQUIRES_OK(context, CheckShape(context, name, "limit", 1, TensorShape({})));
    const int64_t limit = context->input(1).scalar<int64_t>()();
    OP_REQUIRES(context, limit >= 0,
                Invalid("table '", name, "': the journal's limit must be at least 0, got ", limit));
    table.StartJournal(static_cast<size_t>(limit));
  }
};

class JournalSavedOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext*, const std::string&, Table& table) override { table.DropCutRemovals(); }
};

class ImportOp : public TableOp {
 public:
  explicit ImportOp(OpKernelConstruction* context) : TableOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replace", &replace_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    const int64_t n = KeyCount(context);
    const int64_t dim = static_cast<int64_t>(table.dim());
    const int64_t slot_floats = static_cast<int64_t>(table.slot_floats());
    OP_REQUIRES_OK(context, CheckShape(context, name, "rows", 2, TensorShape({n, dim})));
    OP_REQUIRES_OK(context,
                   CheckShape(context, name, "optimizer slots", 3, TensorShape({n, slot_floats})));
    OP_REQUIRES_OK(context, CheckShape(context, name, "frequency", 4, TensorShape({n})));
    OP_REQUIRES_OK(context, CheckShape(context, name, "last_step", 5, TensorShape({n})));
    OP_REQUIRES_OK(context, CheckShape(context, name, "step", 6, TensorShape({})));
    const ConstRecordColumns columns{Keys(context), context->input(2).flat<float>().data(),
                                     context->input(3).flat<float>().data(),
                                     context->input(4).flat<int64_t>().data(),
                                     context->input(5).flat<int64_t>().data()};
    if (replace_) {
      table.Replace(columns, n, context->input(6).scalar<int64_t>()(), PoolParallelFor(context));
    } else {
      table.Merge(columns, n, PoolParallelFor(context));
    }
  }

 private:
  bool replace_;
};

class ExportAdmissionOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Table& table) override {
    absl::Status status;
    const auto allocate = [&](uint64_t counters,
                              uint64_t filter_bytes) -> std::optional<AdmissionColumns> {
      const uint64_t sizes[] = {counters, counters, filter_bytes};
      Tensor* tensors[3];
      for (int i = 0; i < 3 && status.ok(); ++i) {
        status =
            context->allocate_output(i, TensorShape({static_cast<int64_t>(sizes[i])}), &tensors[i]);
      }
      if (!status.ok()) return std::nullopt;
      return AdmissionColumns{tensors[0]->flat<int64_t>().data(),
                              tensors[1]->flat<int64_t>().data(),
                              tensors[2]->flat<uint8_t>().data()};
    };
    table.ExportAdmission(allocate);
    OP_REQUIRES_OK(context, status);
  }
};

class ImportAdmissionOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    OP_REQUIRES_OK(context,
                   CheckShape(context, name, "counts", 2, TensorShape({KeyCount(context)})));
    const ConstAdmissionColumns columns{Keys(context), context->input(2).flat<int64_t>().data(),
                                        context->input(3).flat<uint8_t>().data()};
    const int64_t filter_bytes = context->input(3).NumElements();
    OP_REQUIRES(context,
                table.ReplaceAdmission(columns, static_cast<size_t>(KeyCount(context)),
                                       static_cast<size_t>(filter_bytes)),
                Invalid("table '", name, "': a filter of ", filter_bytes,
                        " bytes is not of this table's admission: make the table with the "
                        "filter's capacity and error, and the eviction bound, that it was saved "
                        "with"));
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
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExport").Device(DEVICE_CPU), ExportOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExportShards").Device(DEVICE_CPU), ExportShardsOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableStartJournal").Device(DEVICE_CPU), StartJournalOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableJournalSaved").Device(DEVICE_CPU), JournalSavedOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableJournalWhole").Device(DEVICE_CPU),
                        ScalarOp<&Table::JournalWhole>);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableImport").Device(DEVICE_CPU), ImportOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableEvict").Device(DEVICE_CPU), EvictOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExportAdmission").Device(DEVICE_CPU),
                        ExportAdmissionOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableImportAdmission").Device(DEVICE_CPU),
                        ImportAdmissionOp);

}  // namespace
}  // namespace gmeta
