# One executable per tests/native/*_test.cc. The cores don't depend on TensorFlow, so neither do these.
enable_testing()
add_custom_target(native_tests)
file(GLOB test_sources CONFIGURE_DEPENDS tests/native/*_test.cc)
foreach(source ${test_sources})
  get_filename_component(name ${source} NAME_WE)
  if(name MATCHES "^emulated_" AND GMETA_SANITIZE MATCHES "thread")
    continue()  # its threads are fibers of one thread
  endif()
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  target_compile_options(${name} PRIVATE -UNDEBUG)
  if(name MATCHES "^emulated_")  # CUDA sources, compiled by g++ for an emulated GPU
    target_include_directories(${name} BEFORE PRIVATE ${CMAKE_SOURCE_DIR}/tests/native/emulated_gpu)
    target_compile_options(${name} PRIVATE -Wno-unknown-pragmas -U_FORTIFY_SOURCE)  # fibers jump
    # A GPU rejects an unaligned address; a CPU accepts it.
    target_compile_options(${name} PRIVATE -fsanitize=alignment -fno-sanitize-recover=alignment)
    target_link_options(${name} PRIVATE -fsanitize=alignment)
  endif()
  if(GMETA_SANITIZE)
    target_compile_options(${name} PRIVATE -fsanitize=${GMETA_SANITIZE} -fno-omit-frame-pointer)
    target_link_options(${name} PRIVATE -fsanitize=${GMETA_SANITIZE})
  endif()
  add_dependencies(native_tests ${name})
  add_test(NAME ${name} COMMAND ${name})
endforeach()
