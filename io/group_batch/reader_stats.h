// The counters of a reader, and the registry in which Python finds them.
//
// Counters are kept in a registry of the process and addressed by a number, not by a TensorFlow
// resource: tf.data serialises a dataset's graph and rebuilds it whenever it rewrites it. A
// number survives that, while a handle may not. Several iterators may count into one ReaderStats.

#ifndef GMETA_IO_GROUP_BATCH_READER_STATS_H_
#define GMETA_IO_GROUP_BATCH_READER_STATS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/records/fault.h"

namespace gmeta::group_batch {

struct ReaderCounts {
  int64_t records = 0;    // rows of the groups counted below
  int64_t groups = 0;     // sound groups
  int64_t skipped = 0;    // records left out; those after a kTruncated or kLengthCrc are unknown
  int64_t histories = 0;  // rebuilt, damaged ones too
  int64_t history_reads = 0;                    // from their files
  int64_t history_bytes = 0;                    // that these reads brought
  std::array<int64_t, records::kFaults> bad{};  // occurrences of each fault
};

class ReaderStats {
 public:
  static constexpr size_t kMessages = 100;  // kept for the first faults only

  void AddGroup(int64_t rows) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_.records += rows;
    ++counts_.groups;
  }

  void AddFault(records::Fault fault, int64_t skipped, const std::string& message) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counts_.bad[static_cast<size_t>(fault)];
    counts_.skipped += skipped;
    if (messages_.size() < kMessages) messages_.push_back(message);
  }

  // Counts a group's rows, which AddGroup has counted, as left out.
  void LeaveOut(records::Fault fault, int64_t rows, const std::string& message) {
    AddFault(fault, rows, message);
    std::lock_guard<std::mutex> lock(mutex_);
    counts_.records -= rows;
  }

  void AddHistories(int64_t histories, int64_t reads, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_.histories += histories;
    counts_.history_reads += reads;
    counts_.history_bytes += bytes;
  }

  void Read(ReaderCounts* counts, std::vector<std::string>* messages) const {
    std::lock_guard<std::mutex> lock(mutex_);
    *counts = counts_;
    *messages = messages_;
  }

  void Reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_ = ReaderCounts();
    messages_.clear();
  }

 private:
  mutable std::mutex mutex_;
  ReaderCounts counts_;
  std::vector<std::string> messages_;
};

// A map from numbers to counters. Zero is never assigned: it stands for "don't count".
class StatsRegistry {
 public:
  static StatsRegistry& Global() {
    static auto* registry = new StatsRegistry;  // outlives the threads that read
    return *registry;
  }

  int64_t Create() {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.emplace(++last_, std::make_shared<ReaderStats>());
    return last_;
  }

  // Returns the counters of a number; null if the number isn't in use.
  std::shared_ptr<ReaderStats> Find(int64_t id) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = stats_.find(id);
    return found == stats_.end() ? nullptr : found->second;
  }

  // Removes a number. Readers that still count into its ReaderStats keep it alive until they are
  // done.
  void Remove(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.erase(id);
  }

 private:
  mutable std::mutex mutex_;
  int64_t last_ = 0;
  std::unordered_map<int64_t, std::shared_ptr<ReaderStats>> stats_;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_READER_STATS_H_
