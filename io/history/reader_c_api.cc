// A shard of a store of histories behind a C ABI, for Python's ctypes: programs that write, compact
// and check a store don't load TensorFlow. No exception and no C++ type crosses the ABI; the caller
// that created a handle frees it.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/history/file_source.h"
#include "io/history/scan.h"
#include "io/history/shard_index.h"

#define GMETA_EXPORT extern "C" __attribute__((visibility("default")))

using gmeta::history::FileSource;
using gmeta::history::Histories;
using gmeta::history::IndexFault;
using gmeta::history::kPlaceColumns;
using gmeta::history::Request;
using gmeta::history::Scan;
using gmeta::history::ScanFault;
using gmeta::history::ShardIndex;
using gmeta::history::Snapshot;
using gmeta::history::StripeFault;
using gmeta::history::StripePlace;

namespace {

struct Reader {
  ShardIndex index;
  FileSource files;
  Snapshot snapshot;
  Histories found;
  std::string encoded;
};

constexpr int32_t kNoMemory = -1;

}  // namespace

// Makes a reader with an empty index. Returns null if memory runs out.
GMETA_EXPORT Reader* gmeta_history_reader_new() { return new (std::nothrow) Reader; }

GMETA_EXPORT void gmeta_history_reader_free(Reader* reader) { delete reader; }

// Names the file that stripes call `number`.
GMETA_EXPORT int32_t gmeta_history_reader_file(Reader* reader, int64_t number, const char* path) {
  try {
    reader->files.Add(number, path);
    return 0;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Reads an index, which replaces the reader's. Returns an IndexFault; 0 is none.
GMETA_EXPORT int32_t gmeta_history_index_decode(Reader* reader, const char* bytes, int64_t size) {
  try {
    return static_cast<int32_t>(
        reader->index.Decode(std::string_view(bytes, static_cast<size_t>(size))));
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Encodes the index of users, ascending, whose stripes end before ends[i] of `places`, which has
// kPlaceColumns numbers for each stripe, and whose events before generation deletions[i] were
// deleted. Returns its bytes, which belong to the reader, or null if memory runs out. The reader
// then has this index.
GMETA_EXPORT const char* gmeta_history_index_encode(Reader* reader, int64_t users,
                                                    const int64_t* user, const int64_t* ends,
                                                    const int64_t* deletions,
                                                    const StripePlace* places, int64_t* size) {
  try {
    reader->index = ShardIndex();
    int64_t begin = 0;
    for (int64_t i = 0; i < users; ++i) {
      const auto count = static_cast<size_t>(ends[i] - begin);
      reader->index.Add(user[i], places + begin, count, deletions[i]);
      begin = ends[i];
    }
    reader->encoded = reader->index.Encode();
    *size = static_cast<int64_t>(reader->encoded.size());
    return reader->encoded.data();
  } catch (const std::exception&) {
    return nullptr;
  }
}

GMETA_EXPORT int64_t gmeta_history_index_users(const Reader* reader) {
  return static_cast<int64_t>(reader->index.users());
}

GMETA_EXPORT int64_t gmeta_history_index_stripes(const Reader* reader) {
  return static_cast<int64_t>(reader->index.stripes());
}

// Copies the index: the users, the end of each one's stripes, their deletions, and kPlaceColumns
// numbers a stripe.
GMETA_EXPORT void gmeta_history_index_copy(const Reader* reader, int64_t* user, int64_t* ends,
                                           int64_t* deletions, StripePlace* places) {
  int64_t end = 0;
  for (size_t i = 0; i < reader->index.users(); ++i) {
    const auto [own, count] = reader->index.Of(i);
    for (size_t k = 0; k < count; ++k) places[end++] = own[k];
    user[i] = reader->index.user(i);
    deletions[i] = reader->index.deletion(i);
    ends[i] = end;
  }
}

// Rebuilds histories. `requests` has four numbers for each: user, first time, time before which it
// ends, generation. Outputs row_splits (count + 1) and a pointer to each column's values, which
// belong to the reader and stay valid until its next call. Returns a StripeFault; then *at is the
// request's number, and `place` the stripe that has it.
GMETA_EXPORT int32_t gmeta_history_scan(Reader* reader, int64_t count, const int64_t* requests,
                                        int64_t group, int64_t longest, int64_t columns,
                                        const int64_t* chosen, int64_t* row_splits,
                                        const int64_t** values, int64_t* at, StripePlace* place) {
  try {
    std::vector<Request> asked(static_cast<size_t>(count));
    for (size_t i = 0; i < asked.size(); ++i) {
      const int64_t* given = requests + 4 * i;
      asked[i] = {given[0], {given[1], given[2], given[3]}};
    }
    const std::vector<size_t> own(chosen, chosen + columns);
    Histories& found = reader->found;
    found.row_splits.assign(1, 0);
    for (std::vector<int64_t>& column : found.columns) column.clear();
    const ScanFault fault = Scan(reader->index, asked, group, static_cast<size_t>(longest), own,
                                 &reader->files, &reader->snapshot, &found);
    *at = static_cast<int64_t>(fault.request);
    *place = fault.snapshot.place;
    if (!fault.ok()) return static_cast<int32_t>(fault.snapshot.fault);
    std::copy(found.row_splits.begin(), found.row_splits.end(), row_splits);
    for (size_t c = 0; c < own.size(); ++c) values[c] = found.columns[c].data();
    return 0;
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Returns the message of an IndexFault.
GMETA_EXPORT const char* gmeta_history_describe_index(int32_t fault) {
  return gmeta::history::Describe(static_cast<IndexFault>(fault));
}
