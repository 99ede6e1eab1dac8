# Queries the flags of the installed TensorFlow, and defines gmeta_op_library.
if(NOT GMETA_PYTHON)
  set(GMETA_PYTHON python3)
endif()
# The answer is cached for one version and folder of TensorFlow, which setup.py passes.
if(NOT GMETA_TF_VERSION OR NOT GMETA_TF_ASKED STREQUAL "${GMETA_TF_INSTALLED}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env TF_CPP_MIN_LOG_LEVEL=3 TF_USE_LEGACY_KERAS=1
            ${GMETA_PYTHON} ${CMAKE_SOURCE_DIR}/cmake/tensorflow_flags.py ${GMETA_TF_PACKAGES}
    OUTPUT_VARIABLE flags RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR "TensorFlow can't be imported by ${GMETA_PYTHON}; install it first")
  endif()
  list(GET flags 0 version)
  list(GET flags 1 include_dir)
  list(GET flags 2 library_dir)
  list(GET flags 3 abi)
  set(GMETA_TF_VERSION ${version} CACHE INTERNAL "")
  set(GMETA_TF_INCLUDE ${include_dir} CACHE INTERNAL "")
  set(GMETA_TF_LIBRARY ${library_dir} CACHE INTERNAL "")
  set(GMETA_TF_ABI ${abi} CACHE INTERNAL "")
  set(GMETA_TF_ASKED "${GMETA_TF_INSTALLED}" CACHE INTERNAL "")
endif()
message(STATUS "TensorFlow ${GMETA_TF_VERSION}, C++11 ABI ${GMETA_TF_ABI}")

# Most of an op's compile time is parsing TensorFlow's headers, so that is done once.
set(GMETA_TF_HEADERS <tensorflow/core/framework/common_shape_fns.h> <tensorflow/core/framework/dataset.h>
    <tensorflow/core/framework/op.h> <tensorflow/core/framework/op_kernel.h>
    <tensorflow/core/framework/shape_inference.h>)

# One shared library of every kernels*.cc and ops.cc below a folder, without kernels_gpu*.cc, which pass
# tensors to _gmeta_cuda.so, if that isn't built. The first library precompiles the headers for all.
function(gmeta_op_library name room)
  file(GLOB sources CONFIGURE_DEPENDS ${room}/*/kernels*.cc ${room}/*/ops.cc)
  file(GLOB gpu_sources CONFIGURE_DEPENDS ${room}/*/kernels_gpu*.cc)
  if(gpu_sources AND NOT GMETA_HAVE_CUDA)
    list(REMOVE_ITEM sources ${gpu_sources})
  endif()
  add_library(${name} SHARED ${sources} ops/common/build_info.cc)
  set_source_files_properties(ops/common/build_info.cc PROPERTIES
    COMPILE_DEFINITIONS "GMETA_TENSORFLOW=\"${GMETA_TF_VERSION}\";GMETA_HAVE_CUDA=$<BOOL:${GMETA_HAVE_CUDA}>")
  set_target_properties(${name} PROPERTIES PREFIX "_" CXX_VISIBILITY_PRESET hidden DEFINE_SYMBOL "")
  target_include_directories(${name} SYSTEM PRIVATE ${GMETA_TF_INCLUDE})
  target_compile_definitions(${name} PRIVATE
    _GLIBCXX_USE_CXX11_ABI=${GMETA_TF_ABI} EIGEN_MAX_ALIGN_BYTES=64)
  get_property(precompiled GLOBAL PROPERTY GMETA_TF_PRECOMPILED)
  if(precompiled)
    target_precompile_headers(${name} REUSE_FROM ${precompiled})
  else()
    target_precompile_headers(${name} PRIVATE ${GMETA_TF_HEADERS})
    set_property(GLOBAL PROPERTY GMETA_TF_PRECOMPILED ${name})
  endif()
  # These include no TensorFlow header, or include them with GOOGLE_CUDA.
  set_source_files_properties(ops/common/build_info.cc ops/common/manylinux.cc ${gpu_sources} PROPERTIES
    SKIP_PRECOMPILE_HEADERS ON)
  target_link_directories(${name} PRIVATE ${GMETA_TF_LIBRARY})
  target_link_libraries(${name} PRIVATE -l:libtensorflow_framework.so.2 Threads::Threads
    ${CMAKE_DL_LIBS})
  if(GMETA_HAVE_CUDA AND gpu_sources)
    set_source_files_properties(${gpu_sources} PROPERTIES COMPILE_DEFINITIONS GOOGLE_CUDA=1)
    target_include_directories(${name} SYSTEM PRIVATE
      ${GMETA_TF_INCLUDE}/third_party/gpus/cuda/include ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    target_link_libraries(${name} PRIVATE gmeta_cuda)
    # Both are in the same folder.
    set_target_properties(${name} PROPERTIES BUILD_RPATH_USE_ORIGIN ON BUILD_RPATH "$ORIGIN")
  endif()
  gmeta_for_wheels(${name})
endfunction()
