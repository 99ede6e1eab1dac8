# Prepares a library for a wheel, which runs on machines older than the one that builds it: see
# ops/common/manylinux.cc. Wheels name no folder of this machine, and no version of Python.
option(GMETA_MANYLINUX "Build for glibc 2.28 and GCC 8's libstdc++, as wheels need" OFF)

function(gmeta_for_wheels name)
  if(NOT GMETA_MANYLINUX)
    return()
  endif()
  target_sources(${name} PRIVATE ${CMAKE_SOURCE_DIR}/ops/common/manylinux.cc)
  # Newer versions of glibc include these libraries and leave them empty; with older ones they have functions.
  target_link_options(${name} PRIVATE -Wl,--gc-sections)
  target_link_libraries(${name} PRIVATE -Wl,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2 -l:librt.so.1
    -Wl,--as-needed)
  # TensorFlow's libraries are already in the process; _gmeta_cuda.so is in the same folder.
  set_target_properties(${name} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
endfunction()
