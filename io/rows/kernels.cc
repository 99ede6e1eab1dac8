// The RowBatches dataset: row_batcher.h over elements of groups.
//
// An iterator's state is its input's state and the waiting blocks: their tensors, and how many of
// their rows were taken. The blocks' orders are drawn again.

#include "ops/common/kernels.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "io/rows/row_batcher.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.h"

namespace gmeta::rows {
namespace {

namespace tf = tensorflow;
using tf::Tensor;
using tf::data::DatasetBase;
using tf::data::IteratorContext;
using Element = std::vector<Tensor>;

constexpr size_t kHead = 2;  // tensors before the columns: numbers for the order, row splits

enum class Kind { kRow, kList, kGroup };

struct Config {
  std::vector<std::string> names;  // names of the kinds
  std::vector<Kind> kinds;
  int64_t batch_size = 1;
  bool drop_remainder = false;
  tf::DataTypeVector output_types;
  std::vector<tf::PartialTensorShape> output_shapes;
};

size_t Tensors(Kind kind) { return kind == Kind::kList ? 2 : 1; }

const int64_t* Numbers(const Tensor& tensor) { return tensor.vec<int64_t>().data(); }

// Returns whether a tensor is a valid row splits vector for `values` values.
bool Splits(const Tensor& splits, int64_t values) {
  const int64_t size = splits.NumElements();
  if (size == 0 || !std::is_sorted(Numbers(splits), Numbers(splits) + size)) return false;
  return Numbers(splits)[0] == 0 && Numbers(splits)[size - 1] == values;
}

// Checks that an element's tensors fit each other, so that nothing is read out of bounds.
absl::Status Check(const Config& config, const Element& element) {
  for (const Tensor& tensor : element) {
    if (tensor.dims() != 1) return Invalid("RowBatches takes only vectors");
  }
  const int64_t size = element[0].NumElements(), groups = element[1].NumElements() - 1;
  const int64_t rows = groups < 0 ? 0 : Numbers(element[1])[groups];
  if ((size != 0 && size != 3) || !Splits(element[1], rows) ||
      rows > std::numeric_limits<uint32_t>::max()) {
    return Invalid("RowBatches: the order must be drawn from three numbers or none, got ", size,
                   ", and row splits must ascend from 0 to less than 2^32, got ", groups + 1,
                   " ending in ", rows);
  }
  for (size_t i = 0, at = kHead; i < config.kinds.size(); at += Tensors(config.kinds[i++])) {
    const int64_t values = element[at].NumElements();
    const bool fits =
        config.kinds[i] == Kind::kList
            ? element[at + 1].NumElements() == rows + 1 && Splits(element[at + 1], values)
            : values == (config.kinds[i] == Kind::kRow ? rows : groups);
    if (!fits) {
      return Invalid("RowBatches: column ", i, ", of kind ", config.names[i], ", has ", values,
                     " values, and there are ", rows, " rows in ", groups, " groups");
    }
  }
  return absl::OkStatus();
}

Block<Element> BlockOf(Element element) {
  Shuffle shuffle;
  shuffle.on = element[0].NumElements() > 0;
  if (shuffle.on) {
    const int64_t* numbers = Numbers(element[0]);
    shuffle.seed = {numbers[0], numbers[1]};
    // Far from the streams of the epoch's own order, which count from 0.
    shuffle.stream = (uint64_t{1} << 63) + static_cast<uint64_t>(numbers[2]);
  }
  const Tensor splits = element[1];
  return MakeBlock(std::move(element), Numbers(splits) + 1,
                   static_cast<size_t>(splits.NumElements() - 1), shuffle);
}

class Dataset : public DatasetBase {
 public:
  Dataset(tf::OpKernelContext* ctx, DatasetBase* input, Config config)
      : DatasetBase(tf::data::DatasetContext(ctx)), input_(input), config_(std::move(config)) {
    input_->Ref();
  }
  ~Dataset() override { input_->Unref(); }

  const tf::DataTypeVector& output_dtypes() const override { return config_.output_types; }
  const std::vector<tf::PartialTensorShape>& output_shapes() const override {
    return config_.output_shapes;
  }
  std::string DebugString() const override { return "GmetaRowBatchesDatasetOp::Dataset"; }
  absl::Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->assign({input_});
    return absl::OkStatus();
  }
  absl::Status CheckExternalState() const override { return input_->CheckExternalState(); }

  std::unique_ptr<tf::data::IteratorBase> MakeIteratorInternal(
      const std::string& prefix) const override {
    return std::make_unique<Iterator>(
        tf::data::DatasetIterator<Dataset>::Params{this, prefix + "::GmetaRowBatches"});
  }

 protected:
  absl::Status AsGraphDefInternal(tf::data::SerializationContext* ctx, DatasetGraphDefBuilder* b,
                                  tf::Node** output) const override {
    tf::Node *input, *size, *drop;
    TF_RETURN_IF_ERROR(b->AddInputDataset(ctx, input_, &input));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.batch_size, &size));
    TF_RETURN_IF_ERROR(b->AddScalar(config_.drop_remainder, &drop));
    tf::AttrValue kinds;
    b->BuildAttrValue(config_.names, &kinds);
    return b->AddDataset(this, {input, size, drop}, {{"column_kinds", kinds}}, output);
  }

 private:
  class Iterator : public tf::data::DatasetIterator<Dataset> {
   public:
    explicit Iterator(const Params& params) : DatasetIterator<Dataset>(params) {}

    absl::Status Initialize(IteratorContext* ctx) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      return dataset()->input_->MakeIterator(ctx, this, prefix(), &input_);
    }

   protected:
    // After an error the queue keeps its rows, so that continuing loses none.
    absl::Status GetNextInternal(IteratorContext* ctx, std::vector<Tensor>* out,
                                 bool* end_of_sequence) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto size = static_cast<size_t>(config().batch_size);
      while (input_ != nullptr && rows_.waiting() < size) {
        Element element;
        bool end = false;
        TF_RETURN_IF_ERROR(input_->GetNext(ctx, &element, &end));
        if (end) {
          input_.reset();
          break;
        }
        TF_RETURN_IF_ERROR(Check(config(), element));
        rows_.Push(BlockOf(std::move(element)));
      }
      const size_t count = std::min(size, rows_.waiting());
      *end_of_sequence = count == 0 || (config().drop_remainder && count < size);
      if (*end_of_sequence) return absl::OkStatus();
      Emit(ctx, count, out);
      rows_.Drop(count);
      return absl::OkStatus();
    }

    std::shared_ptr<tf::data::model::Node> CreateNode(
        IteratorContext* ctx, tf::data::model::Node::Args args) const override {
      return tf::data::model::MakeUnknownRatioNode(std::move(args));
    }

    absl::Status SaveInternal(tf::data::SerializationContext* ctx,
                              tf::data::IteratorStateWriter* writer) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      TF_RETURN_IF_ERROR(
          writer->WriteScalar(prefix(), kEnded, static_cast<int64_t>(input_ == nullptr)));
      if (input_ != nullptr) TF_RETURN_IF_ERROR(SaveInput(ctx, writer, input_));
      const auto& blocks = rows_.blocks();
      TF_RETURN_IF_ERROR(
          writer->WriteScalar(prefix(), kBlocks, static_cast<int64_t>(blocks.size())));
      for (size_t i = 0; i < blocks.size(); ++i) {
        TF_RETURN_IF_ERROR(
            writer->WriteScalar(prefix(), Taken(i), static_cast<int64_t>(blocks[i].taken)));
        for (size_t j = 0; j < blocks[i].owner.size(); ++j) {
          TF_RETURN_IF_ERROR(writer->WriteTensor(prefix(), Part(i, j), blocks[i].owner[j]));
        }
      }
      return absl::OkStatus();
    }

    absl::Status RestoreInternal(IteratorContext* ctx,
                                 tf::data::IteratorStateReader* reader) override {
      const std::lock_guard<std::mutex> lock(mutex_);
      int64_t ended, blocks;
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kEnded, &ended));
      if (ended != 0) {
        input_.reset();
      } else {
        TF_RETURN_IF_ERROR(RestoreInput(ctx, reader, input_));
      }
      rows_ = {};
      TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kBlocks, &blocks));
      for (int64_t i = 0; i < blocks; ++i) {
        Element element(dataset()->input_->output_dtypes().size());
        for (size_t j = 0; j < element.size(); ++j) {
          TF_RETURN_IF_ERROR(reader->ReadTensor(ctx->flr(), prefix(), Part(i, j), &element[j]));
        }
        TF_RETURN_IF_ERROR(Check(config(), element));
        int64_t taken;
        TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), Taken(i), &taken));
        Block<Element> block = BlockOf(std::move(element));
        block.taken = std::min(static_cast<size_t>(taken), block.order.size());
        rows_.Push(std::move(block));
      }
      return absl::OkStatus();
    }

   private:
    static constexpr const char* kEnded = "ended";
    static constexpr const char* kBlocks = "blocks";

    static std::string Taken(size_t block) { return absl::StrCat("taken_", block); }
    static std::string Part(size_t block, size_t tensor) {
      return absl::StrCat("block_", block, "_", tensor);
    }

    const Config& config() const { return dataset()->config_; }

    void Emit(IteratorContext* ctx, size_t count, std::vector<Tensor>* out)
        TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      out->reserve(config().output_types.size());
      for (size_t i = 0, at = kHead; i < config().kinds.size();
           at += Tensors(config().kinds[i++])) {
        if (config().output_types[at - kHead] == tf::DT_INT64) {
          EmitColumn<int64_t>(ctx, config().kinds[i], at, count, out);
        } else {
          EmitColumn<float>(ctx, config().kinds[i], at, count, out);
        }
      }
    }

    template <typename T>
    T* Vector(IteratorContext* ctx, size_t size, std::vector<Tensor>* out) {
      out->emplace_back(ctx->allocator({}), tf::DataTypeToEnum<T>::value,
                        tf::TensorShape({static_cast<int64_t>(size)}));
      return out->back().template vec<T>().data();
    }

    template <typename T>
    void EmitColumn(IteratorContext* ctx, Kind kind, size_t at, size_t count,
                    std::vector<Tensor>* out) TF_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      const auto values = [at](const Block<Element>& block) {
        return block.owner[at].template vec<T>().data();
      };
      if (kind != Kind::kList) {
        T* to = Vector<T>(ctx, count, out);
        rows_.Next(count, [&](const Block<Element>& block, const uint32_t* rows, size_t own) {
          to = kind == Kind::kRow ? GatherRows(values(block), rows, own, to)
                                  : GatherGroups(values(block), block.group.data(), rows, own, to);
        });
        return;
      }
      const auto splits = [at](const Block<Element>& block) {
        return Numbers(block.owner[at + 1]);
      };
      Element ends;
      int64_t* end = Vector<int64_t>(ctx, count + 1, &ends);
      int64_t total = *end++ = 0;
      rows_.Next(count, [&](const Block<Element>& block, const uint32_t* rows, size_t own) {
        total = GatherEnds(splits(block), rows, own, total, end);
        end += own;
      });
      T* to = Vector<T>(ctx, static_cast<size_t>(total), out);
      rows_.Next(count, [&](const Block<Element>& block, const uint32_t* rows, size_t own) {
        to = GatherLists(values(block), splits(block), rows, own, to);
      });
      out->push_back(std::move(ends[0]));
    }

    std::mutex mutex_;
    std::unique_ptr<tf::data::IteratorBase> input_ TF_GUARDED_BY(mutex_);  // null at end
    RowBatcher<Element> rows_ TF_GUARDED_BY(mutex_);
  };

  DatasetBase* const input_;
  const Config config_;
};

class RowBatchesDatasetOp : public tf::data::UnaryDatasetOpKernel {
 public:
  explicit RowBatchesDatasetOp(tf::OpKernelConstruction* ctx) : UnaryDatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("column_kinds", &config_.names));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_types", &config_.output_types));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("output_shapes", &config_.output_shapes));
    for (const std::string& name : config_.names) {
      config_.kinds.push_back(name == "row"    ? Kind::kRow
                              : name == "list" ? Kind::kList
                                               : Kind::kGroup);
    }
  }

 protected:
  void MakeDataset(tf::OpKernelContext* ctx, DatasetBase* input, DatasetBase** output) override {
    Config config = config_;
    OP_REQUIRES_OK(ctx, tf::data::ParseScalarArgument(ctx, "batch_size", &config.batch_size));
    OP_REQUIRES_OK(ctx,
                   tf::data::ParseScalarArgument(ctx, "drop_remainder", &config.drop_remainder));
    OP_REQUIRES(ctx, config.batch_size >= 1,
                Invalid("batch_size must be at least 1, got ", config.batch_size));
    tf::DataTypeVector expected(kHead, tf::DT_INT64);
    size_t columns = 0;
    for (const Kind kind : config.kinds) {
      columns += Tensors(kind);
      OP_REQUIRES(ctx,
                  columns <= config.output_types.size() &&
                      (kind != Kind::kList || config.output_types[columns - 1] == tf::DT_INT64),
                  Invalid("output_types ", tf::DataTypeVectorString(config.output_types),
                          " lack a column, or a list's row splits"));
    }
    expected.insert(expected.end(), config.output_types.begin(), config.output_types.end());
    OP_REQUIRES(
        ctx, columns == config.output_types.size() && input->output_dtypes() == expected,
        Invalid("the input must have ", tf::DataTypeVectorString(expected), " of ", columns,
                " columns' tensors, got ", tf::DataTypeVectorString(input->output_dtypes())));
    *output = new Dataset(ctx, input, std::move(config));
  }

 private:
  Config config_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaRowBatchesDataset").Device(tf::DEVICE_CPU), RowBatchesDatasetOp);

}  // namespace
}  // namespace gmeta::rows
