// CPU kernels of a step in micro-batches: of its keys and of its units. They check their inputs,
// and call the headers of this folder with TensorFlow's own thread pool.

#include "ops/common/kernels.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include "ops/common/kernels_vectors.h"
#include "ops/window/clusters.h"
#include "ops/window/collected_keys.h"
#include "ops/window/key_classes.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr int64_t kMostKeys = std::numeric_limits<int32_t>::max();

// Reads vectors of keys.
absl::Status ReadKeys(OpKernelContext* context, const char* op, std::vector<KeySpan>* spans) {
  OpInputList keys;
  TF_RETURN_IF_ERROR(context->input_list("keys", &keys));
  int64_t total = 0;
  for (const Tensor& each : keys) {
    TF_RETURN_IF_ERROR(CheckVector(op, "keys", each));
    spans->push_back({each.flat<int64_t>().data(), static_cast<size_t>(each.NumElements())});
    total += each.NumElements();
  }
  if (total <= kMostKeys) return absl::OkStatus();
  return Invalid(op, ": at most ", kMostKeys, " keys in a call, got ", total, ": split the batch");
}

// Reads vectors of places.
absl::Status ReadPlaces(OpKernelContext* context, const char* op, const char* name,
                        std::vector<PlaceSpan>* spans) {
  OpInputList places;
  TF_RETURN_IF_ERROR(context->input_list(name, &places));
  for (const Tensor& each : places) {
    TF_RETURN_IF_ERROR(CheckVector(op, name, each));
    spans->push_back({each.flat<int32_t>().data(), static_cast<size_t>(each.NumElements())});
  }
  return absl::OkStatus();
}

absl::Status CheckClasses(OpKernelConstruction* context, const char* op) {
  int micro_batches, classes;
  TF_RETURN_IF_ERROR(context->GetAttr("micro_batches", &micro_batches));
  TF_RETURN_IF_ERROR(context->GetAttr("classes", &classes));
  if (micro_batches > static_cast<int>(kMostMicroBatches)) {
    return Invalid(op, ": at most ", kMostMicroBatches, " micro-batches, got ", micro_batches);
  }
  const int64_t expected = static_cast<int64_t>(ClassCount(micro_batches));
  if (classes == expected) return absl::OkStatus();
  return Invalid(op, ": ", micro_batches, " micro-batches have ", expected, " classes, got ",
                 classes);
}

class KeyClassesOp : public OpKernel {
 public:
  explicit KeyClassesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, CheckClasses(context, "key_classes"));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<KeySpan> spans;
    OP_REQUIRES_OK(context, ReadKeys(context, "key_classes", &spans));
    const PoolParallelFor parallel_for(context);
    const KeyClasses classes(spans, parallel_for);
    std::vector<int64_t*> keys;
    std::vector<int32_t*> places;
    OP_REQUIRES_OK(
        context,
        AllocateVectors(context, "by_class", [&](int i) { return classes.count(i); }, &keys));
    OP_REQUIRES_OK(
        context, AllocateVectors(context, "places", [&](int i) { return spans[i].size; }, &places));
    classes.Write(keys.data(), places.data(), parallel_for);
  }
};

class MovePlacesOp : public OpKernel {
 public:
  explicit MovePlacesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, CheckClasses(context, "move_places"));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<PlaceSpan> within, places;
    OP_REQUIRES_OK(context, ReadPlaces(context, "move_places", "within", &within));
    OP_REQUIRES_OK(context, ReadPlaces(context, "move_places", "places", &places));
    std::vector<int32_t*> moved;
    OP_REQUIRES_OK(
        context, AllocateVectors(context, "moved", [&](int i) { return places[i].size; }, &moved));
    size_t total = 0;
    for (const PlaceSpan& each : places) total += each.size;
    std::atomic<bool> good(true);
    const PoolParallelFor parallel_for(context);
    parallel_for(places.size(), 1 + total / places.size(), [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        if (!MovePlaces(i, places.size(), within, places[i], moved[i])) good = false;
      }
    });
    OP_REQUIRES(context, good, Invalid("move_places: a place isn't that of a key"));
  }
};

class CollectKeysOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    std::vector<KeySpan> spans;
    std::vector<PlaceSpan> positions;
    OP_REQUIRES_OK(context, ReadKeys(context, "collect_keys", &spans));
    OP_REQUIRES_OK(context, ReadPlaces(context, "collect_keys", "positions", &positions));
    const CollectedKeys collected(spans, PoolParallelFor(context));
    Tensor* distinct;
    OP_REQUIRES_OK(
        context, context->allocate_output(0, TensorShape({static_cast<int64_t>(collected.size())}),
                                          &distinct));
    std::copy_n(collected.keys(), collected.size(), distinct->flat<int64_t>().data());
    std::vector<int32_t*> places;
    OP_REQUIRES_OK(
        context,
        AllocateVectors(context, "places", [&](int i) { return positions[i].size; }, &places));
    for (size_t each = 0; each < spans.size(); ++each) {
      OP_REQUIRES(context, collected.WritePlaces(each, positions[each], places[each]),
                  Invalid("collect_keys: a position of vector ", each, " must lie in [0, ",
                          spans[each].size, ")"));
    }
  }
};

class ClusterUnitsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& keys = context->input(0);
    const Tensor& units = context->input(1);
    const Tensor& sizes = context->input(2);
    OP_REQUIRES_OK(context, CheckVector("cluster_units", "keys", keys));
    OP_REQUIRES_OK(context, CheckVector("cluster_units", "sizes", sizes));
    OP_REQUIRES(context, units.shape() == keys.shape(),
                Invalid("cluster_units: each key has a unit, got ", keys.shape().DebugString(),
                        " keys and ", units.shape().DebugString(), " units"));
    const int64_t n = keys.NumElements(), parts = sizes.NumElements();
    OP_REQUIRES(context, parts >= 1 && parts <= static_cast<int64_t>(kMostMicroBatches),
                Invalid("cluster_units: 1 to ", kMostMicroBatches, " sizes, got ", parts));
    OP_REQUIRES(context, n <= kMostKeys,
                Invalid("cluster_units: at most ", kMostKeys, " keys in a call, got ", n));
    std::vector<size_t> wanted;
    int64_t total = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t size = sizes.flat<int64_t>()(part);
      OP_REQUIRES(context, size >= 0, Invalid("cluster_units: size ", part, " is ", size));
      wanted.push_back(static_cast<size_t>(size));
      total += size;
    }
    const int64_t* of_keys = units.flat<int64_t>().data();
    for (int64_t i = 0; i < n; ++i) {
      OP_REQUIRES(context, of_keys[i] >= 0 && of_keys[i] < total,
                  Invalid("cluster_units: unit ", of_keys[i], " of key ", i, " must lie in [0, ",
                          total, "), which the sizes add up to"));
    }
    Tensor* order;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({total}), &order));
    ClusterUnits(keys.flat<int64_t>().data(), of_keys, static_cast<size_t>(n), wanted,
                 order->flat<int64_t>().data(), PoolParallelFor(context));
  }
};

REGISTER_KERNEL_BUILDER(Name("GmetaClusterUnits").Device(DEVICE_CPU), ClusterUnitsOp);
REGISTER_KERNEL_BUILDER(Name("GmetaKeyClasses").Device(DEVICE_CPU), KeyClassesOp);
REGISTER_KERNEL_BUILDER(Name("GmetaMovePlaces").Device(DEVICE_CPU), MovePlacesOp);
REGISTER_KERNEL_BUILDER(Name("GmetaCollectKeys").Device(DEVICE_CPU), CollectKeysOp);

}  // namespace
}  // namespace gmeta
