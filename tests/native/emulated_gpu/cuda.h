// A tensor as the copy engine is told of it (tensor_map.cuh).

#ifndef GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_H_
#define GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_H_

#include <cstdint>

struct CUtensorMap {
  char* data;
  int64_t sizes[3];    // width, heads, tokens
  int64_t strides[3];  // in bytes
  int rows;            // of a box
};

#endif  // GMETA_TESTS_NATIVE_EMULATED_GPU_CUDA_H_
