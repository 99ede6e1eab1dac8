// A file of this machine as a source of bytes.

#ifndef GMETA_IO_RECORDS_FILE_BYTES_H_
#define GMETA_IO_RECORDS_FILE_BYTES_H_

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "io/records/tfrecord.h"

namespace gmeta::records {

class FileBytes : public ByteSource {
 public:
  // Returns null, and sets `error` to the reason, if the file can't be opened.
  static std::unique_ptr<ByteSource> Open(const std::string& path, std::string* error) {
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (descriptor < 0 || fstat(descriptor, &about) != 0) {
      *error = std::strerror(errno);
      if (descriptor >= 0) close(descriptor);
      return nullptr;
    }
    return std::unique_ptr<ByteSource>(
        new FileBytes(descriptor, static_cast<uint64_t>(about.st_size)));
  }

  ~FileBytes() override { close(descriptor_); }
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  uint64_t size() const override { return size_; }

  size_t Read(uint64_t offset, size_t count, char* out, std::string* error) override {
    size_t have = 0;
    while (have < count) {
      const ssize_t got =
          pread(descriptor_, out + have, count - have, static_cast<off_t>(offset + have));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) *error = std::strerror(errno);
      if (got <= 0) break;
      have += static_cast<size_t>(got);
    }
    return have;
  }

 private:
  FileBytes(int descriptor, uint64_t size) : descriptor_(descriptor), size_(size) {}

  const int descriptor_;
  const uint64_t size_;
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_FILE_BYTES_H_
