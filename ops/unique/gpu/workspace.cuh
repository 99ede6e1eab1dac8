// Divides one piece of scratch memory into arrays. With a null base it only counts bytes.

#ifndef GMETA_OPS_UNIQUE_GPU_WORKSPACE_CUH_
#define GMETA_OPS_UNIQUE_GPU_WORKSPACE_CUH_

#include <cstddef>
#include <cstdint>

namespace gmeta {

class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* Take(size_t count) {
    char* at = base_ + used_;
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(at);
  }
  size_t bytes() const { return used_; }

 private:
  static constexpr size_t kAlignment = 256;

  char* base_;
  size_t used_ = 0;
};

}  // namespace gmeta

#endif  // GMETA_OPS_UNIQUE_GPU_WORKSPACE_CUH_
