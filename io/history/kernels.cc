// The ReadHistories kernel: scan.h over shards of a store, in parallel.
//
// Requests are sorted by shard and user, and cut into pieces of one shard each. A piece is scanned
// by one thread into buffers of its own, and copied to its requests' places at the end. So users of
// one file are read one after another, whatever the order of the batch, and the stripes of a user
// with several requests once.

#include "ops/common/kernels.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "io/group_batch/reader_stats.h"
#include "io/history/kernels_shards.h"
#include "io/history/scan.h"
#include "io/history/user_shard.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/util/work_sharder.h"

namespace gmeta::history {
namespace {

using tf::OpKernelContext;
using tf::Tensor;

constexpr size_t kPieceRequests = 32;  // more only if they are of one user
constexpr size_t kMostRequests = 512;
constexpr int64_t kRequestCost = 200'000;  // cycles of a history of a few hundred events

// Requests of one shard that a thread scans.
struct Piece {
  std::vector<size_t> numbers;  // of the requests, in the op's inputs
  int64_t shard = 0;
  Histories found;
  int64_t reads = 0, bytes = 0;
  std::vector<std::string> damaged;  // what is wrong with histories left empty
  absl::Status status;
};

class ReadHistoriesOp : public tf::OpKernel {
 public:
  explicit ReadHistoriesOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    std::vector<int64_t> columns;
    std::string on_bad;
    OP_REQUIRES_OK(c, opened_.Read(c));
    OP_REQUIRES_OK(c, c->GetAttr("group", &group_));
    OP_REQUIRES_OK(c, c->GetAttr("columns", &columns));
    OP_REQUIRES_OK(c, c->GetAttr("column_types", &types_));
    OP_REQUIRES_OK(c, c->GetAttr("longest", &longest_));
    OP_REQUIRES_OK(c, c->GetAttr("on_bad", &on_bad));
    OP_REQUIRES_OK(c, c->GetAttr("stats", &stats_));
    skip_ = on_bad == "skip";
    const bool fits =
        columns.size() == types_.size() &&
        std::all_of(columns.begin(), columns.end(), [](int64_t number) { return number >= 0; });
    OP_REQUIRES(c, fits,
                Invalid("ReadHistories: columns must be numbers from 0 on, one "
                        "for each of ",
                        types_.size(), " types"));
    columns_.assign(columns.begin(), columns.end());
  }

  void Compute(OpKernelContext* c) override {
    for (int i = 0; i < c->num_inputs(); ++i) {
      OP_REQUIRES(
          c, c->input(i).dims() == 1 && c->input(i).shape() == c->input(0).shape(),
          Invalid("ReadHistories takes vectors of one length, got shapes ",
                  c->input(0).shape().DebugString(), " and ", c->input(i).shape().DebugString()));
    }
    OP_REQUIRES_OK(c, CheckGenerations(c->input(0), c->input(3)));
    std::vector<Piece> pieces = Cut(c->input(0).vec<int64_t>().data(), c->input(0).NumElements());
    const auto* threads = c->device()->tensorflow_cpu_worker_threads();
    tf::Shard(threads->num_threads, threads->workers, static_cast<int64_t>(pieces.size()),
              kRequestCost * static_cast<int64_t>(kPieceRequests), [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) ScanPiece(c, &pieces[static_cast<size_t>(i)]);
              });
    for (const Piece& piece : pieces) OP_REQUIRES_OK(c, piece.status);
    Count(c->input(0).NumElements(), pieces);
    Join(c, pieces);
  }

 private:
  absl::Status CheckGenerations(const Tensor& users, const Tensor& generations) const {
    for (int64_t i = 0; i < users.NumElements(); ++i) {
      const int64_t generation = generations.vec<int64_t>()(i);
      if (generation <= opened_.generation) continue;
      return Invalid("gmeta: ", opened_.store, ": user ", users.vec<int64_t>()(i), ": generation ",
                     generation, " is asked for, and this is ", opened_.generation,
                     "; open a newer generation");
    }
    return absl::OkStatus();
  }

  std::vector<Piece> Cut(const int64_t* users, int64_t count) const {
    std::vector<int64_t> shard(static_cast<size_t>(count));
    for (size_t i = 0; i < shard.size(); ++i) shard[i] = UserShard(users[i], opened_.shards());
    std::vector<size_t> order(shard.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return std::tuple(shard[a], users[a], a) < std::tuple(shard[b], users[b], b);
    });
    std::vector<Piece> pieces;
    for (size_t number : order) {
      const size_t size = pieces.empty() ? kMostRequests : pieces.back().numbers.size();
      if (size == kMostRequests || pieces.back().shard != shard[number] ||
          (size >= kPieceRequests && users[pieces.back().numbers.back()] != users[number])) {
        pieces.emplace_back();
        pieces.back().shard = shard[number];
      }
      pieces.back().numbers.push_back(number);
    }
    return pieces;
  }

  void ScanPiece(OpKernelContext* c, Piece* piece) const {
    std::shared_ptr<OpenShard> shard;
    piece->status = OpenShards::Of()->Get(opened_, piece->shard, &shard);
    if (!piece->status.ok()) return;
    std::vector<Request> requests;
    requests.reserve(piece->numbers.size());
    const auto number = [&](int input, size_t i) { return c->input(input).vec<int64_t>()(i); };
    for (size_t i : piece->numbers) {
      requests.push_back({number(0, i), {number(1, i), number(2, i), number(3, i)}});
    }
    Snapshot snapshot;
    ShardSource source(shard.get());
    // A fault ends a scan; if it is skipped, the scan resumes after it.
    while (!requests.empty()) {
      const ScanFault fault = Scan(shard->index(), requests, group_, static_cast<size_t>(longest_),
                                   columns_, &source, &snapshot, &piece->found);
      if (fault.ok()) break;
      std::string message = Explain(*shard, source, requests[fault.request], fault.snapshot);
      // A file that can't be read isn't damaged data, and is never skipped.
      if (!skip_ || !source.status().ok()) {
        piece->status = absl::DataLossError("gmeta: " + message);
        return;
      }
      piece->damaged.push_back(std::move(message));
      piece->found.row_splits.push_back(piece->found.row_splits.back());
      requests.erase(requests.begin(),
                     requests.begin() + static_cast<ptrdiff_t>(fault.request) + 1);
    }
    piece->reads = static_cast<int64_t>(snapshot.reads());
    piece->bytes = static_cast<int64_t>(snapshot.bytes());
  }

  std::string Explain(const OpenShard& shard, const ShardSource& source, const Request& request,
                      const SnapshotFault& fault) const {
    const std::string path = shard.EventsPath(fault.place.file);
    if (!source.status().ok()) {
      return absl::StrCat(path, ": user ", request.user,
                          " has events in it: ", source.status().message());
    }
    return absl::StrCat(path, " at byte ", fault.place.offset, ": user ", request.user,
                        ", generation ", opened_.generation, ", stripe of ", fault.place.bytes,
                        " bytes: ", Describe(fault.fault),
                        "; `gmeta history verify` finds all damage");
  }

  void Count(int64_t histories, const std::vector<Piece>& pieces) const {
    const auto stats = group_batch::StatsRegistry::Global().Find(stats_);
    if (stats == nullptr) return;
    int64_t reads = 0, bytes = 0;
    for (const Piece& piece : pieces) {
      reads += piece.reads;
      bytes += piece.bytes;
      for (const std::string& message : piece.damaged) {
        stats->AddFault(records::Fault::kDamagedHistory, 0, message);
      }
    }
    stats->AddHistories(histories, reads, bytes);
  }

  void Join(OpKernelContext* c, const std::vector<Piece>& pieces) const {
    const int64_t count = c->input(0).NumElements();
    Tensor *row_splits = nullptr, *counts = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, {count + 1}, &row_splits));
    OP_REQUIRES_OK(c, c->allocate_output(1, {3}, &counts));
    auto splits = row_splits->vec<int64_t>();
    auto counted = counts->vec<int64_t>();
    splits.setZero();
    counted.setZero();
    for (const Piece& piece : pieces) {
      counted(0) += piece.reads;
      counted(1) += piece.bytes;
      counted(2) += static_cast<int64_t>(piece.damaged.size());
      for (size_t i = 0; i < piece.numbers.size(); ++i) {
        splits(static_cast<int64_t>(piece.numbers[i]) + 1) =
            piece.found.row_splits[i + 1] - piece.found.row_splits[i];
      }
    }
    std::partial_sum(splits.data(), splits.data() + count + 1, splits.data());
    for (size_t column = 0; column < columns_.size(); ++column) {
      Tensor* values = nullptr;
      OP_REQUIRES_OK(c, c->allocate_output(2 + static_cast<int>(column), {splits(count)}, &values));
      for (const Piece& piece : pieces) {
        for (size_t i = 0; i < piece.numbers.size(); ++i) {
          if (piece.found.row_splits[i] == piece.found.row_splits[i + 1]) continue;
          const int64_t* const from =
              piece.found.columns[column].data() + piece.found.row_splits[i];
          const int64_t* const end =
              piece.found.columns[column].data() + piece.found.row_splits[i + 1];
          Put(from, end, splits(static_cast<int64_t>(piece.numbers[i])), values);
        }
      }
    }
  }

  // Copies values to a place of a tensor; those of a float column are the numbers' bits.
  static void Put(const int64_t* from, const int64_t* end, int64_t place, Tensor* to) {
    if (to->dtype() == tf::DT_INT64) {
      std::copy(from, end, to->vec<int64_t>().data() + place);
      return;
    }
    float* out = to->vec<float>().data() + place;
    for (; from < end; ++from, ++out) {
      const auto bits = static_cast<uint32_t>(*from);
      std::memcpy(out, &bits, sizeof(bits));
    }
  }

  Opened opened_;
  int64_t group_ = 0, longest_ = 0, stats_ = 0;
  std::vector<size_t> columns_;
  tf::DataTypeVector types_;
  bool skip_ = false;
};

REGISTER_KERNEL_BUILDER(Name("GmetaReadHistories").Device(tf::DEVICE_CPU), ReadHistoriesOp);

}  // namespace
}  // namespace gmeta::history
