// Shards of stores that this process has open, through TensorFlow's file systems.
//
// A shard's index is loaded whole and compared with its digest in the manifest: an index of another
// generation is sound by itself, and would give other histories. Its files are opened when a stripe
// in them is wanted; a stripe is compared with its place (snapshot.h). Files of a generation never
// change, so what is open is shared by all ops of the process. The indexes stay in memory up to a
// limit; the least recently used one is dropped first.

#ifndef GMETA_IO_HISTORY_KERNELS_SHARDS_H_
#define GMETA_IO_HISTORY_KERNELS_SHARDS_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "io/history/shard_index.h"
#include "io/history/snapshot.h"
#include "ops/common/kernels_versions.h"
#include "ops/common/sha256.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/errors.h"

namespace gmeta::history {

namespace tf = tensorflow;

// The generation that an op reads, as its attributes describe it.
struct Opened {
  std::string store, digest;
  int64_t generation = 0;
  std::vector<std::string> indexes;  // by shard the SHA-256 of its index

  absl::Status Read(tf::OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("store", &store));
    TF_RETURN_IF_ERROR(context->GetAttr("digest", &digest));
    TF_RETURN_IF_ERROR(context->GetAttr("opened", &generation));
    return context->GetAttr("indexes", &indexes);
  }

  int64_t shards() const { return static_cast<int64_t>(indexes.size()); }
};

// A shard of a generation. Its paths are those of gmeta/core/history_manifest.py.
class OpenShard {
 public:
  OpenShard(std::string store, int64_t generation, int64_t shard)
      : store_(std::move(store)), generation_(generation), shard_(shard) {}

  // Loads the index, whose SHA-256 must be this one.
  absl::Status Load(const std::string& sha256) {
    std::string bytes;
    TF_RETURN_IF_ERROR(tf::ReadFileToString(tf::Env::Default(), IndexPath(), &bytes));
    if (HexSha256(bytes) != sha256) return Damaged("its SHA-256 isn't the one in the manifest");
    const IndexFault fault = index_.Decode(bytes);
    return fault == IndexFault::kNone ? absl::OkStatus() : Damaged(Describe(fault));
  }

  const ShardIndex& index() const { return index_; }
  size_t bytes() const {
    return index_.stripes() * sizeof(StripePlace) + index_.users() * 3 * sizeof(int64_t);
  }
  std::string IndexPath() const { return Path(generation_, "index"); }
  std::string EventsPath(int64_t generation) const { return Path(generation, "events"); }

  struct File {
    std::unique_ptr<tf::RandomAccessFile> content;
    uint64_t size = 0;
  };

  // Returns a file of stripes, which is opened once.
  absl::Status Open(int64_t generation, const File** file) {
    const std::lock_guard<std::mutex> lock(mutex_);
    File& own = files_[generation];
    if (own.content == nullptr) {
      const std::string path = EventsPath(generation);
      TF_RETURN_IF_ERROR(tf::Env::Default()->GetFileSize(path, &own.size));
      TF_RETURN_IF_ERROR(tf::Env::Default()->NewRandomAccessFile(path, &own.content));
    }
    *file = &own;
    return absl::OkStatus();
  }

 private:
  absl::Status Damaged(const char* how) const {
    return absl::DataLossError(absl::StrCat("gmeta: ", IndexPath(), ": ", how,
                                            "; restore the file, or take another generation"));
  }

  std::string Path(int64_t generation, const char* kind) const {
    return absl::StrFormat("%s/generations/%08d/shard-%05d.%s", store_, generation, shard_, kind);
  }

  const std::string store_;
  const int64_t generation_, shard_;
  ShardIndex index_;
  std::mutex mutex_;
  std::map<int64_t, File> files_;
};

// Reads the stripes of one shard; each thread has its own.
class ShardSource : public StripeSource {
 public:
  explicit ShardSource(OpenShard* shard) : shard_(shard) {}

  std::string_view Read(int64_t generation, int64_t offset, size_t bytes) override {
    const OpenShard::File* file = nullptr;
    status_ = shard_->Open(generation, &file);
    if (!status_.ok()) return {};
    // An index may claim any size; no memory is taken for more than the file has.
    const auto begin = static_cast<uint64_t>(offset);
    if (begin > file->size || bytes > file->size - begin) return {};
    buffer_.resize(bytes);
    absl::string_view found;
    status_ = ReadAt(*file->content, begin, bytes, buffer_.data(), &found);
    if (absl::IsOutOfRange(status_)) status_ = absl::OkStatus();  // it ended early
    return status_.ok() ? std::string_view(found.data(), found.size()) : std::string_view();
  }

  // The status of the last read; OK if the file merely ended early.
  const absl::Status& status() const { return status_; }

 private:
  OpenShard* const shard_;
  absl::Status status_;
  std::string buffer_;
};

class OpenShards {
 public:
  static constexpr size_t kMaxBytes = size_t{2} << 30;

  static OpenShards* Of() {
    static OpenShards* const shards = new OpenShards;
    return shards;
  }

  // Returns a shard of the opened generation. Another store may be made in the same folder, so the
  // manifest's digest distinguishes them.
  absl::Status Get(const Opened& opened, int64_t shard, std::shared_ptr<OpenShard>* found) {
    auto made = std::make_shared<OpenShard>(opened.store, opened.generation, shard);
    const std::string path = absl::StrCat(opened.digest, " ", made->IndexPath());
    std::shared_ptr<Entry> entry;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto known = entries_.find(path);
      if (known != entries_.end()) {
        order_.splice(order_.begin(), order_, known->second->place);
        entry = known->second;
      } else {
        order_.push_front(path);
        entry = std::make_shared<Entry>();
        entry->place = order_.begin();
        entries_[path] = entry;
      }
    }
    // The first caller loads it; others wait for this shard only.
    const std::lock_guard<std::mutex> lock(entry->mutex);
    if (entry->shard == nullptr) {
      const absl::Status loaded = made->Load(opened.indexes[static_cast<size_t>(shard)]);
      if (!loaded.ok()) {
        Forget(path, entry);
        return loaded;
      }
      Keep(path, entry, std::move(made));
    }
    *found = entry->shard;
    return absl::OkStatus();
  }

 private:
  struct Entry {
    std::mutex mutex;                  // held while it is loaded
    std::shared_ptr<OpenShard> shard;  // written with both mutexes held
    std::list<std::string>::iterator place;
  };

  void Forget(const std::string& path, const std::shared_ptr<Entry>& entry) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = entries_.find(path);
    if (known == entries_.end() || known->second != entry) return;
    order_.erase(entry->place);
    entries_.erase(known);
  }

  // Adds a loaded index, and drops old ones; their readers keep them alive.
  void Keep(const std::string& path, const std::shared_ptr<Entry>& entry,
            std::shared_ptr<OpenShard> shard) {
    const std::lock_guard<std::mutex> lock(mutex_);
    entry->shard = std::move(shard);
    const auto known = entries_.find(path);
    if (known == entries_.end() || known->second != entry) return;
    bytes_ += entry->shard->bytes();
    while (bytes_ > kMaxBytes && order_.size() > 1) {
      const auto oldest = entries_.find(order_.back());
      if (oldest->second->shard == nullptr) break;  // it is being loaded
      bytes_ -= oldest->second->shard->bytes();
      entries_.erase(oldest);
      order_.pop_back();
    }
  }

  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
  std::list<std::string> order_;  // the last used first
  size_t bytes_ = 0;
};

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_KERNELS_SHARDS_H_
