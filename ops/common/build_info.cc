// The versions that this library was compiled against, as a string that can be read without loading
// the library. A library built for another TensorFlow may fail to load, and a mangled symbol is
// then the only explanation. gmeta/core/native.py looks for the marker in the file's bytes.

#include "tensorflow/core/public/version.h"

// TF_VERSION_STRING is in parentheses, so it can't be joined with other strings. Hence the parts.
#define GMETA_TENSORFLOW TF_STR(TF_MAJOR_VERSION) "." TF_STR(TF_MINOR_VERSION) "." GMETA_PATCH
#define GMETA_PATCH TF_STR(TF_PATCH_VERSION) TF_VERSION_SUFFIX
#define GMETA_ABI TF_STR(_GLIBCXX_USE_CXX11_ABI)
#define GMETA_CUDA TF_STR(GMETA_HAVE_CUDA)

extern "C" __attribute__((visibility("default"), used)) const char gmeta_build_info[] =
    "@gmeta-build-info@tensorflow=" GMETA_TENSORFLOW ";cxx11_abi=" GMETA_ABI
    ";compiler=" __VERSION__ ";cuda=" GMETA_CUDA "@end@";
