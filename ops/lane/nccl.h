// The functions of NCCL that the lane calls. The library is found when the first lane is made, so
// nothing links it, and a process without it uses Horovod. The declarations are NCCL's own: these
// functions and numbers are the same in all versions since 2.7.

#ifndef GMETA_OPS_LANE_NCCL_H_
#define GMETA_OPS_LANE_NCCL_H_

#include <dlfcn.h>

#include <cstddef>
#include <cstring>
#include <string>

namespace gmeta::lane {

struct Nccl {
  using Comm = void*;
  struct Id {
    char bytes[128];
  };
  enum Type { kBytes = 0, kInt32 = 2, kInt64 = 4, kFloat = 7, kDouble = 8 };
  static constexpr int kSuccess = 0, kInProgress = 7, kSum = 0;

  int (*get_version)(int* version);
  int (*get_unique_id)(Id* id);
  int (*comm_init_rank)(Comm* comm, int size, Id id, int rank);
  int (*comm_abort)(Comm comm);
  int (*comm_get_async_error)(Comm comm, int* error);
  const char* (*get_error_string)(int code);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* data, size_t count, int type, int to, Comm comm, void* stream);
  int (*recv)(void* data, size_t count, int type, int from, Comm comm, void* stream);
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int operation, Comm comm,
                    void* stream);

  // Loads a library, which stays loaded. Returns why it failed, or "".
  std::string Load(const std::string& file) {
    void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return dlerror();
    std::string missing;
    const auto find = [&](const char* name, auto* function) {
      void* const found = dlsym(library, name);
      if (found == nullptr) missing += std::string(missing.empty() ? "" : ", ") + name;
      std::memcpy(function, &found, sizeof found);
    };
    find("ncclGetVersion", &get_version);
    find("ncclGetUniqueId", &get_unique_id);
    find("ncclCommInitRank", &comm_init_rank);
    find("ncclCommAbort", &comm_abort);
    find("ncclCommGetAsyncError", &comm_get_async_error);
    find("ncclGetErrorString", &get_error_string);
    find("ncclGroupStart", &group_start);
    find("ncclGroupEnd", &group_end);
    find("ncclSend", &send);
    find("ncclRecv", &recv);
    find("ncclAllReduce", &all_reduce);
    return missing.empty() ? "" : file + " lacks " + missing;
  }
};

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_NCCL_H_
