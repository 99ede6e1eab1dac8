// The versions that this library was compiled against, as a string that can be read without loading
// the library. A library built for another TensorFlow may fail to load, and a mangled symbol is
// then the only explanation. gmeta/core/native.py looks for the marker in the file's bytes.
//
// CMake defines GMETA_TENSORFLOW: newer headers of TensorFlow don't state their version.

#define GMETA_QUOTE(text) #text
#define GMETA_STRING(macro) GMETA_QUOTE(macro)
#define GMETA_ABI GMETA_STRING(_GLIBCXX_USE_CXX11_ABI)
#define GMETA_CUDA GMETA_STRING(GMETA_HAVE_CUDA)

extern "C" __attribute__((visibility("default"), used)) const char gmeta_build_info[] =
    "@gmeta-build-info@tensorflow=" GMETA_TENSORFLOW ";cxx11_abi=" GMETA_ABI
    ";compiler=" __VERSION__ ";cuda=" GMETA_CUDA "@end@";
