// Error reports of the CUDA library: exceptions inside, and at its C interface (cuda_abi.h) a
// status and a message for the thread.
//
//   int gmeta_something(...) {
//     return gmeta::Guarded([&] { gmeta::CheckCuda(cudaMemsetAsync(...), "clearing x"); });
//   }

#ifndef GMETA_OPS_COMMON_GPU_CUDA_ERROR_CUH_
#define GMETA_OPS_COMMON_GPU_CUDA_ERROR_CUH_

#include <cuda_runtime.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "ops/common/gpu/cuda_abi.h"

namespace gmeta {

class CudaError : public std::runtime_error {
 public:
  CudaError(gmeta_cuda_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}

  gmeta_cuda_status status() const { return status_; }

 private:
  gmeta_cuda_status status_;
};

// Sets the thread's message, and returns the status.
int SetCudaError(gmeta_cuda_status status, const char* message);

inline void CheckCuda(cudaError_t code, const char* doing) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // so that the next call isn't blamed for it
  throw CudaError(
      code == cudaErrorMemoryAllocation ? GMETA_CUDA_OUT_OF_MEMORY : GMETA_CUDA_FAILED,
      std::string(doing) + ": " + cudaGetErrorName(code) + ", " + cudaGetErrorString(code));
}

// Checks a launch. Call it right after.
inline void CheckLaunch(const char* kernel) { CheckCuda(cudaGetLastError(), kernel); }

inline void Require(bool condition, const std::string& message) {
  if (!condition) throw CudaError(GMETA_CUDA_INVALID, message);
}

// Runs the body of a function of the C interface.
template <class Body>
int Guarded(const Body& body) {
  try {
    body();
    return GMETA_CUDA_OK;
  } catch (const CudaError& error) {
    return SetCudaError(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return SetCudaError(GMETA_CUDA_OUT_OF_MEMORY, "out of host memory");
  } catch (const std::exception& error) {
    return SetCudaError(GMETA_CUDA_FAILED, error.what());
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_GPU_CUDA_ERROR_CUH_
