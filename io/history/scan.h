// The histories of many users at their moments, as one ragged batch.
//
// A batch has, for each request, the newest events of one user, in columns; row_splits divide the
// columns among the requests. A user without events at that moment has none. Requests of one
// user that follow each other read and decode the user's stripes once (snapshot.h), so a batch of
// one shard in the order of users costs least; no order is needed.

#ifndef GMETA_IO_HISTORY_SCAN_H_
#define GMETA_IO_HISTORY_SCAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/history/shard_index.h"
#include "io/history/snapshot.h"

namespace gmeta::history {

struct Request {
  int64_t user = 0;
  Moment moment;
};

struct Histories {
  std::vector<int64_t> row_splits{0};  // one more than requests
  std::vector<std::vector<int64_t>> columns;
};

struct ScanFault {
  SnapshotFault snapshot;
  size_t request = 0;  // the number of the one that has it

  bool ok() const { return snapshot.ok(); }
};

// Rebuilds histories of users of one shard.
//
// Args:
//   columns: The numbers of the stripes' columns to rebuild, in any order.
//   out: Receives the requests' histories, after those that it has; after a fault, those of the
//     requests before it.
inline ScanFault Scan(const ShardIndex& index, const std::vector<Request>& requests, int64_t group,
                      size_t longest, const std::vector<size_t>& columns, StripeSource* source,
                      Snapshot* snapshot, Histories* out) {
  out->columns.resize(columns.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto [places, count] = index.Find(requests[i].user);
    if (i == 0 || requests[i].user != requests[i - 1].user) snapshot->Forget();
    const SnapshotFault fault = snapshot->Read(places, count, group, requests[i].moment, longest,
                                               columns, source, &out->columns);
    if (!fault.ok()) return {fault, i};
    out->row_splits.push_back(out->row_splits.back() + static_cast<int64_t>(snapshot->kept()));
  }
  return {};
}

}  // namespace gmeta::history

#endif  // GMETA_IO_HISTORY_SCAN_H_
