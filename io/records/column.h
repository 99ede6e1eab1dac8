// A column of a record: its name and type, the native twin of gmeta.core.schema, and the
// arrays that its values are read from and written to.

#ifndef GMETA_IO_RECORDS_COLUMN_H_
#define GMETA_IO_RECORDS_COLUMN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gmeta::records {

enum class DType : int { kInt64 = 0, kFloat32 = 1 };

struct ColumnSpec {
  std::string name;
  DType dtype = DType::kInt64;
  bool is_list = false;  // true: any number of values per record; false: exactly one
};

inline const char* Name(DType dtype) { return dtype == DType::kInt64 ? "int64" : "float32"; }

// Borrowed values of a column. Row r of a list column holds values[splits[r]] to
// values[splits[r + 1] - 1]; otherwise `splits` is null and row r holds values[r].
struct ColumnView {
  const void* values = nullptr;
  const int64_t* splits = nullptr;
};

// The values of one column over many rows.
struct ColumnBuffer {
  std::vector<int64_t> ints;
  std::vector<float> floats;
  std::vector<int64_t> ends;  // end of each row's values; only for lists

  size_t size(DType dtype) const { return dtype == DType::kInt64 ? ints.size() : floats.size(); }
  void Truncate(DType dtype, size_t size) {
    dtype == DType::kInt64 ? ints.resize(size) : floats.resize(size);
  }
};

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_COLUMN_H_
