// The GroupBatch dataset: group_batch.h as a tf.data source.
//
// Saving and restoring. An iterator's state is the number of elements that it has made. Restoring
// reads from the start and drops that many, which is exact under every option and needs no state of
// the shuffle buffer, at the price of parsing again what had been read. What is dropped isn't
// counted or reported a second time.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/group_batch/group_batch.h"
#include "io/group_batch/group_shuffle.h"
#include "io/group_batch/reader_stats.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/env.h"

namespace gmeta::group_batch {
namespace {

namespace tf = tensorflow;
using tf::Status;
using tf::Tensor;
using tf::data::DatasetBase;
using tf::data::IteratorContext;

// A file of any file system that TensorFlow knows.
class EnvSource : public records::ByteSource {
 public:
  EnvSource(std::unique_ptr<tf::RandomAccessFile> file, uint64_t size)
      : file_(std::move(file)), size_(size) {}

  uint64_t size() const override { return size_; }

  size_t Read(uint64_t offset, size_t count, char* out, std::string* error) override {
    tf::StringPiece read;
    const Status status = file_->Read(offset, count, &read, out);
    if (!status.ok() && !tf::errors::IsOutOfRange(status)) {
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

// A message without the path that Env puts in front of it, and on one line.
std::string Reason(const Status& status) {
  std::string text(status.message());
  if (const size_t at = text.rfind("; "); at != std::string::npos) text.erase(0, at + 2);
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

std::unique_ptr<records::ByteSource> OpenInEnv(tf::Env* env, const std::string& path,
                                               std::string* error) {
  std::unique_ptr<tf::RandomAccessFile> file;
  tf::uint64 size = 0;
  Status status = env->IsDirectory(path);
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

// gmeta/io/errors.py finds the line by this mark in what TensorFlow and Keras wrap around it.
Status ToStatus(const Problem& problem) {
  const std::string line = "gmeta: " + problem.message;
  switch (problem.fault) {
    case Fault::kTruncated:
    case Fault::kLengthCrc:
    case Fault::kDataCrc:
      return tf::errors::DataLoss(line);
    case Fault::kOpen:
      return tf::errors::NotFound(line);
    case Fault::kRead:
      return tf::errors::Unavailable(line);
    default:
      return tf::errors::InvalidArgument(line);
  }
}

// Everything that says what the dataset yields.
struct Config {
  std::vector<std::string> files;
  Seed seed;
  int64_t groups_per_element = 1;
  int64_t shuffle_buffer = 0;
  int64_t stats = 0;
  GroupOptions options;
  tf::DataTypeVector output_types;
  std::vector<tf::PartialTensorShape> output_shapes;
};

class Dataset : public DatasetBase {
 public:
  Dataset(tf::OpKernelContext* ctx, Config config)
      : DatasetBase(tf::data::DatasetContext(ctx)), config_(std::move(config)) {}

  const tf::DataTypeVector& output_dtypes() const override { return config_.output_types; }
  const std::vector<tf::PartialTensorShape>& output_shapes() const override {
    return config_.output_shapes;
  }
  std::string DebugString() const override { return "GmetaGroupBatchDatasetOp::Dataset"; }
  Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->clear();
    return tf::OkStatus();
  }
  // Counters are written and never read: what the dataset yields depends on its inputs alone.
  Status CheckExternalState() const override { return tf::OkStatus(); }

  std::unique_ptr<tf::data::IteratorBase> MakeIteratorInternal(
      const std::string& prefix) const override {
    return std::make_unique<Iterator>(
        tf::data::DatasetIterator<Dataset>::Params{this, prefix + "::GmetaGroupBatch"});
  }

 protected:
  Status AsGraphDefInternal(tf::data::SerializationContext* ctx, DatasetGraphDefBuilder* b,
                            tf::Node** output) const override {
    tf::Node *files, *seed, *groups, *shuffle, *min_rows, *stats;
    std::vector<tf::tstring> paths(config_.files.begin(), config_.files.end());
    TF_RETURN_IF_ERROR(b->AddVector(paths, &files));
    TF_RETURN_IF_ERROR(
        b->AddVector(std::vector<int64_t>{config_.seed.first, config_.seed.second}, &seed));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.groups_per_element, &groups));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.shuffle_buffer, &shuffle));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.options.min_rows, &min_rows));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.stats, &stats));

    const GroupOptions& options = config_.options;
    std::vector<std::string> column_names;
    tf::DataTypeVector column_types;
    std::vector<bool> column_lists;
    for (const ColumnSpec& column : options.columns) {
      column_names.push_back(column.name);
      column_types.push_back(column.dtype == records::DType::kInt64 ? tf::DT_INT64 : tf::DT_FLOAT);
      column_lists.push_back(column.is_list);
    }
    tf::AttrValue names, types, lists, task, batch, on_bad;
    b->BuildAttrValue(column_names, &names);
    b->BuildAttrValue(column_types, &types);
    b->BuildAttrValue(column_lists, &lists);
    b->BuildAttrValue(column_names[options.task], &task);
    b->BuildAttrValue(column_names[options.batch], &batch);
    b->BuildAttrValue(std::string(options.on_bad == OnBad::kSkip ? "skip" : "raise"), &on_bad);
    return b->AddDataset(this, {files, seed, groups, shuffle, min_rows, stats},
                         {{"column_names", names},
                          {"column_types", types},
                          {"column_lists", lists},
                          {"task_column", task},
                          {"batch_column", batch},
                          {"on_bad", on_bad}},
                         output);
  }

 private:
  class Iterator : public tf::data::DatasetIterator<Dataset> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<Dataset>(params) {}

    Status Initialize(IteratorContext* ctx) override {
      tf::mutex_lock lock(mutex_);
      stats_ = StatsRegistry::Global().Find(config().stats);
      Start(ctx, config().options.on_bad, stats_.get());
      return tf::OkStatus();
    }

    bool SymbolicCheckpointCompatible() const override { return true; }

   protected:
    Status GetNextInternal(IteratorContext* ctx, std::vector<Tensor>* out,
                           bool* end_of_sequence) override {
      tf::mutex_lock lock(mutex_);
      TF_RETURN_IF_ERROR(Collect(end_of_sequence));
      if (*end_of_sequence) return tf::OkStatus();
      Emit(ctx, out);
      ++elements_;
      Drop();
      return tf::OkStatus();
    }

    std::shared_ptr<tf::data::model::Node> CreateNode(
        IteratorContext* ctx, tf::data::model::Node::Args args) const override {
      return tf::data::model::MakeSourceNode(std::move(args));
    }

    Status SaveInternal(tf::data::SerializationContext* ctx,
                        tf::data::IteratorStateWriter* writer) override {
      tf::mutex_lock lock(mutex_);
      return writer->WriteScalar(prefix(), kElements, elements_);
    }

    Status RestoreInternal(IteratorContext* ctx, tf::data::IteratorStateReader* reader) override {
      tf::mutex_lock lock(mutex_);
      int64_t elements;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kElements, &elements));
      Start(ctx, OnBad::kSkip, nullptr);
      for (elements_ = 0; elements_ < elements; ++elements_) {
        if (ctx->cancellation_manager() && ctx->cancellation_manager()->IsCancelled()) {
          return tf::errors::Cancelled("restoring the iterator was cancelled");
        }
        bool end = false;
        TF_RETURN_IF_ERROR(Collect(&end));
        if (end) {
          return tf::errors::DataLoss("gmeta: ", config().files.front(),
                                      ": the saved iterator had made ", elements,
                                      " elements, the files hold ", elements_,
                                      "; restore it over the files it was saved on");
        }
        Drop();
      }
      shuffle_->reader().SetPolicy(config().options.on_bad, stats_.get());
      return tf::OkStatus();
    }

   private:
    static constexpr const char* kElements = "elements";

    const Config& config() const { return dataset()->config_; }

    void Start(IteratorContext* ctx, OnBad on_bad, ReaderStats* stats)
        TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      groups_.clear();
      tf::Env* env = ctx->env();
      GroupOptions options = config().options;
      options.on_bad = on_bad;
      shuffle_ = std::make_unique<GroupShuffle>(
          std::move(options), config().files,
          [env](const std::string& path, std::string* error) {
            return OpenInEnv(env, path, error);
          },
          stats, static_cast<size_t>(config().shuffle_buffer), config().seed);
    }

    // Fills groups_ with the next element's. Those collected before a problem stay for the next
    // call, so that going on after an error (tf.data's ignore_errors) loses none.
    Status Collect(bool* end) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      while (static_cast<int64_t>(groups_.size()) < config().groups_per_element) {
        std::unique_ptr<Group> group;
        Problem problem;
        const GroupReader::Result result = shuffle_->Next(&group, &problem);
        if (result == GroupReader::Result::kProblem) return ToStatus(problem);
        if (result == GroupReader::Result::kEnd) break;
        groups_.push_back(std::move(group));
      }
      *end = groups_.empty();
      return tf::OkStatus();
    }

    void Drop() TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      for (auto& group : groups_) shuffle_->reader().Recycle(std::move(group));
      groups_.clear();
    }

    template <typename T>
    static T* Add(IteratorContext* ctx, std::vector<Tensor>* out, int64_t size) {
      out->emplace_back(ctx->allocator({}), tf::DataTypeToEnum<T>::value, tf::TensorShape({size}));
      return out->back().flat<T>().data();
    }

    void Emit(IteratorContext* ctx, std::vector<Tensor>* out) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const auto size = static_cast<int64_t>(groups_.size());
      out->reserve(config().output_types.size());
      int64_t* task = Add<int64_t>(ctx, out, size);
      int64_t* batch = Add<int64_t>(ctx, out, size);
      int64_t* splits = Add<int64_t>(ctx, out, size + 1);
      int64_t rows = 0;
      *splits++ = 0;
      for (const auto& group : groups_) {
        *task++ = group->key.task;
        *batch++ = group->key.batch;
        *splits++ = rows += group->rows;
      }
      const GroupOptions& options = config().options;
      for (size_t i = 0; i < options.columns.size(); ++i) {
        if (i == options.task || i == options.batch) continue;
        if (options.columns[i].dtype == records::DType::kInt64) {
          EmitValues<int64_t>(ctx, i, &ColumnBuffer::ints, out);
        } else {
          EmitValues<float>(ctx, i, &ColumnBuffer::floats, out);
        }
        if (options.columns[i].is_list) EmitSplits(ctx, i, rows, out);
      }
    }

    template <typename T>
    void EmitValues(IteratorContext* ctx, size_t column, std::vector<T> ColumnBuffer::* values,
                    std::vector<Tensor>* out) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      size_t size = 0;
      for (const auto& group : groups_) size += (group->columns[column].*values).size();
      T* to = Add<T>(ctx, out, static_cast<int64_t>(size));
      for (const auto& group : groups_) {
        const std::vector<T>& from = group->columns[column].*values;
        to = std::copy(from.begin(), from.end(), to);
      }
    }

    void EmitSplits(IteratorContext* ctx, size_t column, int64_t rows, std::vector<Tensor>* out)
        TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      int64_t* to = Add<int64_t>(ctx, out, rows + 1);
      int64_t base = 0;
      *to++ = 0;
      for (const auto& group : groups_) {
        const std::vector<int64_t>& ends = group->columns[column].ends;
        for (const int64_t end : ends) *to++ = base + end;
        base += ends.back();
      }
    }

    tf::mutex mutex_;
    std::shared_ptr<ReaderStats> stats_;
    std::unique_ptr<GroupShuffle> shuffle_ TF_GUARDED_BY(mutex_);
    std::vector<std::unique_ptr<Group>> groups_ TF_GUARDED_BY(mutex_);  // of the next element
    int64_t elements_ TF_GUARDED_BY(mutex_) = 0;
  };

  const Config config_;
};

class GroupBatchDatasetOp : public tf::data::DatasetOpKernel {
 public:
  explicit GroupBatchDatasetOp(tf::OpKernelConstruction* ctx) : DatasetOpKernel(ctx) {
    std::vector<std::string> names;
    tf::DataTypeVector types;
    std::vector<bool> lists;
    std::string task, batch, on_bad;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("column_names", &names));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("column_types", &types));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("column_lists", &lists));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("task_column", &task));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("batch_column", &batch));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("on_bad", &on_bad));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_types", &config_.output_types));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_shapes", &config_.output_shapes));
    OP_REQUIRES(ctx, types.size() == names.size() && lists.size() == names.size(),
                tf::errors::InvalidArgument("column_names, column_types and column_lists have ",
                                            names.size(), ", ", types.size(), " and ", lists.size(),
                                            " entries; give each column one"));
    GroupOptions& options = config_.options;
    options.on_bad = on_bad == "skip" ? OnBad::kSkip : OnBad::kRaise;
    options.task = options.batch = names.size();
    tf::DataTypeVector expected(3, tf::DT_INT64);
    for (size_t i = 0; i < names.size(); ++i) {
      const bool is_int = types[i] == tf::DT_INT64;
      options.columns.push_back(
          {names[i], is_int ? records::DType::kInt64 : records::DType::kFloat32, lists[i]});
      const bool is_key = names[i] == task || names[i] == batch;
      if (names[i] == task) options.task = i;
      if (names[i] == batch) options.batch = i;
      OP_REQUIRES(ctx, !is_key || (is_int && !lists[i]),
                  tf::errors::InvalidArgument("column ", names[i], " must be a single int64"));
      if (is_key) continue;
      expected.push_back(types[i]);
      if (lists[i]) expected.push_back(tf::DT_INT64);
    }
    OP_REQUIRES(ctx,
                options.task < names.size() && options.batch < names.size() &&
                    options.task != options.batch,
                tf::errors::InvalidArgument("task_column ", task, " and batch_column ", batch,
                                            " must be two of the columns"));
    OP_REQUIRES(ctx, config_.output_types == expected,
                tf::errors::InvalidArgument("output_types don't follow from the columns: got ",
                                            tf::DataTypeVectorString(config_.output_types),
                                            ", expected ", tf::DataTypeVectorString(expected)));
  }

 protected:
  void MakeDataset(tf::OpKernelContext* ctx, DatasetBase** output) override {
    Config config = config_;
    std::vector<tf::tstring> files;
    std::vector<int64_t> seed;
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "files", &files));
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "seed", &seed));
    OP_REQUIRES_OK(
        ctx, tf::data::ParseScalarArgument(ctx, "groups_per_element", &config.groups_per_element));
    OP_REQUIRES_OK(ctx,
                   tf::data::ParseScalarArgument(ctx, "shuffle_buffer", &config.shuffle_buffer));
    OP_REQUIRES_OK(ctx, tf::data::ParseScalarArgument(ctx, "min_rows", &config.options.min_rows));
    OP_REQUIRES_OK(ctx, tf::data::ParseScalarArgument(ctx, "stats", &config.stats));
    OP_REQUIRES(ctx, !files.empty(), tf::errors::InvalidArgument("files is empty"));
    OP_REQUIRES(ctx, seed.size() == 2,
                tf::errors::InvalidArgument("seed must be two numbers, got ", seed.size()));
    OP_REQUIRES(ctx, config.groups_per_element >= 1,
                tf::errors::InvalidArgument("groups_per_element must be at least 1, got ",
                                            config.groups_per_element));
    OP_REQUIRES(ctx, config.shuffle_buffer >= 0,
                tf::errors::InvalidArgument("shuffle_buffer must be at least 0, got ",
                                            config.shuffle_buffer));
    config.files.assign(files.begin(), files.end());
    config.seed = {seed[0], seed[1]};
    *output = new Dataset(ctx, std::move(config));
  }

 private:
  Config config_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaGroupBatchDataset").Device(tf::DEVICE_CPU), GroupBatchDatasetOp);

}  // namespace
}  // namespace gmeta::group_batch
