// What the table's kernels and its host code use of CUDA beside cuda_runtime.h: memory, streams
// that have done all at once, votes of a warp, and accesses to memory. To be included before the
// sources.

#ifndef GMETA_TESTS_NATIVE_EMULATED_GPU_DEVICE_MEMORY_H_
#define GMETA_TESTS_NATIVE_EMULATED_GPU_DEVICE_MEMORY_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline int __any_sync(unsigned lanes, int x) { return __ballot_sync(lanes, x) != 0; }
template <class T>
unsigned __match_any_sync(unsigned, T x) {
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof x);
  const uint64_t* words = emulated::Current().Exchange(word);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(words[i] == word) << i;
  return bits;
}

// A vector's address must be aligned to it.
template <class T>
const T& Aligned(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % alignof(T) != 0) emulated::Fail("an unaligned vector");
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return Aligned(from);
}
template <class T>
T __ldcs(const T* from) {
  return Aligned(from);
}
template <class T>
void __stcs(T* to, const T& x) {
  Aligned(to);
  *to = x;
}
// Other threads may come between what was written and what is written next.
inline void __threadfence() {
  int asked = 0;
  emulated::Current().Await([&] { return asked++ != 0; });
}
template <class T>
T atomicExch(T* to, T x) {
  return std::exchange(*to, x);
}
template <class T>
T atomicCAS(T* to, T expected, T x) {
  const T before = *to;
  if (before == expected) *to = x;
  return before;
}
template <class T>
T atomicOr(T* to, T bits) {
  return std::exchange(*to, *to | bits);
}
template <class T>
T atomicMin(T* to, T other) {
  return std::exchange(*to, std::min(*to, other));
}
template <class T>
T atomicMax(T* to, T other) {
  return std::exchange(*to, std::max(*to, other));
}
inline unsigned atomicSub(unsigned* to, unsigned by) { return std::exchange(*to, *to - by); }
inline unsigned atomicAdd(unsigned* to, int by) { return atomicAdd(to, static_cast<unsigned>(by)); }

namespace emulated {

struct Memory {
  std::map<void*, size_t> sizes;
  size_t bytes = 0;
  size_t most = SIZE_MAX;             // set by a test
  std::set<std::thread::id> threads;  // that allocated
};
inline Memory device_memory, pinned_memory;
inline std::mutex memory_mutex;  // a table's threads allocate too

inline cudaError_t Note(Memory* memory, void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  if (memory->bytes + bytes > memory->most) return cudaErrorMemoryAllocation;
  memory->sizes[data] = bytes;
  memory->threads.insert(std::this_thread::get_id());
  memory->bytes += bytes;
  return cudaSuccess;
}
inline cudaError_t Forget(Memory* memory, void* data) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  memory->bytes -= memory->sizes.at(data);
  memory->sizes.erase(data);
  return cudaSuccess;
}
// Poisoned, and freed memory is gone, for the address sanitizer to see.
inline cudaError_t Allocate(Memory* memory, void** to, size_t bytes) {
  void* const data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  const cudaError_t code = Note(memory, data, bytes);
  if (code != cudaSuccess) return std::free(data), code;
  std::memset(data, 0xCD, bytes);
  return *to = data, cudaSuccess;
}
inline cudaError_t Release(Memory* memory, void* data) {
  const cudaError_t code = Forget(memory, data);
  return std::free(data), code;
}

}  // namespace emulated

inline cudaError_t cudaMalloc(void** to, size_t bytes) {
  return emulated::Allocate(&emulated::device_memory, to, bytes);
}
inline cudaError_t cudaFree(void* data) {
  return emulated::Release(&emulated::device_memory, data);
}
template <class T>
cudaError_t cudaMallocHost(T** to, size_t bytes) {
  return emulated::Allocate(&emulated::pinned_memory, reinterpret_cast<void**>(to), bytes);
}
enum { cudaHostRegisterPortable = 1, cudaHostRegisterMapped = 2 };
inline cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned) {
  return emulated::Note(&emulated::pinned_memory, data, bytes);
}
inline cudaError_t cudaHostUnregister(void* data) {
  return emulated::Forget(&emulated::pinned_memory, data);
}
inline cudaError_t cudaFreeHost(void* data) {
  return emulated::Release(&emulated::pinned_memory, data);
}
inline cudaError_t cudaHostGetDevicePointer(void** to, void* data, unsigned) {
  return *to = data, cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return *free = *total = 0, cudaSuccess;
}

namespace emulated {

// Scratch memory, which holds anything.
struct Workspace {
  explicit Workspace(size_t bytes) : bytes(bytes) { cudaMalloc(&data, bytes); }
  ~Workspace() { cudaFree(data); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data = nullptr;
  const size_t bytes;
};

}  // namespace emulated

enum cudaMemcpyKind {
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

struct EmulatedEvent {
  cudaStream_t stream = nullptr;
  uint64_t count = 0;  // what the stream had been sent

  void Await() const {
    if (stream != nullptr) stream->RunUntil(std::max(count, stream->done));
  }
};
using cudaEvent_t = EmulatedEvent*;
enum { cudaStreamNonBlocking, cudaEventDisableTiming };
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = nullptr, cudaSuccess;
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = *greatest = 0, cudaSuccess;
}
// What a table has beside its own work: a stream that does it late.
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return *stream = new EmulatedStream, cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream != nullptr) stream->RunUntil(stream->sent());
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new EmulatedEvent, cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *event = {stream, stream == nullptr ? 0 : stream->sent()};
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) { return event->Await(), cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned) {
  return event->Await(), cudaSuccess;
}
// By turns not yet, and done: a host learns late how many rows there are.
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  static bool done = false;
  done = !done;
  if (done) event->Await();
  return done ? cudaSuccess : cudaErrorUnknown;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t, void (*run)(void*), void* data) {
  return run(data), cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

#endif  // GMETA_TESTS_NATIVE_EMULATED_GPU_DEVICE_MEMORY_H_
