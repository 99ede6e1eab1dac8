// Streams beside TensorFlow's compute stream, and the events by which they follow each other.
// Events have no times, so recording one is cheap.

#ifndef GMETA_OPS_COMMON_GPU_STREAM_ABI_H_
#define GMETA_OPS_COMMON_GPU_STREAM_ABI_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/gpu/cuda_abi.h"

extern "C" {

// Finds the calling thread's current GPU: its number in this process, and its address on the
// machine's bus, which names it in all processes; with a `size` of 0 only the number.
GMETA_CUDA_API int gmeta_gpu_device(int32_t* device, char* address, size_t size);

// Makes a GPU the calling thread's current one.
GMETA_CUDA_API int gmeta_gpu_use(int32_t device);

// Makes a stream that doesn't wait for the default stream, and an event. Both are on the current
// GPU. An urgent stream has the highest priority, others the compute stream's. Null arguments are
// skipped, also when they are destroyed.
GMETA_CUDA_API int gmeta_gpu_stream_create(int32_t urgent, void** stream, void** event);
GMETA_CUDA_API int gmeta_gpu_stream_destroy(void* stream, void* event);

// Lets the event happen when all that is queued on the stream is done; or lets all that will be
// queued on the stream wait for the event.
GMETA_CUDA_API int gmeta_gpu_event_record(void* event, void* stream);
GMETA_CUDA_API int gmeta_gpu_stream_wait(void* stream, void* event);

// Whether the event has happened since it was last recorded; doesn't wait.
GMETA_CUDA_API int gmeta_gpu_event_query(void* event, int32_t* happened);

// Waits until the event has happened since it was last recorded.
GMETA_CUDA_API int gmeta_gpu_event_await(void* event);

// Queues a copy between the GPU and host memory, which should be pinned.
GMETA_CUDA_API int gmeta_gpu_stream_copy(void* to, const void* from, size_t bytes, void* stream);

}  // extern "C"

#endif  // GMETA_OPS_COMMON_GPU_STREAM_ABI_H_
