// Stripes from files of this machine.

#ifndef GMETA_IO_HISTORY_FILE_SOURCE_H_
#define GMETA_IO_HISTORY_FILE_SOURCE_H_

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/history/snapshot.h"

namespace gmeta::history {

// Reads bytes of an open file; less if the file ends there, or can't be read. They stay valid until
// the buffer is used again.
inline std::string_view ReadFile(int descriptor, int64_t offset, size_t bytes,
                                 std::vector<char>* buffer) {
  constexpr size_t kPiece = size_t{1} << 24;
  if (descriptor < 0) return {};
  // An index may claim any size: memory grows with what the file has.
  size_t have = 0;
  while (have < bytes) {
    const size_t want = std::min(bytes - have, kPiece);
    if (buffer->size() < have + want) buffer->resize(have + want);
    const ssize_t got = pread(descriptor, buffer->data() + have, want,
                              static_cast<off_t>(offset) + static_cast<off_t>(have));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    have += static_cast<size_t>(got);
  }
  return {buffer->data(), have};
}

// Reads each file that a stripe names through a descriptor that is opened once.
class FileSource : public StripeSource {
 public:
  void Add(int64_t file, std::string path) { files_[file].path = std::move(path); }

  ~FileSource() override {
    for (auto& [number, file] : files_) {
      if (file.descriptor >= 0) close(file.descriptor);
    }
  }

  std::string_view Read(int64_t number, int64_t offset, size_t bytes) override {
    const auto found = files_.find(number);
    if (found == files_.end()) return {};
    File& file = found->second;
    if (file.descriptor < 0) file.descriptor = open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    return ReadFile(file.descriptor, offset, bytes, &buffer_);
  }

 private:
  struct File {
    std::string path;
    int descriptor = -1;
  };

  std::map<int64_t, File> files_;
  std::vector<char> buffer_;
};

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_FILE_SOURCE_H_
