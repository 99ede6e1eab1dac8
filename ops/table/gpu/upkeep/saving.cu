// How a GPU table is saved and loaded. A save selects records by a scan of the index, sorts them by
// logical shard and key on the GPU, and copies them a piece at a time through a buffer of a few
// megabytes. So it needs memory for the keys of a range and not for its records.

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/records.cuh"
#include "ops/table/gpu/table.cuh"
#include "ops/table/gpu/upkeep/stable_sort.cuh"
#include "ops/unique/gpu/workspace.cuh"

namespace gmeta {
namespace {

constexpr size_t kPieceBytes = size_t{32} << 20;

// Copies between host and device memory in any direction.
template <class T>
void Copy(T* to, const T* from, size_t count, cudaStream_t stream) {
  CheckCuda(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDefault, stream),
            "copying records");
}

struct Piece {
  int64_t* keys;
  PieceColumns columns;
};

Piece CutPiece(Workspace* space, size_t rows, size_t dim, size_t slot_floats) {
  Piece piece{};
  piece.keys = space->Take<int64_t>(rows);
  piece.columns.rows = space->Take<float>(rows * dim);
  piece.columns.slots = space->Take<float>(rows * slot_floats);
  piece.columns.frequency = space->Take<int64_t>(rows);
  piece.columns.last_step = space->Take<int64_t>(rows);
  return piece;
}

size_t PieceRows(size_t record_bytes, size_t rows) {
  return std::min(rows, std::max<size_t>(256, kPieceBytes / (record_bytes + 24)));
}

// Keys and numbers of the rows to save, and workspace to sort them.
struct Selected {
  int64_t *keys, *sorted_keys;
  uint32_t *numbers, *sorted_numbers, *order, *sorted_order;
  uint16_t *logical, *sorted_logical;
  void* sort;
  size_t sort_bytes;
};

Selected CutSelected(Workspace* space, size_t count) {
  Selected s{};
  count = std::max<size_t>(count, 1);
  s.keys = space->Take<int64_t>(count);
  s.sorted_keys = space->Take<int64_t>(count);
  s.numbers = space->Take<uint32_t>(count);
  s.sorted_numbers = space->Take<uint32_t>(count);
  s.order = space->Take<uint32_t>(count);
  s.sorted_order = space->Take<uint32_t>(count);
  s.logical = space->Take<uint16_t>(count);
  s.sorted_logical = space->Take<uint16_t>(count);
  s.sort_bytes = std::max(StableSortBytes<int64_t>(count), StableSortBytes<uint16_t>(count));
  s.sort = space->Take<char>(s.sort_bytes);
  return s;
}

// Sorts by logical shard, then by key. It sorts by key first, because the sorts are stable.
void Sort(const Selected& s, uint32_t count, cudaStream_t stream) {
  StableSort(s.sort, s.sort_bytes, s.keys, s.sorted_keys, s.numbers, s.sorted_numbers, count, 64,
             stream);
  Launch(NumberByShard, BlocksOf(count), kBlockThreads, 0, stream, "numbering records",
         s.sorted_keys, count, s.logical, s.order);
  StableSort(s.sort, s.sort_bytes, s.logical, s.sorted_logical, s.order, s.sorted_order, count,
             kLog2LogicalShards, stream);
  Launch(Permute, BlocksOf(count), kBlockThreads, 0, stream, "sorting records", s.sorted_keys,
         s.sorted_numbers, s.sorted_order, count, s.keys, s.numbers);
}

// Writes the columns of removed and waiting keys.
void WriteRemembered(const ShardSelection& selection, LogicalRange range,
                     const gmeta_gpu_table_export_columns& to) {
  const auto split = [&](int64_t* splits, const auto& items) {
    if (splits == nullptr) return;
    std::fill_n(splits, range.size() + 1, 0);
    for (const auto& item : items) ++splits[item.logical - range.first + 1];
    std::partial_sum(splits, splits + range.size() + 1, splits);
  };
  split(to.removed_splits, selection.removed);
  split(to.waiting_splits, selection.waiting);
  for (size_t i = 0; to.removed != nullptr && i < selection.removed.size(); ++i) {
    to.removed[i] = selection.removed[i].key;
  }
  for (size_t i = 0; i < selection.waiting.size(); ++i) {
    if (to.waiting != nullptr) to.waiting[i] = selection.waiting[i].key;
    if (to.waiting_counts != nullptr) to.waiting_counts[i] = selection.waiting[i].count;
  }
}

}  // namespace

void GpuTable::ExportShards(LogicalRange range, uint32_t min_last_step, bool cut_journal,
                            gmeta_gpu_table_allocate allocate, void* context) {
  const Turn turn(this);
  const cudaStream_t stream = own_stream_;
  // There are two scans: the first counts how much memory the second needs.
  const Scan scan{range, min_last_step, policies_.all_shards(), policies_.log2_shards()};
  uint32_t* const counts =
      static_cast<uint32_t*>(Scratch(2 * sizeof(uint32_t) * kLogicalShards, stream));
  CheckCuda(cudaMemsetAsync(counts, 0, 2 * sizeof(uint32_t) * kLogicalShards, stream),
            "clearing counts of shards");
  LaunchSelect(scan, nullptr, nullptr, counts, counts + kLogicalShards, stream);
  const uint32_t count = ReadCounters(stream).selected;
  std::vector<uint32_t> live(kLogicalShards), found(kLogicalShards);
  Copy(live.data(), counts, kLogicalShards, stream);
  Copy(found.data(), counts + kLogicalShards, kLogicalShards, stream);
  CheckCuda(cudaStreamSynchronize(stream), "reading counts of shards");
  const size_t piece_rows =
      std::min<size_t>(PieceRows(layout_.bytes(), std::max<size_t>(count, 1)), MostStaged());
  Workspace space(nullptr);
  CutSelected(&space, count);
  CutPiece(&space, piece_rows, dim(), slot_floats());
  space = Workspace(Scratch(space.bytes(), stream));
  const Selected selected = CutSelected(&space, count);
  const Piece piece = CutPiece(&space, piece_rows, dim(), slot_floats());
  if (count > 0) {
    LaunchSelect(scan, selected.keys, selected.numbers, nullptr, nullptr, stream);
    Sort(selected, count, stream);
  }

  ShardSelection selection;
  if (cut_journal) selection = policies_.CutRange(range);
  const gmeta_gpu_table_export_sizes sizes = {count, static_cast<int64_t>(selection.removed.size()),
                                              static_cast<int64_t>(selection.waiting.size()), step_,
                                              policies_.IsWhole(range)};
  gmeta_gpu_table_export_columns to{};
  if (allocate(context, &sizes, &to) != 0) {
    throw CudaError(GMETA_CUDA_CANCELLED, "table '" + options_.name + "': an export was cancelled");
  }
  if (to.keys != nullptr && count > 0) Copy(to.keys, selected.keys, count, stream);
  PieceColumns columns = piece.columns;
  if (to.rows == nullptr) columns.rows = nullptr;
  if (to.slots == nullptr || slot_floats() == 0) columns.slots = nullptr;
  if (to.frequency == nullptr) columns.frequency = nullptr;
  if (to.last_step == nullptr) columns.last_step = nullptr;
  for (size_t done = 0; done < count; done += piece_rows) {
    const size_t n = std::min(piece_rows, count - done);
    Stage(selected.numbers + done, static_cast<uint32_t>(n), stream);
    WithRows([&](const auto& rows) {
      using Rows = std::decay_t<decltype(rows)>;
      Launch(ReadRecords<Rows>, BlocksOf(n * kWarp), kBlockThreads, 0, stream, "reading records",
             rows, selected.numbers + done, static_cast<uint32_t>(n), columns);
    });
    if (columns.rows != nullptr) Copy(to.rows + done * dim(), columns.rows, n * dim(), stream);
    if (columns.slots != nullptr) {
      Copy(to.slots + done * slot_floats(), columns.slots, n * slot_floats(), stream);
    }
    if (columns.frequency != nullptr) Copy(to.frequency + done, columns.frequency, n, stream);
    if (columns.last_step != nullptr) Copy(to.last_step + done, columns.last_step, n, stream);
  }
  CheckCuda(cudaStreamSynchronize(stream), "copying records");
  scratch_ = DeviceMemory();  // only saves need it so large

  WriteRemembered(selection, range, to);
  if (to.live != nullptr) {
    std::copy(live.begin() + range.first, live.begin() + range.last, to.live);
  }
  if (to.row_splits != nullptr) {
    to.row_splits[0] = 0;
    for (uint32_t i = 0; i < range.size(); ++i) {
      to.row_splits[i + 1] = to.row_splits[i] + found[range.first + i];
    }
  }
}

std::pair<uint64_t, uint64_t> GpuTable::CountForms(const ImportColumns& from, size_t first,
                                                   size_t n, cudaStream_t stream) {
  if (!half_) return {n, 0};
  std::vector<int64_t> keys(n), frequency(n), last_step(n);
  Copy(keys.data(), from.keys + first, n, stream);
  Copy(frequency.data(), from.frequency + first, n, stream);
  Copy(last_step.data(), from.last_step + first, n, stream);
  CheckCuda(cudaStreamSynchronize(stream), "reading frequencies");
  uint64_t halves = 0;
  for (size_t i = 0; i < n; ++i) {
    const SweepSchedule sweeps =
        options_.half.Sweeps(policies_.ShardOf(keys[i]), policies_.shards());
    halves += options_.half.IsToBeHalf(
        {static_cast<uint32_t>(frequency[i]), static_cast<uint32_t>(last_step[i])},
        sweeps.Latest(static_cast<uint32_t>(step_)));
  }
  return {n - halves, halves};
}

void GpuTable::Import(const ImportColumns& from, int64_t n, int64_t step, bool replace) {
  if (replace) Clear();
  const Turn turn(this);
  const cudaStream_t stream = own_stream_;
  InstallMoves(0, stream);
  if (replace) step_ = step;
  policies_.BreakJournals();
  EndEpochs(policies_.all_shards(), stream);
  if (n == 0) return;
  const size_t total = static_cast<size_t>(n);
  // Rows that are to go to disk do so before the next piece comes.
  const bool by_piece = full_disk_ != nullptr;
  if (!by_piece) {
    const auto [full, half] = CountForms(from, 0, total, stream);
    EnsureRoom(full, half, stream);
  }
  const size_t piece_rows = PieceRows(layout_.bytes(), total);
  Workspace space(nullptr);
  CutPiece(&space, piece_rows, dim(), slot_floats());
  space = Workspace(Scratch(space.bytes(), stream));
  const Piece piece = CutPiece(&space, piece_rows, dim(), slot_floats());
  for (size_t done = 0; done < total; done += piece_rows) {
    const size_t count = std::min(piece_rows, total - done);
    Copy(piece.keys, from.keys + done, count, stream);
    Copy(piece.columns.rows, from.rows + done * dim(), count * dim(), stream);
    if (slot_floats() > 0) {
      Copy(piece.columns.slots, from.slots + done * slot_floats(), count * slot_floats(), stream);
    }
    Copy(piece.columns.frequency, from.frequency + done, count, stream);
    Copy(piece.columns.last_step, from.last_step + done, count, stream);
    if (by_piece) {
      const auto [full, half] = CountForms(from, done, count, stream);
      EnsureRoomAndBring(full, half, piece.keys, static_cast<int64_t>(count), stream);
    }
    NoteGiven(stream);
    WithRows([&](const auto& rows) {
      using Rows = std::decay_t<decltype(rows)>;
      Launch(WriteRecords<Rows>, BlocksOf(count), kBlockThreads, 0, stream, "writing records",
             index(), rows, piece.keys, static_cast<uint32_t>(count), piece.columns,
             static_cast<uint32_t>(step_));
    });
    if (by_piece) NoteSize(ReadCounters(stream));
  }
  NoteSize(ReadCounters(stream));
}

void GpuTable::StartJournal(size_t limit) {
  const Turn turn(this);
  auto& journals = policies_.journals();
  for (RemovalJournal& journal : journals) {
    journal.Start(limit == 0 ? 0 : std::max<size_t>(limit / journals.size(), 2));
  }
}

void GpuTable::DropCutRemovals() {
  const Turn turn(this);
  for (RemovalJournal& journal : policies_.journals()) journal.DropCut();
}

bool GpuTable::JournalWhole() {
  const Turn turn(this);
  const auto& journals = policies_.journals();
  return std::all_of(journals.begin(), journals.end(),
                     [](const RemovalJournal& journal) { return journal.whole(); });
}

void GpuTable::ExportAdmission(gmeta_gpu_table_allocate_admission allocate, void* context) {
  const Turn turn(this);
  int64_t counters = 0, bytes = 0;
  for (AdmissionState& state : policies_.admission()) {
    std::visit(
        [&](const auto& own) {
          counters += static_cast<int64_t>(own.counters());
          bytes += static_cast<int64_t>(own.filter_bytes());
        },
        state);
  }
  gmeta_gpu_table_admission_columns to{};
  if (allocate(context, counters, bytes, &to) != 0) {
    throw CudaError(GMETA_CUDA_CANCELLED, "table '" + options_.name + "': an export was cancelled");
  }
  for (AdmissionState& state : policies_.admission()) {
    std::visit(
        [&](auto& own) {
          own.ForEachCounter([&](int64_t key, uint32_t count) {
            *to.keys++ = key;
            *to.counts++ = count;
          });
          to.filter = std::copy_n(own.filter(), own.filter_bytes(), to.filter);
        },
        state);
  }
}

size_t GpuTable::FilterBytes() {
  const Turn turn(this);
  return std::visit([](const auto& own) { return own.filter_bytes(); },
                    policies_.admission().front());
}

void GpuTable::ExportFilter(size_t shard, uint8_t* to) {
  const Turn turn(this);
  std::visit([&](auto& own) { std::copy_n(own.filter(), own.filter_bytes(), to); },
             policies_.admission()[shard]);
}

bool GpuTable::ImportAdmission(const int64_t* keys, const int64_t* counts, int64_t n,
                               const uint8_t* filter, size_t filter_bytes, size_t first,
                               bool replace) {
  const size_t own_bytes = FilterBytes();
  const Turn turn(this);
  auto& states = policies_.admission();
  if (own_bytes != 0) {
    const size_t given = filter_bytes / own_bytes;
    const bool fits = filter_bytes % own_bytes == 0 &&
                      (replace ? filter_bytes == 0 || given == states.size()
                               : first <= states.size() && given <= states.size() - first);
    if (!fits) return false;
  }
  if (replace) {
    first = 0;
    for (AdmissionState& state : states) std::visit([](auto& own) { own.Clear(); }, state);
  }
  for (size_t done = 0; own_bytes != 0 && done < filter_bytes; done += own_bytes, ++first) {
    std::visit(
        [&](auto& own) {
          std::transform(filter + done, filter + done + own_bytes, own.filter(), own.filter(),
                         [](uint8_t a, uint8_t b) { return std::max(a, b); });
        },
        states[first]);
  }
  for (int64_t i = 0; i < n; ++i) {
    std::visit([&](auto& own) { own.SetCounter(keys[i], static_cast<uint32_t>(counts[i])); },
               states[policies_.ShardOf(keys[i])]);
  }
  return true;
}

}  // namespace gmeta
