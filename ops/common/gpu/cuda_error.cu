#include <string>

#include "ops/common/gpu/cuda_error.cuh"

namespace gmeta {
namespace {

std::string& Message() {
  thread_local std::string message;
  return message;
}

}  // namespace

int SetCudaError(gmeta_cuda_status status, const char* message) {
  Message() = message;
  return status;
}

}  // namespace gmeta

const char* gmeta_cuda_error(void) { return gmeta::Message().c_str(); }
