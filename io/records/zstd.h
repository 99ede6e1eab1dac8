// zstd, if the machine has it.
//
// gmeta's libraries are built on machines with only a compiler, so they don't link to zstd. Its
// shared library, which every Debian has because dpkg needs it, is opened when the first record
// needs it. The four functions used here have been in it, with these signatures, since 1.0.

#ifndef GMETA_IO_RECORDS_ZSTD_H_
#define GMETA_IO_RECORDS_ZSTD_H_

#include <dlfcn.h>

#include <cstddef>

namespace gmeta::records {

class Zstd {
 public:
  static constexpr int kLevel = 3;

  // Returns null if there is no libzstd.so.1.
  static const Zstd* Get() {
    static const Zstd zstd;
    return zstd.is_error_ != nullptr ? &zstd : nullptr;
  }

  // Returns the most bytes that `size` bytes can take when compressed.
  size_t Bound(size_t size) const { return bound_(size); }

  // Returns the number of bytes of the frame; 0 if `capacity` is below Bound().
  size_t Compress(char* out, size_t capacity, const char* data, size_t size) const {
    const size_t made = compress_(out, capacity, data, size, kLevel);
    return is_error_(made) ? 0 : made;
  }

  // Returns whether the frame is sound and holds exactly `size` bytes, which are then at `out`.
  bool Decompress(char* out, size_t size, const char* frame, size_t frame_size) const {
    const size_t made = decompress_(out, size, frame, frame_size);
    return !is_error_(made) && made == size;
  }

 private:
  // TensorFlow contains another version of zstd, and its symbols are visible to all libraries.
  // Without this flag the library's calls of its own functions would resolve to it, with structures
  // of another layout.
#if defined(RTLD_DEEPBIND) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  static constexpr int kOwnSymbols = RTLD_DEEPBIND;
#else
  static constexpr int kOwnSymbols = 0;  // the sanitizers' own functions must be found first
#endif

  Zstd() {
    void* library = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL | kOwnSymbols);
    if (library == nullptr) return;
    const bool all = Find(library, "ZSTD_compressBound", &bound_) &&
                     Find(library, "ZSTD_compress", &compress_) &&
                     Find(library, "ZSTD_decompress", &decompress_) &&
                     Find(library, "ZSTD_isError", &is_error_);
    if (!all) is_error_ = nullptr;
  }

  template <class Function>
  static bool Find(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
    return *function != nullptr;
  }

  size_t (*bound_)(size_t) = nullptr;
  size_t (*compress_)(void*, size_t, const void*, size_t, int) = nullptr;
  size_t (*decompress_)(void*, size_t, const void*, size_t) = nullptr;
  unsigned (*is_error_)(size_t) = nullptr;
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_ZSTD_H_
