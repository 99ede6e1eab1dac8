// Shared by all entry points of the CUDA library (_gmeta_cuda.so). Its interface is C only: plain
// pointers, sizes, streams as void* (a cudaStream_t; null: the default stream). So tests call it
// through ctypes, and TensorFlow kernels are compiled without CUDA's headers.
//
// Every function that can fail returns a gmeta_cuda_status. If that isn't GMETA_CUDA_OK,
// gmeta_cuda_error() says what was received, where, and what to do next. Kernels run after a
// function has returned: a later call on the same device reports their errors.

#ifndef GMETA_OPS_COMMON_GPU_CUDA_ABI_H_
#define GMETA_OPS_COMMON_GPU_CUDA_ABI_H_

#define GMETA_CUDA_API __attribute__((visibility("default")))

extern "C" {

enum gmeta_cuda_status {
  GMETA_CUDA_OK = 0,
  GMETA_CUDA_INVALID = 1,        // an argument is wrong
  GMETA_CUDA_UNSUPPORTED = 2,    // the CPU can do this, the GPU can't: use the CPU
  GMETA_CUDA_OUT_OF_MEMORY = 3,  // nothing was changed
  GMETA_CUDA_FAILED = 4,         // CUDA reports an error
  GMETA_CUDA_CANCELLED = 5,      // a function of the caller's gave up
};

// Returns the message of this thread's last failed call; "" if none has failed. The pointer is
// valid until the next call fails.
GMETA_CUDA_API const char* gmeta_cuda_error(void);

}  // extern "C"

#endif  // GMETA_OPS_COMMON_GPU_CUDA_ABI_H_
