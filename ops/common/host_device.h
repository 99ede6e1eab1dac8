// GMETA_HOST_DEVICE marks functions that run on the CPU and on the GPU. It is empty for compilers
// that know no CUDA, so that the headers of CPU cores may use it.

#ifndef GMETA_OPS_COMMON_HOST_DEVICE_H_
#define GMETA_OPS_COMMON_HOST_DEVICE_H_

#if defined(__CUDACC__)
#define GMETA_HOST_DEVICE __host__ __device__
#else
#define GMETA_HOST_DEVICE
#endif

#endif  // GMETA_OPS_COMMON_HOST_DEVICE_H_
