// Shared by kernels of several ops: errors, and TensorFlow's thread pool as a parallel_for.

#ifndef GMETA_OPS_COMMON_KERNELS_H_
#define GMETA_OPS_COMMON_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ops/common/kernels_versions.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta {

template <class... Words>
absl::Status Invalid(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat(words...));
}

// Attributes for outputs that a GPU is likely to read. With a GPU the memory is pinned, and copies
// run at the bus's speed, without a detour. Without one it is ordinary memory.
inline tensorflow::AllocatorAttributes NearGpu() {
  tensorflow::AllocatorAttributes attributes;
  attributes.set_gpu_compatible(true);
  return attributes;
}

// The engine's parallel_for, on the thread pool of the op's device.
class PoolParallelFor {
 public:
  explicit PoolParallelFor(tensorflow::OpKernelContext* context)
      : pool_(context->device()->tensorflow_cpu_worker_threads()->workers) {}

  template <class Work>
  void operator()(size_t total, size_t cost, const Work& work) const {
    if (total <= 1) {
      if (total == 1) work(size_t{0}, size_t{1});
      return;
    }
    ParallelFor(pool_, static_cast<int64_t>(total), static_cast<int64_t>(cost),
                [&work](int64_t begin, int64_t end) {
                  work(static_cast<size_t>(begin), static_cast<size_t>(end));
                });
  }

  int threads() const { return pool_->NumThreads(); }

 private:
  tensorflow::thread::ThreadPool* pool_;
};

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_KERNELS_H_
