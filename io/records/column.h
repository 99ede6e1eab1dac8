// A column of a record: what it is called and what it holds. The native twin of gmeta.core.schema.

#ifndef GMETA_IO_RECORDS_COLUMN_H_
#define GMETA_IO_RECORDS_COLUMN_H_

#include <string>

namespace gmeta::records {

enum class DType : int { kInt64 = 0, kFloat32 = 1 };

struct ColumnSpec {
  std::string name;
  DType dtype = DType::kInt64;
  bool is_list = false;  // any number of values a record, or exactly one
};

inline const char* Name(DType dtype) { return dtype == DType::kInt64 ? "int64" : "float32"; }

}  // namespace gmeta::records

#endif  // GMETA_IO_RECORDS_COLUMN_H_
