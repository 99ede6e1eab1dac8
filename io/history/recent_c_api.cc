// Recent events and their snapshots behind a C ABI, for Python's ctypes: a ranker that reads and
// appends histories doesn't load TensorFlow. No exception and no C++ type crosses the ABI; the
// caller that created a handle frees it. ctypes releases Python's lock during each call, so all
// functions of a handle may run at once, except as recent_events.h states.

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include "io/history/event_log.h"
#include "io/history/opened_generation.h"
#include "io/history/recent_events.h"
#include "io/history/recent_snapshot.h"

#define GMETA_EXPORT extern "C" __attribute__((visibility("default")))

using gmeta::history::EventLog;
using gmeta::history::OpenedGeneration;
using gmeta::history::RecentEvents;
using gmeta::history::RecentPlan;
using gmeta::history::RecentReader;
using gmeta::history::RecentView;
using gmeta::history::ReplayLog;
using gmeta::history::SequenceRange;
using gmeta::history::SnapshotFault;

namespace {

constexpr int32_t kNoMemory = -1, kNotFinite = -3, kTooLate = -4;  // -2 is RecentEvents::kFull

// The recent events, and the readers that are idle.
struct Recent {
  Recent(size_t words, size_t memory) : events(words, memory) {}

  RecentReader* Take() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (idle.empty()) return new RecentReader;
    RecentReader* const reader = idle.back().release();
    idle.pop_back();
    return reader;
  }

  void Give(RecentReader* reader) {
    const std::lock_guard<std::mutex> lock(mutex);
    idle.emplace_back(reader);
  }

  // Checks events as an append to a store does: numbers are finite, times are before the end of all
  // histories, and a negative zero is a zero, in `changed` if there is any. Returns 0 or a fault.
  int32_t Check(const int64_t* rows, size_t count, std::vector<int64_t>* changed) const {
    const size_t width = events.width();
    for (size_t i = 0; i < count; ++i) {
      const int64_t* const row = rows + i * width;
      if (row[RecentEvents::kTime] == INT64_MAX) return kTooLate;
      for (size_t place : floats) {
        if ((row[place] & 0x7f800000) == 0x7f800000) return kNotFinite;
        if (row[place] != 0x80000000) continue;
        if (changed->empty()) changed->assign(rows, rows + count * width);
        (*changed)[i * width + place] = 0;
      }
    }
    return 0;
  }

  RecentEvents events;
  RecentPlan plan;
  std::vector<size_t> floats;  // the numbers of columns of float32 in a row
  std::mutex mutex;
  std::vector<std::unique_ptr<RecentReader>> idle;
};

}  // namespace

// Makes recent events of `words` words each, the time first; is_float has, for the user and each
// word, whether it is a float32. `described` has two numbers for each column to read: its number in
// the store's stripes of `group`, and its number in a row of the user and the words. The first
// `history` of them are the history, and number `time` is the time. Returns null if memory runs
// out.
GMETA_EXPORT Recent* gmeta_recent_new(int64_t words, const int64_t* is_float, int64_t memory,
                                      int64_t group, int64_t columns, const int64_t* described,
                                      int64_t history, int64_t time) {
  try {
    auto recent = std::make_unique<Recent>(static_cast<size_t>(words), static_cast<size_t>(memory));
    RecentPlan& plan = recent->plan;
    plan.group = group;
    plan.history = static_cast<size_t>(history);
    plan.time = static_cast<size_t>(time);
    for (int64_t i = 0; i < columns; ++i) {
      const int64_t* given = described + 2 * i;
      plan.columns.push_back(
          {static_cast<size_t>(given[0]), static_cast<size_t>(given[1]), is_float[given[1]] != 0});
    }
    for (int64_t i = 0; i <= words; ++i) {
      if (is_float[i] != 0) recent->floats.push_back(static_cast<size_t>(i));
    }
    return recent.release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

GMETA_EXPORT void gmeta_recent_free(Recent* recent) { delete recent; }

// Adds events: for each its user, its time, and its columns. Returns 0, kNoMemory, kFull,
// kNotFinite, kTooLate, or the errno of the log.
GMETA_EXPORT int32_t gmeta_recent_append(Recent* recent, int64_t count, const int64_t* rows) {
  try {
    const size_t width = recent->events.width();
    std::vector<int64_t> changed;
    const int32_t fault = recent->Check(rows, static_cast<size_t>(count), &changed);
    if (fault != 0) return fault;
    if (!changed.empty()) rows = changed.data();
    for (auto left = static_cast<size_t>(count); left > 0;) {
      const size_t part = left < EventLog::kMostEvents ? left : EventLog::kMostEvents;
      const int failure = recent->events.Append(rows, part);
      if (failure != 0) return failure;
      rows += part * width;
      left -= part;
    }
    return 0;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Ends the segment, and writes later events to a log, unless `path` is null. `range` receives the
// first sequence number of the ended segment, and the one after its last. Returns 0, kNoMemory, or
// the errno of a log: if *is_sealed is 0 then, the new log can't be opened and nothing has changed.
GMETA_EXPORT int32_t gmeta_recent_seal(Recent* recent, const char* path, int32_t syncs,
                                       int64_t* range, int32_t* is_sealed) {
  *is_sealed = 0;
  try {
    std::shared_ptr<EventLog> log;
    if (path != nullptr) {
      log = std::make_shared<EventLog>(path, recent->events.width());
      if (log->error() != 0) return log->error();
    }
    int failure = 0;
    const SequenceRange ended = recent->events.Seal(std::move(log), syncs != 0, &failure);
    range[0] = ended.begin;
    range[1] = ended.end;
    *is_sealed = 1;
    return failure;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Flushes the log. Returns 0, or the errno of a failure.
GMETA_EXPORT int32_t gmeta_recent_sync(Recent* recent) { return recent->events.Sync(); }

// Adds the events of a log from `offset` on, and outputs where its sound records end. Returns 0,
// kNoMemory, kFull, or the errno of a file that can't be opened.
GMETA_EXPORT int32_t gmeta_recent_replay(Recent* recent, const char* path, int64_t offset,
                                         int64_t* end) {
  try {
    int32_t failure = 0;
    *end = ReplayLog(path, offset, recent->events.width(), [&](const int64_t* rows, size_t count) {
      if (failure == 0) failure = recent->events.Append(rows, count);
    });
    return *end < 0 ? errno : failure;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Copies the events of a sealed segment into `out` (RecentEvents::Export). Returns how many there
// are, or kNoMemory.
GMETA_EXPORT int64_t gmeta_recent_export(const Recent* recent, int64_t begin, int64_t end,
                                         int64_t* out) {
  try {
    return static_cast<int64_t>(recent->events.Export({begin, end}, out));
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Returns the number of events, or the bytes that they take in memory.
GMETA_EXPORT int64_t gmeta_recent_events(const Recent* recent) { return recent->events.events(); }
GMETA_EXPORT int64_t gmeta_recent_bytes(const Recent* recent) { return recent->events.bytes(); }

// Makes a generation without shards; gmeta_recent_switch frees it.
GMETA_EXPORT OpenedGeneration* gmeta_recent_generation_new(int64_t generation) {
  return new (std::nothrow) OpenedGeneration(generation);
}

GMETA_EXPORT void gmeta_recent_generation_free(OpenedGeneration* opened) { delete opened; }

// Adds a shard by its index. Returns an IndexFault, or kNoMemory.
GMETA_EXPORT int32_t gmeta_recent_generation_shard(OpenedGeneration* opened, const char* bytes,
                                                   int64_t size) {
  try {
    return static_cast<int32_t>(
        opened->AddShard(std::string_view(bytes, static_cast<size_t>(size))));
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Names a file of the last shard.
GMETA_EXPORT int32_t gmeta_recent_generation_file(OpenedGeneration* opened, int64_t number,
                                                  const char* path) {
  try {
    opened->AddFile(number, path);
    return 0;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Makes snapshots read this generation, and removes the events of the given segments, which it
// contains: two sequence numbers for each, ascending. Takes the generation, also without memory.
GMETA_EXPORT int32_t gmeta_recent_switch(Recent* recent, OpenedGeneration* opened, int64_t segments,
                                         const int64_t* ranges) {
  std::unique_ptr<OpenedGeneration> own(opened);
  try {
    RecentView view;
    view.opened = std::move(own);
    for (int64_t i = 0; i < segments; ++i) {
      view.contained.push_back({ranges[2 * i], ranges[2 * i + 1]});
    }
    recent->events.Switch(view);
    return 0;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Takes snapshots of users, each of the newest `longest` events with starts[i] <= time < untils[i];
// `moments` has the users, the starts and the untils, one after another. Outputs the number of
// events of the histories and of the tails, and the address of a reader that has them, which
// gmeta_recent_take takes back. Returns 0, kNoMemory, or a StripeFault; then out[0] is the
// request's number, out[1] the generation, out[3] and the following the stripe that has the fault,
// and there is no reader.
GMETA_EXPORT int32_t gmeta_recent_snapshot(Recent* recent, int64_t count, const int64_t* moments,
                                           int64_t longest, int64_t* out) {
  RecentReader* reader = nullptr;
  try {
    reader = recent->Take();
    reader->Clear();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t* const given = moments + i;
      const SnapshotFault fault = reader->Read(recent->events, recent->plan, given[0], given[count],
                                               given[2 * count], static_cast<size_t>(longest));
      if (fault.ok()) continue;
      out[0] = i;
      out[1] = reader->generation();
      std::memcpy(out + 3, &fault.place, sizeof(fault.place));
      recent->Give(reader);
      return static_cast<int32_t>(fault.fault);
    }
    out[0] = static_cast<int64_t>(reader->events());
    out[1] = static_cast<int64_t>(reader->tail_events());
    out[2] = static_cast<int64_t>(reinterpret_cast<intptr_t>(reader));
    return 0;
  } catch (const std::exception&) {
    delete reader;
    return kNoMemory;
  }
}

// Copies what a reader has into `out` (RecentReader::CopyTo), and takes the reader back.
GMETA_EXPORT void gmeta_recent_take(Recent* recent, RecentReader* reader, int64_t* out) {
  reader->CopyTo(recent->plan, out);
  try {
    recent->Give(reader);
  } catch (const std::exception&) {
    delete reader;
  }
}
