// A generation of a store that many threads read at once.
//
// All indexes are in memory. A file of stripes is opened when a stripe in it is wanted, and its
// descriptor is shared: pread has no position to disturb. Nothing changes after the last AddFile,
// so readers take no lock; each has its own buffer (GenerationSource).

#ifndef GMETA_IO_HISTORY_OPENED_GENERATION_H_
#define GMETA_IO_HISTORY_OPENED_GENERATION_H_

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/history/file_source.h"
#include "io/history/shard_index.h"
#include "io/history/snapshot.h"
#include "io/history/user_shard.h"

namespace gmeta::history {

class OpenedGeneration {
 public:
  struct Shard {
    ShardIndex index;
    std::map<int64_t, std::string> paths;  // of files by their numbers
    std::map<int64_t, std::atomic<int>> descriptors;

    ~Shard() {
      for (auto& [number, descriptor] : descriptors) {
        if (descriptor >= 0) close(descriptor);
      }
    }

    // Returns the descriptor of a file, which is opened once; -1 if it can't be opened.
    int Open(int64_t file) const {
      const auto path = paths.find(file);
      if (path == paths.end()) return -1;
      std::atomic<int>& shared = const_cast<std::atomic<int>&>(descriptors.at(file));
      int known = shared.load(std::memory_order_acquire);
      if (known >= 0) return known;
      const int opened = open(path->second.c_str(), O_RDONLY | O_CLOEXEC);
      if (opened < 0 || shared.compare_exchange_strong(known, opened)) return opened;
      close(opened);  // another thread was first
      return known;
    }
  };

  explicit OpenedGeneration(int64_t generation) : generation_(generation) {}

  // Adds the next shard. Its index must be sound.
  IndexFault AddShard(std::string_view index) {
    shards_.push_back(std::make_unique<Shard>());
    return shards_.back()->index.Decode(index);
  }

  // Names a file of the last shard.
  void AddFile(int64_t number, std::string path) {
    shards_.back()->paths[number] = std::move(path);
    shards_.back()->descriptors[number] = -1;
  }

  int64_t generation() const { return generation_; }

  const Shard& Of(int64_t user) const {
    return *shards_[static_cast<size_t>(UserShard(user, static_cast<int64_t>(shards_.size())))];
  }

 private:
  const int64_t generation_;
  std::vector<std::unique_ptr<Shard>> shards_;
};

// Reads the stripes of one shard after another; each thread has its own.
class GenerationSource : public StripeSource {
 public:
  void Choose(const OpenedGeneration::Shard* shard) { shard_ = shard; }

  std::string_view Read(int64_t file, int64_t offset, size_t bytes) override {
    return ReadFile(shard_->Open(file), offset, bytes, &buffer_);
  }

 private:
  const OpenedGeneration::Shard* shard_ = nullptr;
  std::vector<char> buffer_;
};

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_OPENED_GENERATION_H_
