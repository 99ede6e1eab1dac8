// Code that the kernels of the dynamic hash table share: the resource, and the checks that every op
// on a table makes first. The ops are templates on an engine, which is a table on some device, so
// that all devices have the same checks and messages (kernels_batch.h, kernels_records.h).
//
// An engine has the interface of HostEngine (kernels_host.h): it is made from TableSettings, and
// its functions take the op's context, which gives the threads or the stream to work on, and return
// a Status. Peek is asynchronous: it calls the op's `done` when its work has ended.

#ifndef GMETA_OPS_TABLE_KERNELS_H_
#define GMETA_OPS_TABLE_KERNELS_H_

#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ops/common/kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace gmeta {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

// A table as GmetaHashTable's attributes and inputs describe it.
struct TableSettings {
  struct Part {
    std::string kind;
    std::vector<double> parameters;
  };
  std::string name;
  int64_t dim = 1;
  int64_t seed = 0;
  int64_t half_below = 0;
  int64_t half_life = 0;         // in steps, after which rows cool down; 0: they don't
  bool round_at_random = false;  // updates of half rows; else to nearest
  int64_t hbm_rows = 0;          // rows in a GPU's memory; 0: all. The others are in host memory
  int64_t lookahead = 0;         // batches that a prefetch is ahead of its lookup
  std::vector<float> l2;         // of the rows' prior, one per column; empty: none
  std::string disk_folder;   // for the rows that memory has no room for; empty: all are in memory
  int64_t memory_bytes = 0;  // of rows in memory, with a disk_folder
  Part optimizer, initializer, admission, eviction;
};

// The order of GmetaHashTableStatistics.
using StatisticsArray = std::array<int64_t, 18>;

template <class Engine>
class HashTableResource : public tensorflow::ResourceBase {
 public:
  HashTableResource(std::string name, std::unique_ptr<Engine> table)
      : name_(std::move(name)), table_(std::move(table)) {}

  const std::string& name() const { return name_; }
  // Callers hold the pointer while they work on the table, because another table may take its place
  // meanwhile.
  std::shared_ptr<Engine> table() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return table_;
  }

  void Swap(HashTableResource* other) {
    std::scoped_lock lock(mutex_, other->mutex_);
    std::swap(table_, other->table_);
  }

  std::string DebugString() const override {
    return absl::StrCat("gmeta hash table '", name_, "' on the ", Engine::kDevice, ": dim ",
                        table()->dim(), ", ", Counts()[0], " rows");
  }
  int64_t MemoryUsed() const override { return Counts()[2]; }

 private:
  StatisticsArray Counts() const {
    StatisticsArray counts{};
    return table()->Statistics(&counts).ok() ? counts : StatisticsArray{};
  }

  const std::string name_;
  mutable std::mutex mutex_;
  std::shared_ptr<Engine> table_;
};

// A table that an op has found. The pointer keeps the table while the op works on it.
template <class Engine>
struct FoundTable {
  std::string name;
  std::shared_ptr<Engine> table;

  // Finds the table that is an op's first input, and checks the keys, if they are the second one.
  absl::Status Find(OpKernelContext* context, bool takes_keys) {
    tensorflow::core::RefCountPtr<HashTableResource<Engine>> resource;
    TF_RETURN_IF_ERROR(
        tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), &resource));
    name = resource->name();
    table = resource->table();
    if (!takes_keys) return absl::OkStatus();
    const Tensor& keys = context->input(1);
    if (!TensorShapeUtils::IsVector(keys.shape())) {
      return Invalid("table '", name, "': keys must be a vector, got shape ",
                     keys.shape().DebugString());
    }
    if (keys.NumElements() > Engine::kMaxKeys) {
      return Invalid("table '", name, "': at most ", Engine::kMaxKeys, " keys in a call, got ",
                     keys.NumElements(), ": split the batch");
    }
    return absl::OkStatus();
  }

  // Returns what went wrong if `work` throws.
  template <class Work>
  absl::Status Try(const Work& work) const {
    try {
      return work();
    } catch (const std::bad_alloc&) {
      return Fail(
          "host memory has no room for its rows: bound it by an eviction policy, or keep rows on a "
          "drive (gmeta.policies.Tiers)");
    } catch (const std::exception& error) {  // a drive that fails, or numbers that have run out
      return Fail(error.what());
    }
  }

  absl::Status Fail(const char* why) const {
    return absl::ResourceExhaustedError(absl::StrCat("table '", name, "': ", why));
  }
};

// An op on a table, which it finds. If it has keys, it checks them.
template <class Engine>
class TableOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) final {
    FoundTable<Engine> found;
    OP_REQUIRES_OK(context, found.Find(context, takes_keys() && context->num_inputs() > 1));
    OP_REQUIRES_OK(context, found.Try([&] {
      Run(context, found.name, *found.table);
      return absl::OkStatus();
    }));
  }

 protected:
  virtual void Run(OpKernelContext* context, const std::string& name, Engine& table) = 0;

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

  // Checks that an input has the shape that this table expects.
  static absl::Status CheckShape(OpKernelContext* context, const std::string& name,
                                 const char* what, int input, const TensorShape& expected) {
    const TensorShape& shape = context->input(input).shape();
    if (shape == expected) return absl::OkStatus();
    return Invalid("table '", name, "': ", what, " must have shape ", expected.DebugString(),
                   ", got ", shape.DebugString());
  }
};

// An op that returns one number of the table: (table.*kValue)(context, &value).
template <class Engine, auto kValue>
class ScalarOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Engine& table) override {
    int64_t value = 0;
    OP_REQUIRES_OK(context, (table.*kValue)(context, &value));
    this->SetScalar(context, 0, value);
  }
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_KERNELS_H_
