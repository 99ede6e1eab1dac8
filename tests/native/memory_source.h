// A file in memory, for tests of what reads files.

#ifndef GMETA_TESTS_NATIVE_MEMORY_SOURCE_H_
#define GMETA_TESTS_NATIVE_MEMORY_SOURCE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "io/records/tfrecord.h"

namespace gmeta::records {

class MemorySource : public ByteSource {
 public:
  explicit MemorySource(std::string bytes) : bytes_(std::move(bytes)), size_(bytes_.size()) {}

  // Claims to be of another size than it is, as a file that shrinks or grows does.
  MemorySource(std::string bytes, uint64_t size) : bytes_(std::move(bytes)), size_(size) {}

  void FailAt(uint64_t offset) { fail_at_ = offset; }

  uint64_t size() const override { return size_; }

  size_t Read(uint64_t offset, size_t count, char* out, std::string* error) override {
    if (offset + count > fail_at_) {
      *error = "the cable is out";
      return 0;
    }
    if (offset >= bytes_.size()) return 0;
    const size_t got = std::min(count, bytes_.size() - static_cast<size_t>(offset));
    std::memcpy(out, bytes_.data() + offset, got);
    return got;
  }

 private:
  const std::string bytes_;
  const uint64_t size_;
  uint64_t fail_at_ = UINT64_MAX;
};

}  // namespace gmeta::records

#endif  // GMETA_TESTS_NATIVE_MEMORY_SOURCE_H_
