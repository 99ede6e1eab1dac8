// CPU kernels that take whole records, and what admission remembers, out of a dynamic hash table
// and put them back.

#include <iterator>
#include <optional>
#include <string>

#include "ops/hash_table/kernels.h"

namespace gmeta {
namespace {

class ExportOp : public TableOp {
 public:
  explicit ExportOp(OpKernelConstruction* context) : TableOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("with_slots", &with_slots_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string&, Table& table) override {
    const int64_t dim = static_cast<int64_t>(table.dim());
    const int64_t slot_floats = with_slots_ ? static_cast<int64_t>(table.slot_floats()) : 0;
    absl::Status status;
    const auto allocate = [&](uint64_t rows, int64_t step) -> std::optional<RecordColumns> {
      const int64_t n = static_cast<int64_t>(rows);
      const TensorShape shapes[] = {
          TensorShape({n}), TensorShape({n, dim}), TensorShape({n, slot_floats}),
          TensorShape({n}), TensorShape({n}),      TensorShape({})};
      Tensor* tensors[6];
      for (int i = 0; i < 6 && status.ok(); ++i) {
        status = context->allocate_output(i, shapes[i], &tensors[i]);
      }
      if (!status.ok()) return std::nullopt;
      tensors[5]->scalar<int64_t>()() = step;
      return RecordColumns{tensors[0]->flat<int64_t>().data(), tensors[1]->flat<float>().data(),
                           with_slots_ ? tensors[2]->flat<float>().data() : nullptr,
                           tensors[3]->flat<int64_t>().data(), tensors[4]->flat<int64_t>().data()};
    };
    table.Export(allocate, PoolParallelFor(context));
    OP_REQUIRES_OK(context, status);
  }

 private:
  bool with_slots_;
};

class ExportShardsOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  bool takes_keys() const override { return false; }

  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    OP_REQUIRES_OK(context, CheckShape(context, name, "shards", 1, TensorShape({2})));
    OP_REQUIRES_OK(context, CheckShape(context, name, "min_last_step", 2, TensorShape({})));
    const auto shards = context->input(1).flat<int64_t>();
    const int64_t min_last_step = context->input(2).scalar<int64_t>()();
    OP_REQUIRES(context, 0 <= shards(0) && shards(0) <= shards(1) && shards(1) <= kLogicalShards,
                Invalid("table '", name, "': logical shards are [first, last) within [0, ",
                        kLogicalShards, "), got [", shards(0), ", ", shards(1), ")"));
    const int64_t limit = std::numeric_limits<uint32_t>::max();
    OP_REQUIRES(context, 0 <= min_last_step && min_last_step <= limit,
                Invalid("table '", name, "': min_last_step must lie in [0, ", limit, "], got ",
                        min_last_step));
    const LogicalRange range{static_cast<uint32_t>(shards(0)), static_cast<uint32_t>(shards(1))};
    absl::Status status;
    const auto allocate = [&](const ShardExportSizes& sizes) -> std::optional<ShardExportColumns> {
      const int64_t n = static_cast<int64_t>(sizes.rows);
      const int64_t count = static_cast<int64_t>(range.size());
      const TensorShape shapes[] = {TensorShape({n}),
                                    TensorShape({n, static_cast<int64_t>(table.dim())}),
                                    TensorShape({n, static_cast<int64_t>(table.slot_floats())}),
                                    TensorShape({n}),
                                    TensorShape({n}),
                                    TensorShape({count + 1}),
                                    TensorShape({static_cast<int64_t>(sizes.removed)}),
                                    TensorShape({count + 1}),
                                    TensorShape({count}),
                                    TensorShape({}),
                                    TensorShape({}),
                                    TensorShape({static_cast<int64_t>(sizes.waiting)}),
                                    TensorShape({static_cast<int64_t>(sizes.waiting)}),
                                    TensorShape({count + 1})};
      constexpr int kOutputs = 14;
      Tensor* tensors[kOutputs];
      for (int i = 0; i < kOutputs && status.ok(); ++i) {
        status = context->allocate_output(i, shapes[i], &tensors[i]);
      }
      if (!status.ok()) return std::nullopt;
      tensors[9]->scalar<int64_t>()() = sizes.step;
      tensors[10]->scalar<bool>()() = sizes.journal_whole;
      const auto ints = [&](int i) { return tensors[i]->flat<int64_t>().data(); };
      return ShardExportColumns{{ints(0), tensors[1]->flat<float>().data(),
                                 tensors[2]->flat<float>().data(), ints(3), ints(4)},
                                ints(5),
                                ints(6),
                                ints(7),
                                ints(8),
                                ints(11),
                                ints(12),
                                ints(13)};
    };
    table.ExportShards(range, static_cast<uint32_t>(min_last_step), allocate,
                       PoolParallelFor(context));
    OP_REQUIRES_OK(context, status);
  }
};

class StartJournalOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  bool takes_keys() const override { return false; }

  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    OP_REQUIRES_OK(context, CheckShape(context, name, "limit", 1, TensorShape({})));
    const int64_t limit = context->input(1).scalar<int64_t>()();
    OP_REQUIRES(context, limit >= 0,
                Invalid("table '", name, "': the journal's limit must be at least 0, got ", limit));
    table.StartJournal(static_cast<size_t>(limit));
  }
};

class JournalSavedOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext*, const std::string&, Table& table) override { table.DropCutRemovals(); }
};

class ImportOp : public TableOp {
 public:
  explicit ImportOp(OpKernelConstruction* context) : TableOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replace", &replace_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    const int64_t n = KeyCount(context);
    const int64_t dim = static_cast<int64_t>(table.dim());
    const int64_t slot_floats = static_cast<int64_t>(table.slot_floats());
    OP_REQUIRES_OK(context, CheckShape(context, name, "rows", 2, TensorShape({n, dim})));
    OP_REQUIRES_OK(context,
                   CheckShape(context, name, "optimizer slots", 3, TensorShape({n, slot_floats})));
    OP_REQUIRES_OK(context, CheckShape(context, name, "frequency", 4, TensorShape({n})));
    OP_REQUIRES_OK(context, CheckShape(context, name, "last_step", 5, TensorShape({n})));
    OP_REQUIRES_OK(context, CheckShape(context, name, "step", 6, TensorShape({})));
    const ConstRecordColumns columns{Keys(context), context->input(2).flat<float>().data(),
                                     context->input(3).flat<float>().data(),
                                     context->input(4).flat<int64_t>().data(),
                                     context->input(5).flat<int64_t>().data()};
    if (replace_) {
      table.Replace(columns, n, context->input(6).scalar<int64_t>()(), PoolParallelFor(context));
    } else {
      table.Merge(columns, n, PoolParallelFor(context));
    }
  }

 private:
  bool replace_;
};

class ExportAdmissionOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Table& table) override {
    absl::Status status;
    const auto allocate = [&](uint64_t counters,
                              uint64_t filter_bytes) -> std::optional<AdmissionColumns> {
      const uint64_t sizes[] = {counters, counters, filter_bytes};
      Tensor* tensors[3];
      for (int i = 0; i < 3 && status.ok(); ++i) {
        status =
            context->allocate_output(i, TensorShape({static_cast<int64_t>(sizes[i])}), &tensors[i]);
      }
      if (!status.ok()) return std::nullopt;
      return AdmissionColumns{tensors[0]->flat<int64_t>().data(),
                              tensors[1]->flat<int64_t>().data(),
                              tensors[2]->flat<uint8_t>().data()};
    };
    table.ExportAdmission(allocate);
    OP_REQUIRES_OK(context, status);
  }
};

class ExportFilterOp : public TableOp {
 public:
  using TableOp::TableOp;

 protected:
  bool takes_keys() const override { return false; }

  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    OP_REQUIRES_OK(context, CheckShape(context, name, "filters", 1, TensorShape({2})));
    const auto range = context->input(1).flat<int64_t>();
    const int64_t filters = static_cast<int64_t>(table.filters());
    const int64_t width = static_cast<int64_t>(table.filter_bytes());
    OP_REQUIRES(context, 0 <= range(0) && range(0) <= range(1) && range(1) <= filters,
                Invalid("table '", name, "': filters are [first, last) within [0, ", filters,
                        "), got [", range(0), ", ", range(1), ")"));
    SetScalar(context, 1, filters);
    Tensor* out;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, TensorShape({range(1) - range(0), width}), &out));
    uint8_t* to = out->flat<uint8_t>().data();
    for (int64_t i = range(0); i < range(1); ++i, to += width) {
      table.ExportFilter(static_cast<size_t>(i), to);
    }
  }
};

class ImportAdmissionOp : public TableOp {
 public:
  explicit ImportAdmissionOp(OpKernelConstruction* context) : TableOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replace", &replace_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string& name, Table& table) override {
    OP_REQUIRES_OK(context,
                   CheckShape(context, name, "counts", 2, TensorShape({KeyCount(context)})));
    const ConstAdmissionColumns columns{Keys(context), context->input(2).flat<int64_t>().data(),
                                        context->input(3).flat<uint8_t>().data()};
    OP_REQUIRES_OK(context, CheckShape(context, name, "first_filter", 4, TensorShape({})));
    const int64_t first = context->input(4).scalar<int64_t>()();
    const int64_t filter_bytes = context->input(3).NumElements();
    const size_t n = static_cast<size_t>(KeyCount(context));
    const size_t bytes = static_cast<size_t>(filter_bytes);
    const bool fits = replace_ ? table.ReplaceAdmission(columns, n, bytes)
                               : first >= 0 && table.MergeAdmission(columns, n, bytes,
                                                                    static_cast<size_t>(first));
    OP_REQUIRES(context, fits,
                Invalid("table '", name, "': a filter of ", filter_bytes,
                        " bytes is not of this table's admission: make the table with the "
                        "filter's capacity and error, and the eviction bound, that it was saved "
                        "with"));
  }

 private:
  bool replace_;
};

REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExport").Device(DEVICE_CPU), ExportOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExportShards").Device(DEVICE_CPU), ExportShardsOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableStartJournal").Device(DEVICE_CPU), StartJournalOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableJournalSaved").Device(DEVICE_CPU), JournalSavedOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableJournalWhole").Device(DEVICE_CPU),
                        ScalarOp<&Table::JournalWhole>);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableImport").Device(DEVICE_CPU), ImportOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExportAdmission").Device(DEVICE_CPU),
                        ExportAdmissionOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExportFilter").Device(DEVICE_CPU), ExportFilterOp);
REGISTER_KERNEL_BUILDER(Name("GmetaHashTableImportAdmission").Device(DEVICE_CPU),
                        ImportAdmissionOp);

}  // namespace
}  // namespace gmeta
