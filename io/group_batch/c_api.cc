// Groups of a prepared shard behind a C ABI, for Python's ctypes: programs that read a data set
// without training on it don't load TensorFlow. The loader and the parser are those of the readers.
// No exception and no C++ type crosses the ABI; the caller that created a handle frees it.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "io/group_batch/group_block.h"
#include "io/group_batch/group_window.h"
#include "io/records/column.h"
#include "io/records/file_bytes.h"

#define GMETA_EXPORT extern "C" __attribute__((visibility("default")))

using gmeta::group_batch::BlockOptions;
using gmeta::group_batch::BlockParser;
using gmeta::group_batch::GroupBlock;
using gmeta::group_batch::GroupWindow;
using gmeta::group_batch::Layout;
using gmeta::group_batch::ShardSpec;
using gmeta::group_batch::WindowLoader;
using gmeta::records::ColumnBuffer;
using gmeta::records::DType;
using gmeta::records::FileBytes;
using gmeta::records::IsFatal;

namespace {

struct Reader {
  Reader(BlockOptions chosen, ShardSpec shard)
      : options(std::move(chosen)),
        loader({std::move(shard)}, options.layout, FileBytes::Open),
        parser(options) {}

  const BlockOptions options;
  WindowLoader loader;
  BlockParser parser;  // refers to `options`
  GroupBlock block;
};

constexpr int64_t kNoMemory = -1;

}  // namespace

// Makes a reader of the shard at `path`, which has `groups` groups and an index with this CRC (-1:
// any). Its wanted columns have one value a row; `dtypes` are 0 (int64) or 1 (float32), and the
// columns at `task` and `batch` are the groups' key. Returns null if memory runs out.
GMETA_EXPORT Reader* gmeta_groups_reader_new(const char* path, int64_t groups, int64_t index_crc,
                                             int64_t count, const char* const* names,
                                             const int32_t* dtypes, int32_t columnar, int64_t task,
                                             int64_t batch) {
  try {
    BlockOptions options;
    for (int64_t i = 0; i < count; ++i) {
      options.columns.push_back({names[i], static_cast<DType>(dtypes[i]), false});
    }
    options.task = static_cast<size_t>(task);
    options.batch = static_cast<size_t>(batch);
    options.layout = columnar != 0 ? Layout::kColumnar : Layout::kExample;
    options.paths = {path};
    return new Reader(std::move(options), {path, groups, index_crc});
  } catch (const std::exception&) {
    return nullptr;
  }
}

GMETA_EXPORT void gmeta_groups_reader_free(Reader* reader) { delete reader; }

// Reads the groups `first` to `first + count - 1`, replaces those that were read before, and sets
// `rows` to the number of their sound rows. Returns the number of problems, or -1 if there is no
// memory.
GMETA_EXPORT int64_t gmeta_groups_read(Reader* reader, int64_t first, int64_t count,
                                       int64_t* rows) {
  try {
    GroupBlock& block = reader->block;
    block.columns.resize(reader->options.columns.size());
    for (ColumnBuffer& column : block.columns) {
      column.ints.clear();
      column.floats.clear();
      column.ends.clear();
    }
    block.entries.clear();
    block.problems.clear();
    std::vector<int64_t> numbers(static_cast<size_t>(count));
    std::iota(numbers.begin(), numbers.end(), first);
    const auto window = reader->loader.Load(numbers);
    for (const auto& group : window->groups) reader->parser.Parse(group, &block);
    *rows = block.entries.empty() ? 0 : block.entries.back().row_end;
    return static_cast<int64_t>(block.problems.size());
  } catch (const std::exception&) {
    return kNoMemory;
  }
}

// Returns a column's values in the rows that were read, int64 or float32. They stay until the next
// read.
GMETA_EXPORT const void* gmeta_groups_values(const Reader* reader, int64_t column) {
  const auto at = static_cast<size_t>(column);
  const ColumnBuffer& buffer = reader->block.columns[at];
  if (reader->options.columns[at].dtype == DType::kInt64) return buffer.ints.data();
  return buffer.floats.data();
}

// Returns the message of a problem. `skipped` becomes the number of rows that it costs, and `fatal`
// 1 if the fault lies in the machine, not in the data.
GMETA_EXPORT const char* gmeta_groups_problem(const Reader* reader, int64_t number,
                                              int64_t* skipped, int32_t* fatal) {
  const auto& found = reader->block.problems[static_cast<size_t>(number)].problem;
  *skipped = found.skipped;
  *fatal = IsFatal(found.fault) ? 1 : 0;
  return found.message.c_str();
}
