// The reader's counters behind a C ABI, for Python's ctypes. Callbacks and finalizers read them,
// where running a TensorFlow op is neither needed nor safe.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "io/group_batch/reader_stats.h"

#define GMETA_EXPORT extern "C" __attribute__((visibility("default")))

using gmeta::group_batch::ReaderCounts;
using gmeta::group_batch::ReaderStats;
using gmeta::group_batch::StatsRegistry;

GMETA_EXPORT int64_t gmeta_reader_stats_new() { return StatsRegistry::Global().Create(); }

GMETA_EXPORT void gmeta_reader_stats_free(int64_t id) { StatsRegistry::Global().Remove(id); }

GMETA_EXPORT void gmeta_reader_stats_reset(int64_t id) {
  if (std::shared_ptr<ReaderStats> stats = StatsRegistry::Global().Find(id)) stats->Reset();
}

// Returns the name of fault `index`, counted from 1; null beyond the last one.
GMETA_EXPORT const char* gmeta_reader_stats_fault(int64_t index) {
  if (index < 1 || index >= static_cast<int64_t>(gmeta::records::kFaults)) return nullptr;
  return gmeta::records::kFaultNames[static_cast<size_t>(index)];
}

// Writes records, groups, skipped, histories, and the histories' reads and bytes, then the count of
// each fault from 1 on, to `counts`. Writes the messages, each ended by a newline, to the `size`
// bytes at `text`, as far as they fit. Returns the number of bytes that all messages take.
GMETA_EXPORT int64_t gmeta_reader_stats_read(int64_t id, int64_t* counts, char* text,
                                             int64_t size) {
  ReaderCounts read;
  std::vector<std::string> messages;
  if (std::shared_ptr<ReaderStats> stats = StatsRegistry::Global().Find(id)) {
    stats->Read(&read, &messages);
  }
  *counts++ = read.records;
  *counts++ = read.groups;
  *counts++ = read.skipped;
  *counts++ = read.histories;
  *counts++ = read.history_reads;
  *counts++ = read.history_bytes;
  std::copy(read.bad.begin() + 1, read.bad.end(), counts);
  std::string joined;
  for (const std::string& message : messages) joined += message + '\n';
  std::memcpy(text, joined.data(), std::min(joined.size(), static_cast<size_t>(size)));
  return static_cast<int64_t>(joined.size());
}
