// What the GroupBatch dataset exchanges with TensorFlow: files of its file systems, errors, the
// columns as attributes, and groups as tensors.

#ifndef GMETA_IO_GROUP_BATCH_KERNELS_H_
#define GMETA_IO_GROUP_BATCH_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/group_batch/group_block.h"
#include "io/group_batch/group_window.h"
#include "io/group_batch/problem.h"
#include "ops/common/kernels.h"
#include "ops/common/kernels_versions.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/env.h"

namespace gmeta::group_batch {

namespace tf = tensorflow;
using tf::Tensor;
using tf::data::DatasetBase;
using tf::data::IteratorContext;

// A file in any of TensorFlow's file systems.
class EnvSource : public records::ByteSource {
 public:
  EnvSource(std::unique_ptr<tf::RandomAccessFile> file, uint64_t size)
      : file_(std::move(file)), size_(size) {}

  uint64_t size() const override { return size_; }

  size_t Read(uint64_t offset, size_t count, char* out, std::string* error) override {
    absl::string_view read;
    const absl::Status status = ReadAt(*file_, offset, count, out, &read);
    if (!status.ok() && !absl::IsOutOfRange(status)) {
      *error = std::string(status.message());
      return 0;
    }
    if (read.data() != out) std::memmove(out, read.data(), read.size());
    return read.size();
  }

 private:
  const std::unique_ptr<tf::RandomAccessFile> file_;
  const uint64_t size_;
};

// Returns the status's message on one line, without the path that Env puts in front of it.
inline std::string Reason(const absl::Status& status) {
  std::string text(status.message());
  if (const size_t at = text.rfind("; "); at != std::string::npos) text.erase(0, at + 2);
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

inline std::unique_ptr<records::ByteSource> OpenInEnv(tf::Env* env, const std::string& path,
                                                      std::string* error) {
  std::unique_ptr<tf::RandomAccessFile> file;
  uint64_t size = 0;
  absl::Status status = env->IsDirectory(path);
  if (status.ok()) {
    *error = "it is a folder";
    return nullptr;
  }
  status = env->GetFileSize(path, &size);
  if (status.ok()) status = env->NewRandomAccessFile(path, &file);
  if (!status.ok()) {
    *error = Reason(status);
    return nullptr;
  }
  return std::make_unique<EnvSource>(std::move(file), size);
}

inline OpenFile Opener(tf::Env* env) {
  return [env](const std::string& path, std::string* error) { return OpenInEnv(env, path, error); };
}

// Makes a status with the mark "gmeta: ", by which gmeta/io/reader_stats.py finds the line within
// the text that TensorFlow and Keras add around it.
inline absl::Status ToStatus(const Problem& problem) {
  const std::string line = "gmeta: " + problem.message;
  switch (problem.fault) {
    case Fault::kTruncated:
    case Fault::kLengthCrc:
    case Fault::kDataCrc:
      return absl::DataLossError(line);
    case Fault::kOpen:
      return absl::NotFoundError(line);
    case Fault::kRead:
      return absl::UnavailableError(line);
    default:
      return Invalid(line);
  }
}

// The columns of a dataset's records, as given by its op's attributes.
struct DatasetColumns {
  std::vector<ColumnSpec> columns;
  size_t task = 0;  // places of the key's columns
  size_t batch = 0;

  static absl::Status Read(tf::OpKernelConstruction* ctx, DatasetColumns* out) {
    std::vector<std::string> names;
    tf::DataTypeVector types;
    std::vector<bool> lists;
    std::string task, batch;
    TF_RETURN_IF_ERROR(ctx->GetAttr("column_names", &names));
    TF_RETURN_IF_ERROR(ctx->GetAttr("column_types", &types));
    TF_RETURN_IF_ERROR(ctx->GetAttr("column_lists", &lists));
    TF_RETURN_IF_ERROR(ctx->GetAttr("task_column", &task));
    TF_RETURN_IF_ERROR(ctx->GetAttr("batch_column", &batch));
    if (types.size() != names.size() || lists.size() != names.size()) {
      return Invalid("column_names, column_types and column_lists have ", names.size(), ", ",
                     types.size(), " and ", lists.size(), " entries; give each column one");
    }
    out->task = out->batch = names.size();
    for (size_t i = 0; i < names.size(); ++i) {
      const bool is_int = types[i] == tf::DT_INT64;
      out->columns.push_back(
          {names[i], is_int ? records::DType::kInt64 : records::DType::kFloat32, lists[i]});
      if (names[i] == task) out->task = i;
      if (names[i] == batch) out->batch = i;
      if ((names[i] == task || names[i] == batch) && (!is_int || lists[i])) {
        return Invalid("column ", names[i], " must be a single int64");
      }
    }
    if (out->task == names.size() || out->batch == names.size() || out->task == out->batch) {
      return Invalid("task_column ", task, " and batch_column ", batch,
                     " must be two of the columns");
    }
    return absl::OkStatus();
  }

  // Returns the types of an element's tensors: `first` tensors of int64, then the columns.
  tf::DataTypeVector OutputTypes(size_t first) const {
    tf::DataTypeVector types(first, tf::DT_INT64);
    for (size_t i = 0; i < columns.size(); ++i) {
      if (i == task || i == batch) continue;
      types.push_back(Type(columns[i]));
      if (columns[i].is_list) types.push_back(tf::DT_INT64);
    }
    return types;
  }

  template <typename Builder>
  std::vector<std::pair<absl::string_view, tf::AttrValue>> Attributes(Builder* b) const {
    std::vector<std::string> names;
    tf::DataTypeVector types;
    std::vector<bool> lists;
    for (const ColumnSpec& column : columns) {
      names.push_back(column.name);
      types.push_back(Type(column));
      lists.push_back(column.is_list);
    }
    std::vector<std::pair<absl::string_view, tf::AttrValue>> attributes(5);
    const auto set = [&](size_t i, const char* name, const auto& value) {
      attributes[i].first = name;
      b->BuildAttrValue(value, &attributes[i].second);
    };
    set(0, "column_names", names);
    set(1, "column_types", types);
    set(2, "column_lists", lists);
    set(3, "task_column", names[task]);
    set(4, "batch_column", names[batch]);
    return attributes;
  }

 private:
  static tf::DataType Type(const ColumnSpec& column) {
    return column.dtype == records::DType::kInt64 ? tf::DT_INT64 : tf::DT_FLOAT;
  }
};

// A dataset without inputs, whose configuration alone determines its elements.
class SourceDataset : public DatasetBase {
 public:
  SourceDataset(tf::OpKernelContext* ctx, tf::DataTypeVector types,
                std::vector<tf::PartialTensorShape> shapes)
      : DatasetBase(tf::data::DatasetContext(ctx)),
        types_(std::move(types)),
        shapes_(std::move(shapes)) {}

  const tf::DataTypeVector& output_dtypes() const override { return types_; }
  const std::vector<tf::PartialTensorShape>& output_shapes() const override { return shapes_; }
  absl::Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->clear();
    return absl::OkStatus();
  }
  // Counters are written but never read, so there is no external state.
  absl::Status CheckExternalState() const override { return absl::OkStatus(); }

 private:
  const tf::DataTypeVector types_;
  const std::vector<tf::PartialTensorShape> shapes_;
};

// A range of neighbouring rows in column buffers.
struct RowRange {
  const std::vector<ColumnBuffer>* columns = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// Writes groups as the tensors of an element: task, batch, row splits, and the other columns'
// values.
class ElementTensors {
 public:
  ElementTensors(const DatasetColumns& columns, IteratorContext* ctx, std::vector<Tensor>* out)
      : columns_(columns), ctx_(ctx), out_(out) {}

  // Adds all tensors. `row_ends` has the place after each group's last row; `rows` are the groups'
  // rows, in order.
  void Add(const std::vector<GroupKey>& keys, const std::vector<int64_t>& row_ends,
           const std::vector<RowRange>& rows) {
    const auto size = static_cast<int64_t>(keys.size());
    int64_t* task = Vector<int64_t>(size);
    int64_t* batch = Vector<int64_t>(size);
    int64_t* splits = Vector<int64_t>(size + 1);
    *splits++ = 0;
    for (const GroupKey& key : keys) {
      *task++ = key.task;
      *batch++ = key.batch;
    }
    std::copy(row_ends.begin(), row_ends.end(), splits);
    for (size_t i = 0; i < columns_.columns.size(); ++i) {
      if (i == columns_.task || i == columns_.batch) continue;
      if (columns_.columns[i].dtype == records::DType::kInt64) {
        AddValues<int64_t>(i, &ColumnBuffer::ints, rows);
      } else {
        AddValues<float>(i, &ColumnBuffer::floats, rows);
      }
      if (columns_.columns[i].is_list) AddSplits(i, rows);
    }
  }

  // Adds a vector of `size` numbers and returns where to write them.
  template <typename T>
  T* Vector(int64_t size) {
    out_->emplace_back(ctx_->allocator({}), tf::DataTypeToEnum<T>::value, tf::TensorShape({size}));
    return out_->back().template flat<T>().data();
  }

 private:
  // Returns where a row's values begin.
  static int64_t ValueBegin(const ColumnBuffer& column, bool is_list, int64_t row) {
    return !is_list ? row : row == 0 ? 0 : column.ends[static_cast<size_t>(row) - 1];
  }

  template <typename T>
  void AddValues(size_t i, std::vector<T> ColumnBuffer::* values,
                 const std::vector<RowRange>& rows) {
    const bool is_list = columns_.columns[i].is_list;
    const auto begin = [&](const RowRange& range, int64_t row) {
      return ValueBegin((*range.columns)[i], is_list, row);
    };
    int64_t size = 0;
    for (const RowRange& range : rows) size += begin(range, range.end) - begin(range, range.begin);
    T* to = Vector<T>(size);
    for (const RowRange& range : rows) {
      const T* from = ((*range.columns)[i].*values).data();
      to = std::copy(from + begin(range, range.begin), from + begin(range, range.end), to);
    }
  }

  void AddSplits(size_t i, const std::vector<RowRange>& rows) {
    int64_t count = 0;
    for (const RowRange& range : rows) count += range.end - range.begin;
    int64_t* to = Vector<int64_t>(count + 1);
    int64_t before = 0;
    *to++ = 0;
    for (const RowRange& range : rows) {
      const ColumnBuffer& column = (*range.columns)[i];
      const int64_t shift = before - ValueBegin(column, true, range.begin);
      for (int64_t row = range.begin; row < range.end; ++row) {
        *to++ = before = column.ends[static_cast<size_t>(row)] + shift;
      }
    }
  }

  const DatasetColumns& columns_;
  IteratorContext* const ctx_;
  std::vector<Tensor>* const out_;
};

}  // namespace gmeta::group_batch

#endif  // GMETA_IO_GROUP_BATCH_KERNELS_H_
