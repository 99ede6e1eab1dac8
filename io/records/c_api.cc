// The encoders behind a C ABI, for Python's ctypes. No exception, no C++ type and no ownership
// crosses it, except the encoder's own handle. ctypes releases the interpreter lock around a call.

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

// Makes an encoder of `count` columns; `dtypes` are 0 (int64) or 1 (float32), `lists` 0 or 1. If
// `columnar` isn't 0, it writes the columnar layout, whose key is the columns at `task` and
// `batch`; otherwise one tf.train.Example for each row. If `zstd` isn't 0, records of the columnar
// layout are compressed; gmeta_records_has_zstd must be true then. Returns null if there is no
// memory. Free it with gmeta_records_encoder_free.
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

// Encodes rows from `first` on until the last of `groups` groups is done or `limit` bytes are
// written. Group g ends before row group_ends[g]. The size of its written records is added to
// group_bytes[g], and the CRC of their payloads to group_crcs[g]; both may be null. The bytes
// belong to the encoder and stay valid until its next call. For a column of one value a row,
// `splits` holds null. Returns the first row that wasn't encoded, or -1 if memory runs out.
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
