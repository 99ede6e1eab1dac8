# Asks the installed TensorFlow how to compile against it, and defines gmeta_op_library.
if(NOT GMETA_PYTHON)
  set(GMETA_PYTHON python3)
endif()
# The answer is kept for as long as the same TensorFlow lies in the same place; setup.py says which it is.
if(NOT GMETA_TF_VERSION OR NOT GMETA_TF_ASKED STREQUAL "${GMETA_TF_INSTALLED}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -E env TF_CPP_MIN_LOG_LEVEL=3 TF_USE_LEGACY_KERAS=1
            ${GMETA_PYTHON} ${CMAKE_SOURCE_DIR}/cmake/tensorflow_flags.py
    OUTPUT_VARIABLE flags RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR "TensorFlow can't be imported by ${GMETA_PYTHON}; install it first (see constraints.txt)")
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

# One shared library out of every kernels*.cc and ops.cc (and, with CUDA, *.cu) below a room.
function(gmeta_op_library name room)
  file(GLOB sources CONFIGURE_DEPENDS ${room}/*/kernels*.cc ${room}/*/ops.cc)
  if(GMETA_HAVE_CUDA)
    file(GLOB cuda_sources CONFIGURE_DEPENDS ${room}/*/*.cu)
    list(APPEND sources ${cuda_sources})
  endif()
  add_library(${name} SHARED ${sources} ops/common/build_info.cc)
  set_target_properties(${name} PROPERTIES PREFIX "_" CXX_VISIBILITY_PRESET hidden)
  target_include_directories(${name} SYSTEM PRIVATE ${GMETA_TF_INCLUDE})
  target_compile_definitions(${name} PRIVATE
    _GLIBCXX_USE_CXX11_ABI=${GMETA_TF_ABI} EIGEN_MAX_ALIGN_BYTES=64
    GMETA_HAVE_CUDA=$<BOOL:${GMETA_HAVE_CUDA}>)
  target_link_directories(${name} PRIVATE ${GMETA_TF_LIBRARY})
  target_link_libraries(${name} PRIVATE -l:libtensorflow_framework.so.2 Threads::Threads)
endfunction()
