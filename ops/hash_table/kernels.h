// What the kernels of the dynamic hash table share: the resource, and what every op on a table
// checks first.

#ifndef GMETA_OPS_HASH_TABLE_KERNELS_H_
#define GMETA_OPS_HASH_TABLE_KERNELS_H_

#include <limits>
#include <string>
#include <utility>

#include "ops/common/kernels.h"
#include "ops/hash_table/table.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace gmeta {

using tensorflow::DEVICE_CPU;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

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

}  // namespace gmeta

#endif  // GMETA_OPS_HASH_TABLE_KERNELS_H_
