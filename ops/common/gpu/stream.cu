#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/stream_abi.h"

namespace {

using gmeta::CheckCuda;
using gmeta::Guarded;

cudaStream_t Stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t Event(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

int gmeta_gpu_device(int32_t* device, char* address, size_t size) {
  return Guarded([&] {
    CheckCuda(cudaGetDevice(device), "finding the current GPU");
    if (size == 0) return;
    CheckCuda(cudaDeviceGetPCIBusId(address, static_cast<int>(size), *device),
              "finding a GPU's address");
  });
}

int gmeta_gpu_use(int32_t device) {
  return Guarded([&] { CheckCuda(cudaSetDevice(device), "choosing a GPU"); });
}

int gmeta_gpu_stream_create(int32_t urgent, void** stream, void** event) {
  return Guarded([&] {
    if (stream != nullptr) {
      int least, greatest;
      CheckCuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading stream priorities");
      cudaStream_t made;
      const int priority = urgent != 0 ? greatest : least;  // TensorFlow's streams have the least
      CheckCuda(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, priority),
                "making a stream");
      *stream = made;
    }
    if (event != nullptr) {
      cudaEvent_t made;
      CheckCuda(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "making an event");
      *event = made;
    }
  });
}

int gmeta_gpu_stream_destroy(void* stream, void* event) {
  return Guarded([&] {
    if (event != nullptr) CheckCuda(cudaEventDestroy(Event(event)), "destroying an event");
    if (stream != nullptr) CheckCuda(cudaStreamDestroy(Stream(stream)), "destroying a stream");
  });
}

int gmeta_gpu_event_record(void* event, void* stream) {
  return Guarded(
      [&] { CheckCuda(cudaEventRecord(Event(event), Stream(stream)), "recording an event"); });
}

int gmeta_gpu_stream_wait(void* stream, void* event) {
  return Guarded([&] {
    CheckCuda(cudaStreamWaitEvent(Stream(stream), Event(event), 0), "waiting for an event");
  });
}

int gmeta_gpu_event_query(void* event, int32_t* happened) {
  return Guarded([&] {
    const cudaError_t code = cudaEventQuery(Event(event));
    *happened = code == cudaSuccess;
    if (code == cudaErrorNotReady) {
      cudaGetLastError();  // it isn't an error
    } else {
      CheckCuda(code, "asking for an event");
    }
  });
}

int gmeta_gpu_event_await(void* event) {
  return Guarded([&] { CheckCuda(cudaEventSynchronize(Event(event)), "waiting for an event"); });
}

int gmeta_gpu_stream_copy(void* to, const void* from, size_t bytes, void* stream) {
  return Guarded([&] {
    CheckCuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Stream(stream)),
              "copying between the GPU and host memory");
  });
}
