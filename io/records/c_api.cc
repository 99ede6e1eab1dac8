// The encoders behind a C ABI, for Python's ctypes: no exception, no C++ type and no ownership
// crosses it but the encoder's own handle, and ctypes releases the interpreter lock around a call.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

#include "io/records/column.h"
#include "io/records/columnar_encoder.h"
#include "io/records/example_encoder.h"
#include "io/records/record_encoder.h"
#include "io/records/zstd.h"

#define GMETA_EXPORT extern "C" __attribute__((visibility("default")))

using gmeta::records::ColumnarEncoder;
using gmeta::records::ColumnSpec;
using gmeta::records::ColumnView;
using gmeta::records::DType;
using gmeta::records::ExampleEncoder;
using gmeta::records::GroupRuns;
using gmeta::records::RecordEncoder;
using gmeta::records::Zstd;

// An encoder of `count` columns; `dtypes` are 0 (int64) or 1 (float32), `lists` 0 or 1. It writes
// the columnar layout if `columnar` isn't 0, whose key is the columns at `task` and `batch`;
// otherwise a tf.train.Example a row. Records of the columnar layout are compressed if `zstd` isn't
// 0, for which gmeta_records_has_zstd must be true. Null if there is no memory. Free it with
// gmeta_records_encoder_free.
GMETA_EXPORT RecordEncoder* gmeta_records_encoder_new(int64_t count, const char* const* names,
                                                      const int32_t* dtypes, const int32_t* lists,
                                                      int32_t columnar, int64_t task, int64_t batch,
                                                      int32_t zstd) {
  try {
    std::vector<ColumnSpec> columns;
    for (int64_t i = 0; i < count; ++i) {
      columns.push_back({names[i], static_cast<DType>(dtypes[i]), lists[i] != 0});
    }
    if (columnar == 0) return new ExampleEncoder(columns);
    return new ColumnarEncoder(columns, static_cast<size_t>(task), static_cast<size_t>(batch),
                               zstd != 0 ? Zstd::Get() : nullptr);
  } catch (const std::exception&) {
    return nullptr;
  }
}

GMETA_EXPORT int32_t gmeta_records_has_zstd() { return Zstd::Get() != nullptr; }

GMETA_EXPORT void gmeta_records_encoder_free(RecordEncoder* encoder) { delete encoder; }

// Encodes rows from `first` on until those of the last of `groups` groups are done or `limit` bytes
// are there. Group g ends before row group_ends[g]; what is written of it is added to
// group_bytes[g] and group_crcs[g], which may both be null. The bytes belong to the encoder and
// stay until its next call. `splits` holds null for a column of one value a row. Returns the first
// row that wasn't encoded, or -1 if there is no memory.
GMETA_EXPORT int64_t gmeta_records_encode_groups(RecordEncoder* encoder, int64_t first,
                                                 int64_t count, const void* const* values,
                                                 const int64_t* const* splits, int64_t groups,
                                                 const int64_t* group_ends, int64_t* group_bytes,
                                                 uint32_t* group_crcs, int64_t limit,
                                                 const char** bytes, int64_t* size) {
  try {
    std::vector<ColumnView> views(static_cast<size_t>(count));
    for (size_t i = 0; i < views.size(); ++i) views[i] = {values[i], splits[i]};
    const GroupRuns runs = {group_ends, groups, group_bytes, group_crcs};
    const int64_t next = encoder->Encode(views.data(), first, runs, static_cast<size_t>(limit));
    *bytes = encoder->data();
    *size = static_cast<int64_t>(encoder->size());
    return next;
  } catch (const std::exception&) {
    return -1;
  }
}
