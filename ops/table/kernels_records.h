// The ops that export whole records and the state of admission from a dynamic hash table, and
// import them, on any engine.

#ifndef GMETA_OPS_TABLE_KERNELS_RECORDS_H_
#define GMETA_OPS_TABLE_KERNELS_RECORDS_H_

#include <limits>
#include <optional>
#include <string>

#include "ops/table/host/table.h"
#include "ops/table/kernels.h"

namespace gmeta {

template <class Engine>
class ExportOp : public TableOp<Engine> {
 public:
  explicit ExportOp(OpKernelConstruction* context) : TableOp<Engine>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("with_slots", &with_slots_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string&, Engine& table) override {
    const int64_t dim = table.dim(), slot_floats = with_slots_ ? table.slot_floats() : 0;
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
    const absl::Status done = table.Export(context, with_slots_, allocate);
    OP_REQUIRES_OK(context, status);
    OP_REQUIRES_OK(context, done);
  }

 private:
  bool with_slots_;
};

template <class Engine>
class ExportShardsOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  bool takes_keys() const override { return false; }

  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "shards", 1, TensorShape({2})));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "min_last_step", 2, TensorShape({})));
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
                                    TensorShape({n, table.dim()}),
                                    TensorShape({n, table.slot_floats()}),
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
    const absl::Status done = table.ExportShards(context, range, min_last_step, allocate);
    OP_REQUIRES_OK(context, status);
    OP_REQUIRES_OK(context, done);
  }
};

// Exchanges two tables, for every graph that has captured one of them.
template <class Engine>
class SwapOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<HashTableResource<Engine>> tables[2];
    for (int i = 0; i < 2; ++i) {
      OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                  context, tensorflow::HandleFromInput(context, i), &tables[i]));
    }
    if (tables[0].get() != tables[1].get()) tables[0]->Swap(tables[1].get());
  }
};

template <class Engine>
class StartJournalOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  bool takes_keys() const override { return false; }

  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "limit", 1, TensorShape({})));
    const int64_t limit = context->input(1).scalar<int64_t>()();
    OP_REQUIRES(context, limit >= 0,
                Invalid("table '", name, "': the journal's limit must be at least 0, got ", limit));
    OP_REQUIRES_OK(context, table.StartJournal(limit));
  }
};

template <class Engine>
class JournalSavedOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Engine& table) override {
    OP_REQUIRES_OK(context, table.JournalSaved());
  }
};

template <class Engine>
class ImportOp : public TableOp<Engine> {
 public:
  explicit ImportOp(OpKernelConstruction* context) : TableOp<Engine>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replace", &replace_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    const int64_t n = this->KeyCount(context);
    const int64_t dim = table.dim(), slot_floats = table.slot_floats();
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "rows", 2, TensorShape({n, dim})));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "optimizer slots", 3,
                                             TensorShape({n, slot_floats})));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "frequency", 4, TensorShape({n})));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "last_step", 5, TensorShape({n})));
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "step", 6, TensorShape({})));
    const ConstRecordColumns columns{this->Keys(context), context->input(2).flat<float>().data(),
                                     context->input(3).flat<float>().data(),
                                     context->input(4).flat<int64_t>().data(),
                                     context->input(5).flat<int64_t>().data()};
    OP_REQUIRES_OK(context, table.Import(context, columns, n, context->input(6).scalar<int64_t>()(),
                                         replace_));
  }

 private:
  bool replace_;
};

template <class Engine>
class ExportAdmissionOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  void Run(OpKernelContext* context, const std::string&, Engine& table) override {
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
    const absl::Status done = table.ExportAdmission(allocate);
    OP_REQUIRES_OK(context, status);
    OP_REQUIRES_OK(context, done);
  }
};

template <class Engine>
class ExportFilterOp : public TableOp<Engine> {
 public:
  using TableOp<Engine>::TableOp;

 protected:
  bool takes_keys() const override { return false; }

  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "filters", 1, TensorShape({2})));
    const auto range = context->input(1).flat<int64_t>();
    int64_t filters = 0, width = 0;
    OP_REQUIRES_OK(context, table.Filters(&filters, &width));
    OP_REQUIRES(context, 0 <= range(0) && range(0) <= range(1) && range(1) <= filters,
                Invalid("table '", name, "': filters are [first, last) within [0, ", filters,
                        "), got [", range(0), ", ", range(1), ")"));
    this->SetScalar(context, 1, filters);
    Tensor* out;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, TensorShape({range(1) - range(0), width}), &out));
    uint8_t* to = out->flat<uint8_t>().data();
    for (int64_t i = range(0); i < range(1); ++i, to += width) {
      OP_REQUIRES_OK(context, table.ExportFilter(i, to));
    }
  }
};

template <class Engine>
class ImportAdmissionOp : public TableOp<Engine> {
 public:
  explicit ImportAdmissionOp(OpKernelConstruction* context) : TableOp<Engine>(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replace", &replace_));
  }

 protected:
  void Run(OpKernelContext* context, const std::string& name, Engine& table) override {
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "counts", 2,
                                             TensorShape({this->KeyCount(context)})));
    const ConstAdmissionColumns columns{this->Keys(context),
                                        context->input(2).flat<int64_t>().data(),
                                        context->input(3).flat<uint8_t>().data()};
    OP_REQUIRES_OK(context, this->CheckShape(context, name, "first_filter", 4, TensorShape({})));
    const int64_t first = context->input(4).scalar<int64_t>()();
    const int64_t filter_bytes = context->input(3).NumElements();
    bool fits = false;
    OP_REQUIRES_OK(context, table.ImportAdmission(columns, this->KeyCount(context), filter_bytes,
                                                  first, replace_, &fits));
    OP_REQUIRES(context, fits,
                Invalid("table '", name, "': a filter of ", filter_bytes,
                        " bytes is not of this table's admission: make the table with the "
                        "filter's capacity and error, and the eviction bound, that it was saved "
                        "with"));
  }

 private:
  bool replace_;
};

// Records are written to files and read from them, so they are in host memory, wherever the table
// is.
#define GMETA_REGISTER_RECORD_KERNELS(DEVICE, ENGINE)                                            \
  REGISTER_KERNEL_BUILDER(                                                                       \
      Name("GmetaHashTableSwap").Device(DEVICE).HostMemory("table").HostMemory("other"),         \
      SwapOp<ENGINE>);                                                                           \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExport")                                           \
                              .Device(DEVICE)                                                    \
                              .HostMemory("table")                                               \
                              .HostMemory("keys")                                                \
                              .HostMemory("rows")                                                \
                              .HostMemory("slots")                                               \
                              .HostMemory("frequency")                                           \
                              .HostMemory("last_step")                                           \
                              .HostMemory("step"),                                               \
                          ExportOp<ENGINE>);                                                     \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExportShards")                                     \
                              .Device(DEVICE)                                                    \
                              .HostMemory("table")                                               \
                              .HostMemory("shards")                                              \
                              .HostMemory("min_last_step")                                       \
                              .HostMemory("keys")                                                \
                              .HostMemory("rows")                                                \
                              .HostMemory("slots")                                               \
                              .HostMemory("frequency")                                           \
                              .HostMemory("last_step")                                           \
                              .HostMemory("row_splits")                                          \
                              .HostMemory("removed")                                             \
                              .HostMemory("removed_splits")                                      \
                              .HostMemory("live")                                                \
                              .HostMemory("step")                                                \
                              .HostMemory("journal_whole")                                       \
                              .HostMemory("waiting")                                             \
                              .HostMemory("waiting_counts")                                      \
                              .HostMemory("waiting_splits"),                                     \
                          ExportShardsOp<ENGINE>);                                               \
  REGISTER_KERNEL_BUILDER(                                                                       \
      Name("GmetaHashTableStartJournal").Device(DEVICE).HostMemory("table").HostMemory("limit"), \
      StartJournalOp<ENGINE>);                                                                   \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableJournalSaved").Device(DEVICE).HostMemory("table"), \
                          JournalSavedOp<ENGINE>);                                               \
  REGISTER_KERNEL_BUILDER(                                                                       \
      Name("GmetaHashTableJournalWhole").Device(DEVICE).HostMemory("table").HostMemory("whole"), \
      ScalarOp<ENGINE, &ENGINE::JournalWhole>);                                                  \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableImport")                                           \
                              .Device(DEVICE)                                                    \
                              .HostMemory("table")                                               \
                              .HostMemory("keys")                                                \
                              .HostMemory("rows")                                                \
                              .HostMemory("slots")                                               \
                              .HostMemory("frequency")                                           \
                              .HostMemory("last_step")                                           \
                              .HostMemory("step"),                                               \
                          ImportOp<ENGINE>);                                                     \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExportAdmission")                                  \
                              .Device(DEVICE)                                                    \
                              .HostMemory("table")                                               \
                              .HostMemory("keys")                                                \
                              .HostMemory("counts")                                              \
                              .HostMemory("filter"),                                             \
                          ExportAdmissionOp<ENGINE>);                                            \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableExportFilter")                                     \
                              .Device(DEVICE)                                                    \
                              .HostMemory("table")                                               \
                              .HostMemory("shards")                                              \
                              .HostMemory("counters")                                            \
                              .HostMemory("count"),                                              \
                          ExportFilterOp<ENGINE>);                                               \
  REGISTER_KERNEL_BUILDER(Name("GmetaHashTableImportAdmission")                                  \
                              .Device(DEVICE)                                                    \
                              .HostMemory("table")                                               \
                              .HostMemory("keys")                                                \
                              .HostMemory("counts")                                              \
                              .HostMemory("filter")                                              \
                              .HostMemory("first_filter"),                                       \
                          ImportAdmissionOp<ENGINE>)

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_KERNELS_RECORDS_H_
