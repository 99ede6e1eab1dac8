// Wider vectors if the machine has them. A library that runs everywhere is compiled for x86-64's
// baseline, whose vectors hold four floats. A loop that is worth it is compiled twice more, and the
// best version that the machine can run is chosen once.
//
//   GMETA_ALWAYS_INLINE void Loop(float* x) { ... }          the code, and all that it calls
//   GMETA_VECTOR_VERSIONS(RunLoop, Loop, (float* x), (x))    RunLoop(x) runs the best version
//
// All versions give the same bits, because the build forbids the compiler to fuse multiplications
// and additions (-ffp-contract=off). GCC's target_clones would do this with an indirect function,
// whose resolver runs before the sanitizers are ready.

#ifndef GMETA_OPS_COMMON_VECTOR_TARGET_H_
#define GMETA_OPS_COMMON_VECTOR_TARGET_H_

#include "ops/common/host_device.h"

#define GMETA_ALWAYS_INLINE GMETA_HOST_DEVICE __attribute__((always_inline)) inline

#if defined(__x86_64__)
#define GMETA_VECTOR_VERSIONS(name, code, parameters, arguments)                         \
  __attribute__((target("avx2"))) inline void name##Avx2 parameters { code arguments; }  \
  __attribute__((                                                                        \
      target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))) inline void \
      name##Avx512 parameters {                                                          \
    code arguments;                                                                      \
  }                                                                                      \
  inline void name##Baseline parameters { code arguments; }                              \
  inline void name parameters {                                                          \
    static const auto version = __builtin_cpu_supports("avx512dq") ? &name##Avx512       \
                                : __builtin_cpu_supports("avx2")   ? &name##Avx2         \
                                                                   : &name##Baseline;    \
    version arguments;                                                                   \
  }
#else
#define GMETA_VECTOR_VERSIONS(name, code, parameters, arguments) \
  inline void name parameters { code arguments; }
#endif

#endif  // GMETA_OPS_COMMON_VECTOR_TARGET_H_
