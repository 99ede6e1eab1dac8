// The join of exposures and outcomes behind a C ABI, for Python's ctypes. Rows are numbers here:
// Python has their columns. No exception and no C++ type crosses the ABI; the caller that created a
// handle frees it.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>

#include "io/join/fingerprint_index.h"
#include "io/join/open_exposures.h"

#define GMETA_EXPORT extern "C" __attribute__((visibility("default")))

using gmeta::join::AddWord;
using gmeta::join::Counts;
using gmeta::join::Exposure;
using gmeta::join::kNone;
using gmeta::join::OpenExposures;
using gmeta::join::Output;
using gmeta::join::Rows;
using gmeta::join::Settings;
using gmeta::join::Status;
using gmeta::join::Waiting;

namespace {

struct Join {
  explicit Join(const Settings& settings) : exposures(settings) {}

  OpenExposures exposures;
  Output output;
};

constexpr int32_t kNoMemory = -1;

uint64_t AddText(uint64_t fingerprint, const char* text, size_t size) {
  fingerprint = AddWord(fingerprint, size);
  for (; size > 0;) {
    const size_t taken = size < sizeof(uint64_t) ? size : sizeof(uint64_t);
    uint64_t word = 0;
    std::memcpy(&word, text, taken);
    fingerprint = AddWord(fingerprint, word);
    text += taken;
    size -= taken;
  }
  return fingerprint;
}

template <class Offset>
void AddTexts(int64_t count, const Offset* offsets, const char* bytes, uint64_t* fingerprints) {
  for (int64_t i = 0; i < count; ++i) {
    fingerprints[i] = AddText(fingerprints[i], bytes + offsets[i],
                              static_cast<size_t>(offsets[i + 1] - offsets[i]));
  }
}

}  // namespace

// Adds a column of keys to the rows' fingerprints, which are 0 before the first one.
GMETA_EXPORT void gmeta_join_add_words(int64_t count, const uint64_t* words,
                                       uint64_t* fingerprints) {
  for (int64_t i = 0; i < count; ++i) fingerprints[i] = AddWord(fingerprints[i], words[i]);
}

// Likewise for texts, as Arrow has them: text i is the bytes from offsets[i] to offsets[i + 1],
// which are of 4 or of 8 bytes.
GMETA_EXPORT void gmeta_join_add_texts(int64_t count, int32_t is_large, const void* offsets,
                                       const char* bytes, uint64_t* fingerprints) {
  if (is_large != 0) {
    AddTexts(count, static_cast<const int64_t*>(offsets), bytes, fingerprints);
  } else {
    AddTexts(count, static_cast<const int32_t*>(offsets), bytes, fingerprints);
  }
}

// Makes a join without exposures. Returns null if memory runs out.
GMETA_EXPORT Join* gmeta_join_new(int64_t within, int64_t lateness, int64_t corrections,
                                  double negatives) {
  try {
    return new Join(Settings{within, lateness, corrections, negatives});
  } catch (const std::exception&) {
    return nullptr;
  }
}

GMETA_EXPORT void gmeta_join_free(Join* join) { delete join; }

// Adds rows of the log; see OpenExposures::Push. Returns 0, or -1 if memory runs out; then the join
// is of no further use.
GMETA_EXPORT int32_t gmeta_join_push(Join* join, int64_t count, const int64_t* keys,
                                     const int64_t* times, const uint8_t* sides,
                                     const int32_t* parts, const uint64_t* fingerprints,
                                     const float* labels, uint8_t* accepted) {
  try {
    join->output.Clear();
    join->exposures.Push(
        Rows{static_cast<size_t>(count), keys, times, sides, parts, fingerprints, labels}, accepted,
        &join->output);
    return 0;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

GMETA_EXPORT int32_t gmeta_join_finish(Join* join) {
  try {
    join->output.Clear();
    join->exposures.Finish(&join->output);
    return 0;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// The output of the last push or finish: numbers of rows with their labels and weights, and of the
// released rows. The arrays belong to the join, and stay valid until its next call.
GMETA_EXPORT void gmeta_join_output(const Join* join, int64_t* sizes, const int64_t** rows,
                                    const float** labels, const float** weights,
                                    const int64_t** released) {
  const Output& output = join->output;
  sizes[0] = static_cast<int64_t>(output.rows.size());
  sizes[1] = static_cast<int64_t>(output.released.size());
  *rows = output.rows.data();
  *labels = output.labels.data();
  *weights = output.weights.data();
  *released = output.released.data();
}

// Known, open, waiting, bytes, the next row's number, then the members of Counts.
GMETA_EXPORT void gmeta_join_counts(const Join* join, int64_t* counts) {
  const OpenExposures& own = join->exposures;
  counts[0] = static_cast<int64_t>(own.known());
  counts[1] = static_cast<int64_t>(own.open());
  counts[2] = static_cast<int64_t>(own.waiting());
  counts[3] = static_cast<int64_t>(own.bytes());
  counts[4] = own.next_row();
  static_assert(sizeof(Counts) % sizeof(int64_t) == 0, "it is copied as an array");
  std::memcpy(counts + 5, &own.counts(), sizeof(Counts));
}

// Copies the known exposures, in any order; the arrays have room for all.
GMETA_EXPORT void gmeta_join_exposures(const Join* join, uint64_t* fingerprints, int64_t* times,
                                       int64_t* rows, int32_t* parts, uint8_t* statuses) {
  size_t i = 0;
  join->exposures.ForEachExposure([&](const Exposure& exposure) {
    fingerprints[i] = exposure.fingerprint;
    times[i] = exposure.time;
    rows[i] = exposure.row;
    parts[i] = exposure.part;
    statuses[i++] = static_cast<uint8_t>(exposure.status);
  });
}

// Copies the waiting outcomes, in order of arrival.
GMETA_EXPORT void gmeta_join_waiting(const Join* join, uint64_t* fingerprints, int64_t* times,
                                     int64_t* arrived, float* labels, int32_t* parts) {
  size_t i = 0;
  join->exposures.ForEachWaiting([&](const Waiting& outcome) {
    fingerprints[i] = outcome.fingerprint;
    times[i] = outcome.time;
    arrived[i] = outcome.arrived;
    labels[i] = outcome.label;
    parts[i++] = outcome.part;
  });
}

// Adds known exposures of a saved state, in order of arrival. accepted[i] gets whether the key of
// exposure i is new; it is numbered in both cases.
GMETA_EXPORT int32_t gmeta_join_restore(Join* join, int64_t count, const uint64_t* fingerprints,
                                        const int64_t* times, const int32_t* parts,
                                        const uint8_t* statuses, uint8_t* accepted) {
  try {
    for (int64_t i = 0; i < count; ++i) {
      accepted[i] = join->exposures.Restore(fingerprints[i], times[i], parts[i],
                                            static_cast<Status>(statuses[i]))
                        ? 1
                        : 0;
    }
    return 0;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Adds waiting outcomes of a saved state, in order of arrival.
GMETA_EXPORT int32_t gmeta_join_restore_waiting(Join* join, int64_t count,
                                                const uint64_t* fingerprints, const int64_t* times,
                                                const int64_t* arrived, const float* labels,
                                                const int32_t* parts) {
  try {
    for (int64_t i = 0; i < count; ++i) {
      join->exposures.RestoreWaiting(
          {fingerprints[i], times[i], arrived[i], labels[i], parts[i], kNone, kNone});
    }
    return 0;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}
