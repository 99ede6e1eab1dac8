// BlockFile: scratch data on a drive, written and read in aligned blocks.
//
// The file has no name from the start: it is unlinked as soon as it is open, so a process that is
// killed leaves nothing behind. If the file system supports it, it bypasses the page cache
// (O_DIRECT): what a table keeps in memory is its own choice, and a second copy in the cache would
// take memory from it. Reads of a batch are in flight together (io_ring.h).
//
// Offsets, sizes and memory must be multiples of kBlock.

#ifndef GMETA_OPS_TABLE_DISK_BLOCK_FILE_H_
#define GMETA_OPS_TABLE_DISK_BLOCK_FILE_H_

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/table/disk/io_ring.h"

namespace gmeta::disk {

// What a drive refused, with the file, the offset and what to do.
class DiskError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr size_t kBlock = 4096;

inline uint64_t BlocksDown(uint64_t offset) { return offset / kBlock * kBlock; }
inline uint64_t BlocksUp(uint64_t offset) { return BlocksDown(offset + kBlock - 1); }

// Memory that a BlockFile can read and write.
class BlockMemory {
 public:
  BlockMemory() = default;
  explicit BlockMemory(size_t bytes)
      : data_(static_cast<char*>(std::aligned_alloc(kBlock, BlocksUp(bytes)))), bytes_(bytes) {
    if (data_ == nullptr) throw std::bad_alloc();
  }

  char* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  // Makes the memory at least this large. Its content may be lost.
  void Reserve(size_t bytes) {
    if (bytes > bytes_) *this = BlockMemory(bytes);
  }

 private:
  struct Release {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Release> data_;
  size_t bytes_ = 0;
};

class BlockFile {
 public:
  // Makes a file in a folder.
  explicit BlockFile(const std::string& folder) {
    static std::atomic<uint64_t> number{0};
    path_ = folder + "/gmeta-rows-" + std::to_string(getpid()) + "-" + std::to_string(number++);
    constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    fd_ = open(path_.c_str(), kFlags | O_DIRECT, 0600);
    if (fd_ < 0 && errno == EINVAL) {  // such as tmpfs; the file was made nevertheless
      unlink(path_.c_str());
      fd_ = open(path_.c_str(), kFlags, 0600);
      if (fd_ >= 0) posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
    }
    if (fd_ < 0) {
      throw DiskError(path_ + " can't be made: " + std::strerror(errno) +
                      ": name a folder that can be written to (Tiers.ssd)");
    }
    unlink(path_.c_str());
  }
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;
  ~BlockFile() { close(fd_); }

  // Writes whole blocks. If it throws, the old content may be overwritten in part.
  void Write(uint64_t offset, const char* data, size_t bytes) {
    while (bytes > 0) {
      const ssize_t written = pwrite(fd_, data, bytes, static_cast<off_t>(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        throw DiskError(Told("write", offset, written == 0 ? ENOSPC : errno) +
                        "; the rows are still in memory, and earlier checkpoints are whole");
      }
      offset += static_cast<uint64_t>(written);
      data += written;
      bytes -= static_cast<size_t>(written);
    }
  }

  void Read(const std::vector<ReadPiece>& pieces) const {
    if (pieces.empty()) return;
    IoRing* const ring = pieces.size() > 1 ? IoRing::OfThread() : nullptr;
    const ReadOutcome outcome = ring != nullptr ? ring->Read(fd_, pieces) : ReadEach(pieces);
    if (outcome.error != 0) throw DiskError(Told("read", outcome.offset, outcome.error));
  }

  const std::string& path() const { return path_; }

  // An error of the file's content.
  [[noreturn]] void Damaged(uint64_t offset) const {
    throw DiskError(path_ + " (unlinked) at byte " + std::to_string(offset) +
                    ": the row isn't what was written there: the drive or its memory is damaged; "
                    "resume from the last checkpoint, with Tiers.ssd on another drive");
  }

 private:
  ReadOutcome ReadEach(const std::vector<ReadPiece>& pieces) const {
    for (ReadPiece piece : pieces) {
      while (piece.bytes > 0) {
        const ssize_t got = pread(fd_, piece.to, piece.bytes, static_cast<off_t>(piece.offset));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return {got == 0 ? EIO : errno, piece.offset};
        piece.offset += static_cast<uint64_t>(got);
        piece.to += got;
        piece.bytes -= static_cast<size_t>(got);
      }
    }
    return {};
  }

  std::string Told(const char* what, uint64_t offset, int error) const {
    return std::string("can't ") + what + " " + path_ + " (unlinked) at byte " +
           std::to_string(offset) + ": " + std::strerror(error) +
           (error == ENOSPC || error == EDQUOT
                ? ": free space there, or name a folder on a larger drive (Tiers.ssd)"
                : ": name a folder on another drive (Tiers.ssd), and resume from the last "
                  "checkpoint");
  }

  std::string path_;
  int fd_ = -1;
};

}  // namespace gmeta::disk

#endif  // GMETA_OPS_TABLE_DISK_BLOCK_FILE_H_
