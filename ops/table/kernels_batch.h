// The op that makes a dynamic hash table, and the ops that take batches of keys, on any engine.

#ifndef GMETA_OPS_TABLE_KERNELS_BATCH_H_
#define GMETA_OPS_TABLE_KERNELS_BATCH_H_

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/table/kernels.h"

namespace gmeta {

template <class Engine>
class CreateOp : public OpKernel {
 public:
  explicit CreateOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("table_name", &settings_.name));
    OP_REQUIRES_OK(context, context->GetAttr("dim", &settings_.dim));
    OP_REQUIRES_OK(context, context->GetAttr("seed", &settings_.seed));
    OP_REQUIRES_OK(context, context->GetAttr("optimizer", &settings_.optimizer.kind));
    OP_REQUIRES_OK(context, context->GetAttr("initializer", &settings_.initializer.kind));
    OP_REQUIRES_OK(context, context->GetAttr("admission", &settings_.admission.kind));
    OP_REQUIRES_OK(context, context->GetAttr("eviction", &settings_.eviction.kind));
    OP_REQUIRES_OK(context, context->GetAttr("half_below", &settings_.half_below));
    OP_REQUIRES_OK(context, context->GetAttr("half_life", &settings_.half_life));
    OP_REQUIRES_OK(context, context->GetAttr("round_at_random", &settings_.round_at_random));
    OP_REQUIRES_OK(context, context->GetAttr("hbm_rows", &settings_.hbm_rows));
    OP_REQUIRES_OK(context, context->GetAttr("lookahead", &settings_.lookahead));
    OP_REQUIRES_OK(context, context->GetAttr("disk_folder", &settings_.disk_folder));
    OP_REQUIRES_OK(context, context->GetAttr("memory_bytes", &settings_.memory_bytes));
    OP_REQUIRES_OK(context, context->GetAttr("l2", &settings_.l2));
    OP_REQUIRES(context,
                settings_.l2.empty() || settings_.l2.size() == static_cast<size_t>(settings_.dim),
                Invalid("table '", settings_.name, "': the prior has ", settings_.l2.size(),
                        " columns, but a row has ", settings_.dim));
  }

  void Compute(OpKernelContext* context) override {
    TableSettings settings = settings_;
    TableSettings::Part* const parts[] = {&settings.optimizer, &settings.initializer,
                                          &settings.admission, &settings.eviction};
    for (int i = 0; i < 4; ++i) {
      const auto values = context->input(i).flat<double>();
      parts[i]->parameters.assign(values.data(), values.data() + values.size());
    }
    std::unique_ptr<Engine> table;
    OP_REQUIRES_OK(context, Engine::Make(context, settings, &table));
    Tensor* handle;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &handle));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(
            new HashTableResource<Engine>(settings.name, std::move(table)),
            context->device()->name());
  }

 private:
  TableSettings settings_;
};

template <class Engine>
class LookupOp : public TableOp<Engine> {
 public:
  explicit LookupOp(OpKernelConstruction* context) : TableOp<Engine>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(context, context->GetAttr("distinct", &distinct_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    OP_REQUIRES(
        context, dim_ == table.dim(),
        Invalid("table '", name, "' has dim ", table.dim(), ", but the lookup says ", dim_));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "insert", 2, TensorShape({})));
    const int64_t n = this->KeyCount(context);
    Tensor* rows;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({n, dim_}), &rows, NearGpu()));
    OP_REQUIRES_OK(context,
                   table.Lookup(context, this->Keys(context), n, context->input(2).scalar<bool>()(),
                                distinct_, rows->flat<float>().data()));
  }

 private:
  int64_t dim_;
  bool distinct_;
};

// It is asynchronous because a GPU reads the rows beside other work.
template <class Engine>
class PeekOp : public AsyncOpKernel {
 public:
  explicit PeekOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dim", &dim_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    FoundTable<Engine> found;
    OP_REQUIRES_OK_ASYNC(context, found.Find(context, /*takes_keys=*/true), done);
    OP_REQUIRES_ASYNC(context, dim_ == found.table->dim(),
                      Invalid("table '", found.name, "' has dim ", found.table->dim(),
                              ", but the peek says ", dim_),
                      done);
    const Tensor& keys = context->input(1);
    const int64_t n = keys.NumElements();
    Tensor *rows, *stamps;
    OP_REQUIRES_OK_ASYNC(
        context, context->allocate_output(0, TensorShape({n, dim_}), &rows, NearGpu()), done);
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(1, TensorShape({n}), &stamps), done);
    Engine::Peek(context, found, keys.flat<int64_t>().data(), n, rows->flat<float>().data(),
                 stamps->flat<int64_t>().data(), std::move(done));
  }

 private:
  int64_t dim_;
};

// Writes changed rows into the peeked ones, in place if nothing else uses them.
template <class Engine>
class RereadOp : public TableOp<Engine> {
 public:
  explicit RereadOp(OpKernelConstruction* context) : TableOp<Engine>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("distinct", &distinct_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    const int64_t n = this->KeyCount(context);
    const TensorShape shape({n, table.dim()});
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "peeked rows", 2, shape));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "stamps", 3, TensorShape({n})));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "insert", 4, TensorShape({})));
    const float* const peeked = context->input(2).flat<float>().data();
    Tensor *rows, *changed;
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({}), &changed));
    const std::unique_ptr<Tensor> own =
        context->forward_input(2, 0, tensorflow::DT_FLOAT, shape, context->output_memory_type(0),
                               context->output_alloc_attr(0));
    if (own != nullptr) {
      context->set_output(0, *own);
      rows = own.get();
    } else {
      OP_REQUIRES_OK(context, context->allocate_output(0, shape, &rows, NearGpu()));
    }
    OP_REQUIRES_OK(context,
                   table.Reread(context, this->Keys(context), n, context->input(4).scalar<bool>()(),
                                distinct_, peeked, context->input(3).flat<int64_t>().data(),
                                rows->flat<float>().data(), changed->flat<int64_t>().data()));
  }

 private:
  bool distinct_;
};

template <class Engine>
class UpdateOp : public TableOp<Engine> {
 public:
  explicit UpdateOp(OpKernelConstruction* context) : TableOp<Engine>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("distinct", &distinct_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    const int64_t n = this->KeyCount(context);
    OP_REQUIRES_OK(context,
                   this->CheckShape(context, name, "gradients", 2, TensorShape({n, table.dim()})));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "learning_rate", 3, TensorShape({})));
    OP_REQUIRES_OK(
        context, table.Update(context, this->Keys(context), context->input(2).flat<float>().data(),
                              n, context->input(3).scalar<float>()(), distinct_));
  }

 private:
  bool distinct_;
};

template <class Engine>
class UpdateIndexedOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    OP_REQUIRES(context, tensorflow::TensorShapeUtils::IsVector(context->input(3).shape()),
                Invalid("table '", name, "': positions must be a vector, got shape ",
                        context->input(3).shape().DebugString()));
    const int64_t n = context->input(3).NumElements();
    OP_REQUIRES_OK(context,
                   this->CheckShape(context, name, "gradients", 2, TensorShape({n, table.dim()})));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "learning_rate", 4, TensorShape({})));
    OP_REQUIRES_OK(context,
                   table.UpdateIndexed(context, this->Keys(context), this->KeyCount(context),
                                       context->input(2).flat<float>().data(),
                                       context->input(3).flat<int32_t>().data(), n,
                                       context->input(4).scalar<float>()()));
  }
};

template <class Engine>
class RemoveOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Engine& table) override {
    int64_t removed = 0;
    OP_REQUIRES_OK(context,
                   table.Remove(context, this->Keys(context), this->KeyCount(context), &removed));
    this->SetScalar(context, 0, removed);
  }
};

template <class Engine>
class ContainsOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Engine& table) override {
    const int64_t n = this->KeyCount(context);
    Tensor* found;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({n}), &found));
    OP_REQUIRES_OK(context,
                   table.Contains(context, this->Keys(context), n, found->flat<bool>().data()));
  }
};

template <class Engine>
class EvictOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  bool takes_keys() const override { return false; }
  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    for (const int i : {1, 2}) {
      OP_REQUIRES_OK(context, this->CheckShape(context, name, "at and turns", i, TensorShape({})));
    }
    const int64_t at = context->input(1).scalar<int64_t>()();
    const uint64_t turns = static_cast<uint64_t>(context->input(2).scalar<int64_t>()());
    int64_t evicted = 0;
    if (turns != 0) OP_REQUIRES_OK(context, table.Evict(context, at, turns, &evicted));
    this->SetScalar(context, 0, evicted);
  }
};

template <class Engine>
class PrefetchOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Engine& table) override {
    OP_REQUIRES_OK(context, table.Prefetch(context, this->Keys(context), this->KeyCount(context)));
  }
};

template <class Engine>
class ReserveOp : public TableOp<Engine> {
 public:
  explicit ReserveOp(OpKernelConstruction* context) : TableOp<Engine>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("rows", &rows_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string&, Engine& table) override {
    OP_REQUIRES_OK(context, table.Reserve(rows_));
  }

 private:
  int64_t rows_;
};

template <class Engine>
class StatisticsOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Engine& table) override {
    StatisticsArray values{};
    OP_REQUIRES_OK(context, table.Statistics(&values));
    Tensor* out;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, TensorShape({static_cast<int64_t>(values.size())}), &out));
    std::copy(values.begin(), values.end(), out->flat<int64_t>().data());
  }
};

// On a GPU, batches are in GPU memory; all other inputs and outputs, which the host reads or
// writes, are in host memory.
#define GMETA_REGISTER_BATCH_KERNELS(DEVICE, ENGINE)                                               \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTable")                                                   \
                              .Device(DEVICE)                                                      \
                              .HostMemory("optimizer_parameters")                                  \
                              .HostMemory("initializer_parameters")                                \
                              .HostMemory("admission_parameters")                                  \
                              .HostMemory("eviction_parameters")                                   \
                              .HostMemory("table"),                                                \
                          CreateOp<ENGINE>);                                                       \
  REGISTER_KERNEL_BUILDER(                                                                         \
      Name("GmetaHashTableLookup").Device(DEVICE).HostMemory("table").HostMemory("insert"),        \
      LookupOp<ENGINE>);                                                                           \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTablePeek").Device(DEVICE).HostMemory("table"),           \
                          PeekOp<ENGINE>);                                                         \
  REGISTER_KERNEL_BUILDER(                                                                         \
      Name("GmetaHashTableReread").Device(DEVICE).HostMemory("table").HostMemory("insert"),        \
      RereadOp<ENGINE>);                                                                           \
  REGISTER_KERNEL_BUILDER(                                                                         \
      Name("GmetaHashTableUpdate").Device(DEVICE).HostMemory("table").HostMemory("learning_rate"), \
      UpdateOp<ENGINE>);                                                                           \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableUpdateIndexed")                                      \
                              .Device(DEVICE)                                                      \
                              .HostMemory("table")                                                 \
                              .HostMemory("learning_rate"),                                        \
                          UpdateIndexedOp<ENGINE>);                                                \
  REGISTER_KERNEL_BUILDER(                                                                         \
      Name("GmetaHashTableRemove").Device(DEVICE).HostMemory("table").HostMemory("removed"),       \
      RemoveOp<ENGINE>);                                                                           \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableContains").Device(DEVICE).HostMemory("table"),       \
                          ContainsOp<ENGINE>);                                                     \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTablePrefetch").Device(DEVICE).HostMemory("table"),       \
                          PrefetchOp<ENGINE>);                                                     \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableReserve").Device(DEVICE).HostMemory("table"),        \
                          ReserveOp<ENGINE>);                                                      \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableStatistics")                                         \
                              .Device(DEVICE)                                                      \
                              .HostMemory("table")                                                 \
                              .HostMemory("statistics"),                                           \
                          StatisticsOp<ENGINE>);                                                   \
  REGISTER_KERNEL_BUILDER(                                                                         \
      Name("GmetaHashTableSize").Device(DEVICE).HostMemory("table").HostMemory("size"),            \
      ScalarOp<ENGINE, &ENGINE::Size>);                                                            \
  REGISTER_KERNEL_BUILDER(                                                                         \
      Name("GmetaHashTableStep").Device(DEVICE).HostMemory("table").HostMemory("step"),            \
      ScalarOp<ENGINE, &ENGINE::Step>);                                                            \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableEvict")                                              \
                              .Device(DEVICE)                                                      \
                              .HostMemory("table")                                                 \
                              .HostMemory("at")                                                    \
                              .HostMemory("turns")                                                 \
                              .HostMemory("evicted"),                                              \
                          EvictOp<ENGINE>)

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_KERNELS_BATCH_H_
