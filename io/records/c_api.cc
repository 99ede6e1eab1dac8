// The encoder behind a C ABI, for Python's ctypes: no exception, no C++ type and no ownership
// crosses it but the encoder's own handle, and ctypes releases the interpreter lock around a call.

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "io/records/column.h"
#include "io/records/example_encoder.h"

#define GMETA_EXPORT extern "C" __attribute__((visibility("default")))

using gmeta::records::ColumnSpec;
using gmeta::records::ColumnView;
using gmeta::records::DType;
using gmeta::records::ExampleEncoder;

// An encoder of `count` columns; `dtypes` are 0 (int64) or 1 (float32), `lists` 0 or 1. Null if
// there is no memory. Free it with gmeta_records_encoder_free.
GMETA_EXPORT ExampleEncoder* gmeta_records_encoder_new(int64_t count, const char* const* names,
                                                       const int32_t* dtypes,
                                                       const int32_t* lists) {
  try {
    std::vector<ColumnSpec> columns;
    for (int64_t i = 0; i < count; ++i) {
      columns.push_back({names[i], static_cast<DType>(dtypes[i]), lists[i] != 0});
    }
    return new ExampleEncoder(columns);
  } catch (const std::exception&) {
    return nullptr;
  }
}

GMETA_EXPORT void gmeta_records_encoder_free(ExampleEncoder* encoder) { delete encoder; }

// Encodes rows from `first` on until `rows` are done or `limit` bytes are there. The bytes belong
// to the encoder and stay until its next call. `splits` holds null for a column of one value a row.
// Returns the first row that wasn't encoded, or -1 if there is no memory.
GMETA_EXPORT int64_t gmeta_records_encode(ExampleEncoder* encoder, int64_t first, int64_t rows,
                                          int64_t count, const void* const* values,
                                          const int64_t* const* splits, int64_t limit,
                                          const char** bytes, int64_t* size) {
  try {
    std::vector<ColumnView> views(static_cast<size_t>(count));
    for (size_t i = 0; i < views.size(); ++i) views[i] = {values[i], splits[i]};
    const int64_t next =
        encoder->Encode(views.data(), first, {&rows, 1}, static_cast<size_t>(limit));
    *bytes = encoder->data();
    *size = static_cast<int64_t>(encoder->size());
    return next;
  } catch (const std::exception&) {
    return -1;
  }
}
