// Makes Python's file systems (gmeta/io/readers/remote.py) available to TensorFlow: the readers and
// tf.io.gfile then read their files like any others. They are read-only.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/file_system.h"

#define GMETA_EXPORT extern "C" __attribute__((visibility("default")))

namespace gmeta::lent_files {

namespace tf = tensorflow;

constexpr size_t kErrorBytes = 512;

// What Python returns. A negative number is one of these, and the error's text is in `error`,
// which has room for kErrorBytes.
enum Failure : int64_t { kNotFound = -1, kFailed = -2 };

// Returns the bytes that were read: fewer than `count` at the end of the file.
using ReadCall = int64_t (*)(const char* path, int64_t offset, int64_t count, char* out,
                             char* error);
// Returns the file's size, and kFolder for a folder.
using StatCall = int64_t (*)(const char* path, char* error);
constexpr int64_t kFolder = -3;

// Python may be called until it is about to exit: a read after that would wait for it forever.
std::shared_mutex in_use;
std::atomic<bool> over = false;

absl::Status ToStatus(int64_t failure, const std::string& path, const char* error) {
  const std::string text = absl::StrCat(path, "; ", error);
  return failure == kNotFound ? absl::NotFoundError(text) : absl::UnavailableError(text);
}

template <class Call>
absl::Status CallPython(const std::string& path, const Call& call, int64_t* answer) {
  std::shared_lock<std::shared_mutex> lock(in_use);
  if (over) return absl::CancelledError(absl::StrCat(path, "; Python is about to exit"));
  char error[kErrorBytes] = "";
  *answer = call(error);
  return *answer == kNotFound || *answer == kFailed ? ToStatus(*answer, path, error)
                                                    : absl::OkStatus();
}

class LentFile : public tf::RandomAccessFile {
 public:
  LentFile(std::string path, ReadCall read) : path_(std::move(path)), read_(read) {}

  absl::Status Name(absl::string_view* result) const override {
    *result = path_;
    return absl::OkStatus();
  }

  // Newer TensorFlow versions call it by another signature, which forwards to this one. The
  // declared types are those of the oldest.
  absl::Status Read(uint64_t offset, size_t count, absl::string_view* result,
                    char* out) const override {
    *result = absl::string_view();
    size_t done = 0;
    while (done < count) {
      int64_t got = 0;
      const absl::Status status = CallPython(
          path_,
          [&](char* error) {
            return read_(path_.c_str(), static_cast<int64_t>(offset + done),
                         static_cast<int64_t>(count - done), out + done, error);
          },
          &got);
      if (!status.ok()) return status;
      if (got == 0) break;
      done += static_cast<size_t>(got);
    }
    *result = absl::string_view(out, done);
    return done == count ? absl::OkStatus() : absl::OutOfRangeError(absl::StrCat(path_, "; ends"));
  }

 private:
  const std::string path_;
  const ReadCall read_;
};

class LentFileSystem : public tf::FileSystem {
 public:
  LentFileSystem(ReadCall read, StatCall stat) : read_(read), stat_(stat) {}

  TF_USE_FILESYSTEM_METHODS_WITH_NO_TRANSACTION_SUPPORT;

  absl::Status NewRandomAccessFile(const std::string& path, tf::TransactionToken*,
                                   std::unique_ptr<tf::RandomAccessFile>* result) override {
    *result = std::make_unique<LentFile>(path, read_);
    return absl::OkStatus();
  }

  absl::Status FileExists(const std::string& path, tf::TransactionToken*) override {
    int64_t size = 0;
    return Size(path, &size);
  }

  absl::Status Stat(const std::string& path, tf::TransactionToken*,
                    tf::FileStatistics* result) override {
    int64_t size = 0;
    const absl::Status status = Size(path, &size);
    if (!status.ok()) return status;
    *result = tf::FileStatistics(size == kFolder ? 0 : size, 0, size == kFolder);
    return absl::OkStatus();
  }

  absl::Status GetFileSize(const std::string& path, tf::TransactionToken*,
                           uint64_t* result) override {
    int64_t size = 0;
    const absl::Status status = Size(path, &size);
    if (!status.ok()) return status;
    if (size == kFolder) return absl::FailedPreconditionError(absl::StrCat(path, "; is a folder"));
    *result = static_cast<uint64_t>(size);
    return absl::OkStatus();
  }

  absl::Status NewReadOnlyMemoryRegionFromFile(
      const std::string& path, tf::TransactionToken*,
      std::unique_ptr<tf::ReadOnlyMemoryRegion>*) override {
    return Unable(path);
  }
  absl::Status GetChildren(const std::string& path, tf::TransactionToken*,
                           std::vector<std::string>*) override {
    return Unable(path);
  }
  absl::Status GetMatchingPaths(const std::string& path, tf::TransactionToken*,
                                std::vector<std::string>*) override {
    return Unable(path);
  }
  absl::Status NewWritableFile(const std::string& path, tf::TransactionToken*,
                               std::unique_ptr<tf::WritableFile>*) override {
    return Unable(path);
  }
  absl::Status NewAppendableFile(const std::string& path, tf::TransactionToken*,
                                 std::unique_ptr<tf::WritableFile>*) override {
    return Unable(path);
  }
  absl::Status DeleteFile(const std::string& path, tf::TransactionToken*) override {
    return Unable(path);
  }
  absl::Status CreateDir(const std::string& path, tf::TransactionToken*) override {
    return Unable(path);
  }
  absl::Status DeleteDir(const std::string& path, tf::TransactionToken*) override {
    return Unable(path);
  }
  absl::Status RenameFile(const std::string& path, const std::string&,
                          tf::TransactionToken*) override {
    return Unable(path);
  }

 private:
  absl::Status Size(const std::string& path, int64_t* size) const {
    return CallPython(path, [&](char* error) { return stat_(path.c_str(), error); }, size);
  }

  static absl::Status Unable(const std::string& path) {
    return absl::UnimplementedError(
        absl::StrCat(path, "; Python lends its files to be read by their names, and for no more"));
  }

  const ReadCall read_;
  const StatCall stat_;
};

}  // namespace gmeta::lent_files

// Registers a file system for a scheme. Returns false if there is one already.
GMETA_EXPORT bool gmeta_lent_files_register(const char* scheme, gmeta::lent_files::ReadCall read,
                                            gmeta::lent_files::StatCall stat) {
  return tensorflow::Env::Default()
      ->RegisterFileSystem(scheme, std::make_unique<gmeta::lent_files::LentFileSystem>(read, stat))
      .ok();
}

// Ends all calls of Python, once those in progress have returned.
GMETA_EXPORT void gmeta_lent_files_close() {
  gmeta::lent_files::over = true;  // first, since calls that overlap would keep the lock
  std::unique_lock<std::shared_mutex> lock(gmeta::lent_files::in_use);
}
