// The GroupBatch dataset: element_reader.h as a tf.data source.
//
// An iterator's state is one cursor per lane, the number of elements, and a digest of the plan that
// they belong to. Restoring opens the lanes at their cursors and reads nothing before them.

#include "io/group_batch/kernels.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/group_batch/element_reader.h"
#include "io/group_batch/epoch_order.h"
#include "io/group_batch/range_reader.h"
#include "io/group_batch/reader_stats.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gmeta::group_batch {
namespace {

constexpr size_t kHead = 4;  // tensors before the columns: cursor, task, batch, row splits

// The configuration, which determines the dataset's elements.
struct Config {
  DatasetColumns columns;
  Layout layout = Layout::kColumnar;
  std::vector<ShardSpec> shards;
  Seed seed;
  int64_t window = 0;
  std::vector<std::vector<Span>> lanes;
  int64_t steps = -1;
  int64_t first_step = 0;
  int64_t min_rows = 1;
  int64_t threads = 1;
  int64_t stats = 0;
  ElementOptions element;
  tf::DataTypeVector output_types;
  std::vector<tf::PartialTensorShape> output_shapes;

  int64_t groups() const {
    int64_t groups = 0;
    for (const ShardSpec& shard : shards) groups += shard.groups;
    return groups;
  }

  RangeOptions Range(tf::Env* env) const {
    RangeOptions range;
    range.block.columns = columns.columns;
    range.block.task = columns.task;
    range.block.batch = columns.batch;
    range.block.min_rows = min_rows;
    range.block.layout = layout;
    for (const ShardSpec& shard : shards) range.block.paths.push_back(shard.path);
    range.shards = shards;
    range.open = Opener(env);
    range.threads = static_cast<size_t>(threads);
    range.slots = 4 * range.threads;
    range.groups_a_block = std::clamp<int64_t>(element.groups, 32, 256);
    return range;
  }

  // Returns a digest of everything that a cursor's meaning depends on. Paths may change.
  int64_t Digest() const {
    uint64_t digest = 0;
    const auto add = [&](auto value) {
      digest = (digest ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
      digest ^= digest >> 29;
    };
    for (const ShardSpec& shard : shards) {
      add(shard.groups);
      add(shard.index_crc);
    }
    for (const int64_t value : {seed.first, seed.second, window, steps, element.groups}) add(value);
    for (const auto& lane : lanes) {
      for (const Span& span : lane) {
        add(span.begin);
        add(span.end);
      }
      add(-1);
    }
    if (element.balance.has_value()) add(static_cast<int64_t>(element.balance->target));
    return static_cast<int64_t>(digest);
  }
};

class Dataset : public SourceDataset {
 public:
  Dataset(tf::OpKernelContext* ctx, Config config)
      : SourceDataset(ctx, config.output_types, config.output_shapes), config_(std::move(config)) {}

  std::string DebugString() const override { return "GmetaGroupBatchDatasetOp::Dataset"; }
  int64_t CardinalityInternal(tf::data::CardinalityOptions options) const override {
    return config_.steps >= 0 ? config_.steps - config_.first_step : tf::data::kUnknownCardinality;
  }

  std::unique_ptr<tf::data::IteratorBase> MakeIteratorInternal(
      const std::string& prefix) const override {
    return std::make_unique<Iterator>(
        tf::data::DatasetIterator<Dataset>::Params{this, prefix + "::GmetaGroupBatch"});
  }

 protected:
  absl::Status AsGraphDefInternal(tf::data::SerializationContext* ctx, DatasetGraphDefBuilder* b,
                                  tf::Node** output) const override {
    std::vector<tf::tstring> files;
    std::vector<int64_t> groups, crcs;
    for (const ShardSpec& shard : config_.shards) {
      files.push_back(shard.path);
      groups.push_back(shard.groups);
      crcs.push_back(shard.index_crc);
    }
    std::vector<int64_t> lanes, begins, ends;
    for (size_t lane = 0; lane < config_.lanes.size(); ++lane) {
      for (const Span& span : config_.lanes[lane]) {
        lanes.push_back(static_cast<int64_t>(lane));
        begins.push_back(span.begin);
        ends.push_back(span.end);
      }
    }
    std::vector<double> balance;
    if (config_.element.balance.has_value()) {
      const balance::BatchCost& cost = *config_.element.balance;
      balance = {cost.target, cost.linear, cost.quadratic, static_cast<double>(cost.max_tokens),
                 static_cast<double>(cost.longest)};
    }
    std::vector<tf::Node*> inputs(15);
    TF_RETURN_IF_ERROR(b->AddVector(files, &inputs[0]));
    TF_RETURN_IF_ERROR(b->AddVector(groups, &inputs[1]));
    TF_RETURN_IF_ERROR(b->AddVector(crcs, &inputs[2]));
    TF_RETURN_IF_ERROR(
        b->AddVector(std::vector<int64_t>{config_.seed.first, config_.seed.second}, &inputs[3]));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.window, &inputs[4]));
    TF_RETURN_IF_ERROR(b->AddVector(lanes, &inputs[5]));
    TF_RETURN_IF_ERROR(b->AddVector(begins, &inputs[6]));
    TF_RETURN_IF_ERROR(b->AddVector(ends, &inputs[7]));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.element.groups, &inputs[8]));
    TF_RETURN_IF_ERROR(b->AddVector(balance, &inputs[9]));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.steps, &inputs[10]));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.first_step, &inputs[11]));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.min_rows, &inputs[12]));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.threads, &inputs[13]));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.stats, &inputs[14]));
    const int token_column = config_.element.token_column;
    tf::AttrValue layout, on_bad, tokens;
    b->BuildAttrValue(std::string(config_.layout == Layout::kColumnar ? "columnar" : "example"),
                      &layout);
    b->BuildAttrValue(std::string(config_.element.on_bad == OnBad::kSkip ? "skip" : "raise"),
                      &on_bad);
    b->BuildAttrValue(
        token_column < 0 ? "" : config_.columns.columns[static_cast<size_t>(token_column)].name,
        &tokens);
    auto attributes = config_.columns.Attributes(b);
    attributes.emplace_back("layout", layout);
    attributes.emplace_back("on_bad", on_bad);
    attributes.emplace_back("token_column", tokens);
    return b->AddDataset(this, inputs, attributes, output);
  }

 private:
  class Iterator : public tf::data::DatasetIterator<Dataset> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<Dataset>(params) {}

    ~Iterator() override {
      if (manager_ != nullptr) manager_->DeregisterCallback(callback_);
    }

    absl::Status Initialize(IteratorContext* ctx) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      stats_ = StatsRegistry::Global().Find(config().stats);
      range_ = config().Range(ctx->env());
      order_ = std::make_unique<EpochOrder>(config().groups(), config().window, config().seed);
      elements_ = config().first_step;
      for (const std::vector<Span>& lane : config().lanes) {
        int64_t groups = 0;
        for (const Span& span : lane) groups += span.end - span.begin;
        cursors_.push_back(std::min(groups, elements_ * config().element.groups));
      }
      Open();
      manager_ = ctx->cancellation_manager();
      if (manager_ == nullptr) return absl::OkStatus();
      callback_ = manager_->get_cancellation_token();
      if (!manager_->RegisterCallback(callback_, [this] { Cancel(); })) {
        manager_ = nullptr;
        return absl::CancelledError("the iterator was cancelled before it began");
      }
      return absl::OkStatus();
    }

    bool SymbolicCheckpointCompatible() const override { return true; }

   protected:
    absl::Status GetNextInternal(IteratorContext* ctx, std::vector<Tensor>* out,
                                 bool* end_of_sequence) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      *end_of_sequence = elements_ == config().steps;
      if (*end_of_sequence) return absl::OkStatus();
      Problem problem;
      const ElementReader::Result result = reader_->Next(&problem);
      if (cancelled_) return absl::CancelledError("reading was cancelled");
      if (result == ElementReader::Result::kProblem) return ToStatus(problem);
      // If the plan has more steps, the last elements have no groups.
      *end_of_sequence = result == ElementReader::Result::kEnd && config().steps < 0;
      if (*end_of_sequence) return absl::OkStatus();
      cursors_ = reader_->cursors();
      ++elements_;
      Emit(ctx, out);
      reader_->Release();
      return absl::OkStatus();
    }

    std::shared_ptr<tf::data::model::Node> CreateNode(
        IteratorContext* ctx, tf::data::model::Node::Args args) const override {
      return tf::data::model::MakeSourceNode(std::move(args));
    }

    absl::Status SaveInternal(tf::data::SerializationContext* ctx,
                              tf::data::IteratorStateWriter* writer) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), kDigest, config().Digest()));
      TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), kElements, elements_));
      for (size_t i = 0; i < cursors_.size(); ++i) {
        TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), Cursor(i), cursors_[i]));
      }
      return absl::OkStatus();
    }

    absl::Status RestoreInternal(IteratorContext* ctx,
                                 tf::data::IteratorStateReader* reader) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      int64_t digest;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kDigest, &digest));
      if (digest != config().Digest()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "gmeta: ", config().shards.front().path,
            ": the saved iterator was of another plan (files, seed, epoch, ranges of the ranks, or "
            "groups an element); restore it into the data set that it was saved from"));
      }
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kElements, &elements_));
      for (size_t i = 0; i < cursors_.size(); ++i) {
        TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), Cursor(i), &cursors_[i]));
      }
      Open();
      return absl::OkStatus();
    }

   private:
    static constexpr const char* kDigest = "digest";
    static constexpr const char* kElements = "elements";

    static std::string Cursor(size_t lane) { return "cursor_" + std::to_string(lane); }

    const Config& config() const { return dataset()->config_; }

    void Open() TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      auto reader = std::make_unique<ElementReader>(range_, config().element, *order_,
                                                    config().lanes, cursors_, stats_.get());
      const std::lock_guard<std::mutex> lock(reader_mutex_);
      if (cancelled_) reader->Cancel();
      reader_.swap(reader);
    }

    // May be called while GetNext waits and holds mutex_.
    void Cancel() {
      const std::lock_guard<std::mutex> lock(reader_mutex_);
      cancelled_ = true;
      if (reader_ != nullptr) reader_->Cancel();
    }

    void Emit(IteratorContext* ctx, std::vector<Tensor>* out) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      std::vector<GroupKey> keys;
      std::vector<int64_t> row_ends;
      std::vector<RowRange> rows;
      int64_t end = 0;
      for (const Slice& slice : reader_->slices()) {
        const GroupBlock& block = *slice.block;
        const int64_t first = block.row_begin(slice.begin);
        rows.push_back({&block.columns, first, block.entries[slice.end - 1].row_end});
        for (size_t i = slice.begin; i < slice.end; ++i) {
          if (!block.entries[i].sound) continue;
          keys.push_back(block.entries[i].key);
          row_ends.push_back(end + block.entries[i].row_end - first);
        }
        end += rows.back().end - first;
      }
      out->reserve(config().output_types.size());
      ElementTensors tensors(config().columns, ctx, out);
      std::copy(cursors_.begin(), cursors_.end(),
                tensors.Vector<int64_t>(static_cast<int64_t>(cursors_.size())));
      tensors.Add(keys, row_ends, rows);
    }

    std::mutex mutex_;
    std::shared_ptr<ReaderStats> stats_;
    RangeOptions range_;
    std::unique_ptr<EpochOrder> order_;
    std::vector<int64_t> cursors_ TF_GUARDED_BY(mutex_);  // after the last element
    int64_t elements_ TF_GUARDED_BY(mutex_) = 0;
    std::mutex reader_mutex_ TF_ACQUIRED_AFTER(mutex_);  // for replacing and cancelling it
    std::unique_ptr<ElementReader> reader_;
    std::atomic<bool> cancelled_{false};
    tf::CancellationManager* manager_ = nullptr;
    tf::CancellationToken callback_ = 0;
  };

  const Config config_;
};

class GroupBatchDatasetOp : public tf::data::DatasetOpKernel {
 public:
  explicit GroupBatchDatasetOp(tf::OpKernelConstruction* ctx) : DatasetOpKernel(ctx) {
    std::string layout, on_bad, tokens;
    OP_REQUIRES_OK(ctx, DatasetColumns::Read(ctx, &config_.columns));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("layout", &layout));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("on_bad", &on_bad));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("token_column", &tokens));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_types", &config_.output_types));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_shapes", &config_.output_shapes));
    config_.layout = layout == "columnar" ? Layout::kColumnar : Layout::kExample;
    config_.element.on_bad = on_bad == "skip" ? OnBad::kSkip : OnBad::kRaise;
    for (size_t i = 0; i < config_.columns.columns.size() && !tokens.empty(); ++i) {
      const ColumnSpec& column = config_.columns.columns[i];
      if (column.name == tokens && (column.is_list || column.dtype == records::DType::kInt64)) {
        config_.element.token_column = static_cast<int>(i);
        config_.element.token_lists = column.is_list;
      }
    }
    OP_REQUIRES(ctx, tokens.empty() || config_.element.token_column >= 0,
                Invalid("token_column ", tokens, " must be a list column, or one of integers"));
    const tf::DataTypeVector expected = config_.columns.OutputTypes(kHead);
    OP_REQUIRES(ctx, config_.output_types == expected,
                Invalid("output_types don't follow from the columns: got ",
                        tf::DataTypeVectorString(config_.output_types), ", expected ",
                        tf::DataTypeVectorString(expected)));
  }

 protected:
  void MakeDataset(tf::OpKernelContext* ctx, DatasetBase** output) override {
    Config config = config_;
    std::vector<tf::tstring> files;
    std::vector<int64_t> groups, crcs, seed, lanes, begins, ends;
    std::vector<double> balance;
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "files", &files));
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "groups", &groups));
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "index_crcs", &crcs));
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "seed", &seed));
    OP_REQUIRES_OK(ctx, tf::data::ParseScalarArgument(ctx, "shuffle_window", &config.window));
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "lanes", &lanes));
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "begins", &begins));
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "ends", &ends));
    OP_REQUIRES_OK(
        ctx, tf::data::ParseScalarArgument(ctx, "groups_per_element", &config.element.groups));
    OP_REQUIRES_OK(ctx, tf::data::ParseVectorArgument(ctx, "balance", &balance));
    OP_REQUIRES_OK(ctx, tf::data::ParseScalarArgument(ctx, "steps", &config.steps));
    OP_REQUIRES_OK(ctx, tf::data::ParseScalarArgument(ctx, "first_step", &config.first_step));
    OP_REQUIRES_OK(ctx, tf::data::ParseScalarArgument(ctx, "min_rows", &config.min_rows));
    OP_REQUIRES_OK(ctx, tf::data::ParseScalarArgument(ctx, "threads", &config.threads));
    OP_REQUIRES_OK(ctx, tf::data::ParseScalarArgument(ctx, "stats", &config.stats));
    OP_REQUIRES(ctx, !files.empty(), Invalid("files is empty"));
    OP_REQUIRES(ctx, groups.size() == files.size() && crcs.size() == files.size(),
                Invalid("files, groups and index_crcs have ", files.size(), ", ", groups.size(),
                        " and ", crcs.size(), " entries"));
    OP_REQUIRES(ctx, seed.size() == 2, Invalid("seed must be two numbers, got ", seed.size()));
    OP_REQUIRES(
        ctx, config.element.groups >= 1 && config.threads >= 1 && config.window >= 0,
        Invalid("groups_per_element ", config.element.groups, " and threads ", config.threads,
                " must be at least 1, shuffle_window ", config.window, " at least 0"));
    OP_REQUIRES(ctx,
                config.first_step == 0 || (balance.empty() && 0 <= config.first_step &&
                                           config.first_step <= config.steps),
                Invalid("first_step ", config.first_step, " isn't one of ", config.steps,
                        " planned steps"));
    OP_REQUIRES(ctx, balance.empty() || (balance.size() == 5 && balance[0] > 0),
                Invalid("balance must be empty, or five numbers, of which the "
                        "first, the target, is above 0"));
    for (size_t i = 0; i < files.size(); ++i) {
      const absl::string_view file(files[i]);
      OP_REQUIRES(ctx, groups[i] >= 0, Invalid("shard ", file, " has ", groups[i], " groups"));
      config.shards.push_back({files[i], groups[i], crcs[i]});
    }
    OP_REQUIRES(ctx, lanes.size() == begins.size() && lanes.size() == ends.size(),
                Invalid("lanes, begins and ends have ", lanes.size(), ", ", begins.size(), " and ",
                        ends.size(), " entries"));
    const int64_t all = config.groups();
    for (size_t i = 0; i < lanes.size(); ++i) {
      const auto count = static_cast<int64_t>(config.lanes.size());
      OP_REQUIRES(ctx,
                  (lanes[i] == count || lanes[i] == count - 1) && lanes[i] >= 0 && 0 <= begins[i] &&
                      begins[i] <= ends[i] && ends[i] <= all,
                  Invalid("span ", i, ", lane ", lanes[i], ": ", begins[i], " to ", ends[i],
                          ", doesn't lie in ", all, " groups, or lanes aren't numbered from 0 on"));
      if (lanes[i] == count) config.lanes.emplace_back();
      config.lanes.back().push_back({begins[i], ends[i]});
    }
    if (!balance.empty()) {
      config.element.balance =
          balance::BatchCost{balance[1], balance[2], balance[0], static_cast<int64_t>(balance[3]),
                             static_cast<int64_t>(balance[4])};
    }
    config.seed = {seed[0], seed[1]};
    *output = new Dataset(ctx, std::move(config));
  }

 private:
  Config config_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaGroupBatchDataset").Device(tf::DEVICE_CPU), GroupBatchDatasetOp);

}  // namespace
}  // namespace gmeta::group_batch
