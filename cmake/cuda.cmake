# Decides GMETA_HAVE_CUDA, and defines _gmeta_cuda.so, which has all CUDA code behind a C ABI and doesn't
# depend on TensorFlow. AUTO uses CUDA if a compiler is found; ON requires it; OFF disables it. setup.py turns
# AUTO into OFF where there is no GPU (cuda_choice.py).
set(GMETA_HAVE_CUDA OFF CACHE INTERNAL "")
file(GLOB GMETA_CUDA_SOURCES CONFIGURE_DEPENDS ops/*/*.cu ops/*/gpu/*.cu ops/*/gpu/*/*.cu)
if(GMETA_CUDA STREQUAL "OFF")
  return()
endif()
include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER)
  unset(CMAKE_CUDA_COMPILER CACHE)  # not found by an earlier configuration; it may exist now
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(GMETA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "GMETA_CUDA=ON, but no CUDA compiler was found: put nvcc on PATH, set CUDACXX, or leave the CUDA kernels out with GMETA_CUDA=OFF")
  endif()
  return()
endif()
# Kernels choose the compute capability themselves; this only lets CMake's test of the compiler pass.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80)
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.3)
  set(too_old "CUDA ${CMAKE_CUDA_COMPILER_VERSION} is too old for gmeta's kernels, which need 12.3")
  if(GMETA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "GMETA_CUDA=ON, but ${too_old}: put a newer nvcc on PATH, or set CUDACXX")
  endif()
  message(STATUS "${too_old}: built without")
  return()
endif()
set(GMETA_HAVE_CUDA ON CACHE INTERNAL "")
set(architectures ${GMETA_CUDA_ARCHITECTURES})
if(NOT architectures)
  # Only PTX of 80: GPUs newer than those named compile it when a kernel is first used.
  set(architectures 80 89-real 90a-real)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND architectures 100-real)
  endif()
endif()
message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${architectures}")

add_library(gmeta_cuda SHARED ${GMETA_CUDA_SOURCES})
# The runtime is linked statically, so that the library loads where there is neither a GPU nor a driver.
set_target_properties(gmeta_cuda PROPERTIES
  PREFIX "_" CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden CUDA_STANDARD 17
  CUDA_RUNTIME_LIBRARY Static CUDA_ARCHITECTURES "${architectures}")
target_compile_options(gmeta_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
gmeta_for_wheels(gmeta_cuda)
# New rows, optimizers' steps and the weights of a trie's children equal the CPU's to the last bit: no fused
# multiply-add.
file(GLOB exact CONFIGURE_DEPENDS ops/table/gpu/*.cu ops/table/gpu/*/*.cu ops/trie/gpu/*.cu)
set_source_files_properties(${exact} PROPERTIES COMPILE_OPTIONS -fmad=false)
