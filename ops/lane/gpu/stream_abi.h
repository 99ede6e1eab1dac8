// A stream of the lane's own on a GPU, and the events by which it and TensorFlow's stream follow
// each other. Events have no times, so recording one is cheap.

#ifndef GMETA_OPS_LANE_GPU_STREAM_ABI_H_
#define GMETA_OPS_LANE_GPU_STREAM_ABI_H_

#include <cstddef>
#include <cstdint>

#include "ops/common/gpu/cuda_abi.h"

extern "C" {

// Finds the calling thread's current GPU: its number in this process, and its address on the
// machine's bus, which names it in all processes; with a `size` of 0 only the number.
GMETA_CUDA_API int gmeta_gpu_lane_device(int32_t* device, char* address, size_t size);

// Makes a GPU the calling thread's current one.
GMETA_CUDA_API int gmeta_gpu_lane_use(int32_t device);

// Makes a stream of high priority that doesn't wait for the default stream, and an event. Both are
// on the current GPU. Null arguments are skipped, also when they are destroyed.
GMETA_CUDA_API int gmeta_gpu_lane_create(void** stream, void** event);
GMETA_CUDA_API int gmeta_gpu_lane_destroy(void* stream, void* event);

// Lets the event happen when all that is queued on the stream is done; or lets all that will be
// queued on the stream wait for the event.
GMETA_CUDA_API int gmeta_gpu_lane_record(void* event, void* stream);
GMETA_CUDA_API int gmeta_gpu_lane_wait(void* stream, void* event);

// Whether the event has happened since it was last recorded; doesn't wait.
GMETA_CUDA_API int gmeta_gpu_lane_query(void* event, int32_t* happened);

}  // extern "C"

#endif  // GMETA_OPS_LANE_GPU_STREAM_ABI_H_
