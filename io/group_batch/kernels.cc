// The GroupBatch dataset: group_batch.h as a tf.data source.
//
// Saving and restoring. An iterator's state is the number of elements that it has made. Restoring
// reads from the start and drops that many. This is exact under every option and needs no state of
// the shuffle buffer, at the price of parsing again. Dropped elements aren't counted or reported a
// second time.

#include "io/group_batch/kernels.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/group_batch/group_batch.h"
#include "io/group_batch/group_shuffle.h"
#include "io/group_batch/reader_stats.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta::group_batch {
namespace {

// The configuration, which determines the dataset's elements.
struct Config {
  std::vector<std::string> files;
  Seed seed;
  int64_t groups_per_element = 1;
  int64_t shuffle_buffer = 0;
  int64_t stats = 0;
  DatasetColumns columns;
  GroupOptions options;  // with the same columns
  tf::DataTypeVector output_types;
  std::vector<tf::PartialTensorShape> output_shapes;
};

class Dataset : public SourceDataset {
 public:
  Dataset(tf::OpKernelContext* ctx, Config config)
      : SourceDataset(ctx, config.output_types, config.output_shapes), config_(std::move(config)) {}

  std::string DebugString() const override { return "GmetaGroupBatchDatasetOp::Dataset"; }

  std::unique_ptr<tf::data::IteratorBase> MakeIteratorInternal(
      const std::string& prefix) const override {
    return std::make_unique<Iterator>(
        tf::data::DatasetIterator<Dataset>::Params{this, prefix + "::GmetaGroupBatch"});
  }

 protected:
  absl::Status AsGraphDefInternal(tf::data::SerializationContext* ctx, DatasetGraphDefBuilder* b,
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
    tf::AttrValue layout, on_bad;
    b->BuildAttrValue(std::string(options.layout == Layout::kColumnar ? "columnar" : "example"),
                      &layout);
    b->BuildAttrValue(std::string(options.on_bad == OnBad::kSkip ? "skip" : "raise"), &on_bad);
    auto attributes = config_.columns.Attributes(b);
    attributes.emplace_back("layout", layout);
    attributes.emplace_back("on_bad", on_bad);
    return b->AddDataset(this, {files, seed, groups, shuffle, min_rows, stats}, attributes, output);
  }

 private:
  class Iterator : public tf::data::DatasetIterator<Dataset> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<Dataset>(params) {}

    absl::Status Initialize(IteratorContext* ctx) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      stats_ = StatsRegistry::Global().Find(config().stats);
      Start(ctx, config().options.on_bad, stats_.get());
      return absl::OkStatus();
    }

    bool SymbolicCheckpointCompatible() const override { return true; }

   protected:
    absl::Status GetNextInternal(IteratorContext* ctx, std::vector<Tensor>* out,
                                 bool* end_of_sequence) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      TF_RETURN_IF_ERROR(Collect(end_of_sequence));
      if (*end_of_sequence) return absl::OkStatus();
      Emit(ctx, out);
      ++elements_;
      Drop();
      return absl::OkStatus();
    }

    std::shared_ptr<tf::data::model::Node> CreateNode(
        IteratorContext* ctx, tf::data::model::Node::Args args) const override {
      return tf::data::model::MakeSourceNode(std::move(args));
    }

    absl::Status SaveInternal(tf::data::SerializationContext* ctx,
                              tf::data::IteratorStateWriter* writer) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      return writer->WriteScalar(prefix(), kElements, elements_);
    }

    absl::Status RestoreInternal(IteratorContext* ctx,
                                 tf::data::IteratorStateReader* reader) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      int64_t elements;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kElements, &elements));
      Start(ctx, OnBad::kSkip, nullptr);
      for (elements_ = 0; elements_ < elements; ++elements_) {
        if (ctx->cancellation_manager() && ctx->cancellation_manager()->IsCancelled()) {
          return absl::CancelledError("restoring the iterator was cancelled");
        }
        bool end = false;
        TF_RETURN_IF_ERROR(Collect(&end));
        if (end) {
          return absl::DataLossError(absl::StrCat("gmeta: ", config().files.front(),
                                                  ": the saved iterator had made ", elements,
                                                  " elements, the files hold ", elements_,
                                                  "; restore it over the files it was saved on"));
        }
        Drop();
      }
      shuffle_->reader().SetPolicy(config().options.on_bad, stats_.get());
      return absl::OkStatus();
    }

   private:
    static constexpr const char* kElements = "elements";

    const Config& config() const { return dataset()->config_; }

    void Start(IteratorContext* ctx, OnBad on_bad, ReaderStats* stats)
        TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      groups_.clear();
      GroupOptions options = config().options;
      options.on_bad = on_bad;
      shuffle_ = std::make_unique<GroupShuffle>(
          std::move(options), config().files, Opener(ctx->env()), stats,
          static_cast<size_t>(config().shuffle_buffer), config().seed);
    }

    // Fills groups_ with the next element's groups. Groups collected before a problem stay for the
    // next call, so that going on after an error (tf.data's ignore_errors) loses none.
    absl::Status Collect(bool* end) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      while (static_cast<int64_t>(groups_.size()) < config().groups_per_element) {
        std::unique_ptr<Group> group;
        Problem problem;
        const GroupReader::Result result = shuffle_->Next(&group, &problem);
        if (result == GroupReader::Result::kProblem) return ToStatus(problem);
        if (result == GroupReader::Result::kEnd) break;
        groups_.push_back(std::move(group));
      }
      *end = groups_.empty();
      return absl::OkStatus();
    }

    void Drop() TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      for (auto& group : groups_) shuffle_->reader().Recycle(std::move(group));
      groups_.clear();
    }

    void Emit(IteratorContext* ctx, std::vector<Tensor>* out) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      std::vector<GroupKey> keys;
      std::vector<int64_t> ends;
      std::vector<RowRange> rows;
      int64_t end = 0;
      for (const auto& group : groups_) {
        keys.push_back(group->key);
        ends.push_back(end += group->rows);
        rows.push_back({&group->columns, 0, group->rows});
      }
      ElementTensors(config().columns, ctx, out).Add(keys, ends, rows);
    }

    std::mutex mutex_;
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
    std::string layout, on_bad;
    OP_REQUIRES_OK(ctx, DatasetColumns::Read(ctx, &config_.columns));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("layout", &layout));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("on_bad", &on_bad));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_types", &config_.output_types));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_shapes", &config_.output_shapes));
    GroupOptions& options = config_.options;
    options.columns = config_.columns.columns;
    options.task = config_.columns.task;
    options.batch = config_.columns.batch;
    options.layout = layout == "columnar" ? Layout::kColumnar : Layout::kExample;
    options.on_bad = on_bad == "skip" ? OnBad::kSkip : OnBad::kRaise;
    const tf::DataTypeVector expected = config_.columns.OutputTypes(3);
    OP_REQUIRES(ctx, config_.output_types == expected,
                Invalid("output_types don't follow from the columns: got ",
                        tf::DataTypeVectorString(config_.output_types), ", expected ",
                        tf::DataTypeVectorString(expected)));
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
    OP_REQUIRES(ctx, !files.empty(), Invalid("files is empty"));
    OP_REQUIRES(ctx, seed.size() == 2, Invalid("seed must be two numbers, got ", seed.size()));
    OP_REQUIRES(ctx, config.groups_per_element >= 1,
                Invalid("groups_per_element must be at least 1, got ", config.groups_per_element));
    OP_REQUIRES(ctx, config.shuffle_buffer >= 0,
                Invalid("shuffle_buffer must be at least 0, got ", config.shuffle_buffer));
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
