// RowMoves: the flights of rows of one form between GPU memory and host memory (tiers/flights.cuh),
// in the order of their prefetches.
//
// All calls are made in the table's turn. The copies run on a stream of their own, which waits for
// the kernels that list them; the kernel that installs them waits for the copies. The host waits
// for neither.

#ifndef GMETA_OPS_TABLE_GPU_TIERS_ROW_MOVES_CUH_
#define GMETA_OPS_TABLE_GPU_TIERS_ROW_MOVES_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/table/gpu/memory/device_memory.cuh"
#include "ops/table/gpu/tiers/table_place.h"

namespace gmeta {

struct FlightView;

class RowMoves {
 public:
  // `form` and `form_mask` define the rows' form by their numbers. Rows that one of the last
  // lookahead + 2 prefetches has requested stay in GPU memory.
  RowMoves(const gmeta_gpu_allocator& allocator, uint32_t lookahead, uint32_t form,
           uint32_t form_mask);
  ~RowMoves();
  RowMoves(const RowMoves&) = delete;
  RowMoves& operator=(const RowMoves&) = delete;

  // Sends a batch's far rows on their way, and near ones to make room, until at most `most_free`
  // near rows are free.
  void Send(const TablePlace& place, const int64_t* keys, uint32_t n, uint32_t most_free,
            cudaStream_t stream);
  // Installs flights until `most` are on their way, and further ones as far as their copies are
  // done.
  void Install(const TablePlace& place, size_t most, cudaStream_t stream);

  bool any() const { return !flights_.empty(); }
  size_t bytes() const;

 private:
  struct Flight {
    DeviceMemory memory;  // counts, and lists of `most` moves for each direction
    uint32_t most = 0, number = 0, step = 0;
    cudaEvent_t copied = nullptr;
  };

  FlightView View(const TablePlace& place, const Flight& flight) const;
  std::unique_ptr<Flight> Take(uint32_t n, cudaStream_t stream);

  const gmeta_gpu_allocator allocator_;
  const uint32_t lookahead_, form_, form_mask_, multiprocessors_;
  uint32_t prefetches_ = 0;
  cudaStream_t stream_ = nullptr;  // of the copies
  cudaEvent_t listed_ = nullptr;
  DeviceMemory clock_;
  std::deque<std::unique_ptr<Flight>> flights_;  // on their way
  std::vector<std::unique_ptr<Flight>> landed_;  // to be used again
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_TIERS_ROW_MOVES_CUH_
