// What newer TensorFlow versions spell differently, deprecating the old form. Each function
// uses the newer form if it exists: both forms are templates, so that the other one needn't
// compile.

#ifndef GMETA_OPS_COMMON_KERNELS_VERSIONS_H_
#define GMETA_OPS_COMMON_KERNELS_VERSIONS_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "tensorflow/core/platform/file_system.h"
#include "tensorflow/core/platform/threadpool.h"

namespace gmeta {
namespace versions {

struct Older {};
struct Newer : Older {};  // fits both, and prefers its own

template <class File>
auto Read(const File& file, uint64_t offset, absl::Span<char> into, absl::string_view* read, Newer)
    -> decltype(file.Read(offset, *read, into)) {
  return file.Read(offset, *read, into);
}

template <class File>
absl::Status Read(const File& file, uint64_t offset, absl::Span<char> into, absl::string_view* read,
                  Older) {
  return file.Read(offset, into.size(), read, into.data());
}

template <class Pool>
auto ParallelFor(Pool* pool, int64_t total, int64_t cost,
                 const std::function<void(int64_t, int64_t)>& work, Newer)
    -> decltype(pool->ParallelFor(total, Pool::SchedulingParams::Adaptive(cost), work)) {
  return pool->ParallelFor(total, Pool::SchedulingParams::Adaptive(cost), work);
}

template <class Pool>
void ParallelFor(Pool* pool, int64_t total, int64_t cost,
                 const std::function<void(int64_t, int64_t)>& work, Older) {
  pool->ParallelFor(total, cost, work);
}

}  // namespace versions

// Reads `count` bytes at `offset`, and points `read` at what was read: in `out`, or elsewhere. A
// file that ends early is OutOfRange.
inline absl::Status ReadAt(const tensorflow::RandomAccessFile& file, uint64_t offset, size_t count,
                           char* out, absl::string_view* read) {
  return versions::Read(file, offset, absl::MakeSpan(out, count), read, versions::Newer{});
}

// Calls `work` for parts of `total` units, each of which costs about `cost` cycles, on a pool.
inline void ParallelFor(tensorflow::thread::ThreadPool* pool, int64_t total, int64_t cost,
                        const std::function<void(int64_t, int64_t)>& work) {
  versions::ParallelFor(pool, total, cost, work, versions::Newer{});
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_KERNELS_VERSIONS_H_
