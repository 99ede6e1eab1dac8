// Stripes, and checksums of histories, behind a C ABI, for Python's ctypes: programs that write a
// store don't load TensorFlow. No exception, no C++ type and no ownership crosses the ABI, except
// the writer's own handle.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "io/history/history_crc.h"
#include "io/history/stripe.h"

#define GMETA_EXPORT extern "C" __attribute__((visibility("default")))

using gmeta::history::AddColumn;
using gmeta::history::AppendStripe;
using gmeta::history::Stripe;
using gmeta::history::StripeFault;

// Makes a buffer that stripes are written into; free it with gmeta_history_buffer_free. Returns
// null if memory runs out.
GMETA_EXPORT std::string* gmeta_history_buffer_new() { return new (std::nothrow) std::string; }

GMETA_EXPORT void gmeta_history_buffer_free(std::string* buffer) { delete buffer; }

// Encodes stripes one after another into the buffer, and replaces its content. `values[c]` are the
// values of column c, of all stripes; stripe s ends before event ends[s]. The end of its bytes is
// put into byte_ends[s]. The bytes belong to the buffer. Returns them, or null if there is no
// memory.
GMETA_EXPORT const char* gmeta_history_encode(std::string* buffer, int64_t columns,
                                              const int64_t* const* values, int64_t stripes,
                                              const int64_t* ends, int64_t* byte_ends) {
  try {
    buffer->clear();
    std::vector<const int64_t*> from(static_cast<size_t>(columns));
    int64_t begin = 0;
    for (int64_t s = 0; s < stripes; ++s) {
      for (size_t c = 0; c < from.size(); ++c) from[c] = values[c] + begin;
      AppendStripe(from.data(), from.size(), static_cast<size_t>(ends[s] - begin), buffer);
      byte_ends[s] = static_cast<int64_t>(buffer->size());
      begin = ends[s];
    }
    return buffer->data();
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Reads the header of the stripe that the bytes begin with. Returns a StripeFault; 0 is none.
GMETA_EXPORT int32_t gmeta_history_open(const char* bytes, int64_t size, int64_t* columns,
                                        int64_t* events, int64_t* stripe_size) {
  Stripe stripe;
  const StripeFault fault = stripe.Open(std::string_view(bytes, static_cast<size_t>(size)));
  *columns = static_cast<int64_t>(stripe.columns());
  *events = static_cast<int64_t>(stripe.events());
  *stripe_size = static_cast<int64_t>(stripe.size());
  return static_cast<int32_t>(fault);
}

// Reads some columns of a stripe that gmeta_history_open has found sound: outs[i] gets the values
// of column chosen[i]. Returns a StripeFault, and in *at the number of the column that has it.
GMETA_EXPORT int32_t gmeta_history_read(const char* bytes, int64_t size, int64_t count,
                                        const int64_t* chosen, int64_t* const* outs, int64_t* at) {
  Stripe stripe;
  StripeFault fault = stripe.Open(std::string_view(bytes, static_cast<size_t>(size)));
  for (int64_t i = 0; i < count && fault == StripeFault::kNone; ++i) {
    *at = chosen[i];
    fault = stripe.Read(static_cast<size_t>(chosen[i]), outs[i]);
  }
  return static_cast<int32_t>(fault);
}

// Returns the message of a StripeFault.
GMETA_EXPORT const char* gmeta_history_describe_stripe(int32_t fault) {
  return gmeta::history::Describe(static_cast<StripeFault>(fault));
}

// Adds a column to the histories' checksums, which are 0 before the first one; its values are
// floats or words. Both are as AddColumn in history_crc.h describes them.
GMETA_EXPORT void gmeta_history_crc(int64_t histories, const int64_t* row_splits, int32_t is_float,
                                    const void* values, int64_t* crcs) {
  const auto count = static_cast<size_t>(histories);
  if (is_float != 0) {
    AddColumn(static_cast<const float*>(values), row_splits, count, crcs);
  } else {
    AddColumn(static_cast<const int64_t*>(values), row_splits, count, crcs);
  }
}
