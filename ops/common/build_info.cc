// What this library was compiled against, as a string that can be read without loading it: a library
// built for another TensorFlow may fail to load with a mangled symbol for its only explanation.
// gmeta/core/native.py looks for the marker in the file's bytes.

#include "tensorflow/core/public/version.h"

#define GMETA_STRING_(x) #x
#define GMETA_STRING(x) GMETA_STRING_(x)

extern "C" __attribute__((visibility("default"), used)) const char gmeta_build_info[] =
    "@gmeta-build-info@tensorflow=" TF_VERSION_STRING
    ";cxx11_abi=" GMETA_STRING(_GLIBCXX_USE_CXX11_ABI) ";compiler=" __VERSION__
    ";cuda=" GMETA_STRING(GMETA_HAVE_CUDA) "@end@";
