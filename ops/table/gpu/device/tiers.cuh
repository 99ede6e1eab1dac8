// Two tiers of a GPU table's rows: near ones in GPU memory, far ones in pinned host memory. The
// kernels that move rows between them.
//
// The index of all keys is in GPU memory, and a row's number tells its tier (rows.cuh). So a key is
// in one tier; kernels find and change every row where it is, a far one over the bus; and a move
// means nothing: it copies a record, and changes the entry of its key. Rows, statistics, evictions
// and saved content are those of a table that is all in GPU memory, to the last bit. Moves only
// decide what crosses the bus while a step waits.
//
// A flight is one prefetch's moves. It takes five kernels:
//
//   in the table's turn   ListWanted    the batch's far rows; marks its near rows as used
//                         PickLeaving   near rows to make room
//                         AssignRows    new numbers for both, and their headers as they are now
//   beside compute        CopyRecords   both ways over the bus at once, on a stream of its own
//   in a later turn       InstallMoves  changes the entries, frees the old numbers
//
// Until it is installed, a row is found at its old place, and may be changed there. AssignRows
// notes its header. An update gives a row a last step that no earlier update of the table has
// given. So if the last step is still the same, the copy is good (an imported last step that the
// table hasn't reached yet proves nothing); else InstallMoves copies the record once more. It
// always copies the header, which lookups change. If the key has another row by then, because it
// was promoted to another form, the move is given up. The host installs all flights before it
// removes, evicts or imports rows.
//
// Marks. There is one word per row:
//   near  the number of the last prefetch that asked for it, and kUsed, which the clock clears
//   far   0
//   kMoving while the row is on its way, so that no later flight takes it as well. A prefetch that
//   asks for a near row on its way out writes its own number: that move is then given up.
//
// The clock's hand goes around the index's slots, block by block. A near row is passed over if one
// of the latest prefetches has asked for it: its batch may be waiting or in progress (a pin). If it
// was used since the hand last came by, it is passed over once. As a scan of the index finds keys
// and numbers together, rows needn't know their keys. It reads 16 bytes per slot, densely.
//
// How many rows move: as many wanted ones as there are free near rows; the others stay, are counted
// as `crowded`, and are read over the bus. So many leave that the next flight finds free rows while
// what leaves in the flights before it may still be on its way: what a flight wants, times the
// flights, but at most `most_free`. A flight is taken to want what the latest ones wanted at the
// most, of which an eighth is forgotten with each flight.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_TIERS_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_TIERS_CUH_

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/rows.cuh"

namespace gmeta {

inline constexpr uint32_t kMoving = 0xffffffffu;
inline constexpr uint32_t kUsed = 0x80000000u;

struct Move {
  int64_t key;
  RowHeader header;  // when the number `to` was assigned
  uint32_t from, to;
};

struct FlightCounts {
  uint32_t wanted, picked;   // rows found
  uint32_t rising, leaving;  // rows that move
  uint32_t blocks;           // that have assigned numbers
};

struct Clock {
  unsigned long long hand;  // the block of slots that comes next
  uint32_t looked;          // blocks that this flight has looked at
  uint32_t wants;           // what a flight wants
};

// A flight as kernels see it. It moves rows of one form.
struct FlightView {
  IndexView index;
  RowsView rows;
  StorePools* pools;
  uint32_t form, form_mask;  // a row is of this form if its number has these bits of the mask
  uint32_t number;           // of the prefetch, from 1 on
  uint32_t pinned_from;      // rows that this prefetch or a later one asked for stay
  uint32_t flights;          // that may be on their way, with this one
  uint32_t most_free;        // near rows that are to be free, at most
  uint32_t step;             // of the table, when numbers were assigned
  uint32_t most;             // moves there is room for, in either direction
  Move *rising, *leaving;
  FlightCounts* counts;
  Clock* clock;

  __device__ bool Has(uint32_t row) const { return (row & form_mask) == form; }
  // How many rows rise, and how many are to leave. The pools mustn't have changed since the lists
  // were begun.
  __device__ uint32_t MostRising() const {
    return static_cast<uint32_t>(min(uint64_t{counts->wanted}, pools->near.free()));
  }
  __device__ uint32_t MostLeaving() const {
    const uint64_t there = pools->near.free() - MostRising() + pools->leaving;
    const uint64_t wants = max(clock->wants, counts->wanted);
    const uint64_t target = min(wants * flights, uint64_t{most_free});
    const uint64_t room = min(uint64_t{most}, pools->far.free());
    return there >= target ? 0 : static_cast<uint32_t>(min(target - there, room));
  }
};

__global__ void __launch_bounds__(kBlockThreads)
    ListWanted(const FlightView flight, const int64_t* keys, uint32_t n) {
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x, lane = threadIdx.x % kWarp;
  const bool active = at < n;
  const int64_t key = active ? keys[at] : 0;
  const uint32_t entry = FindEntries<false>(flight.index, key, active);
  bool wanted = entry != kNoEntry && flight.Has(entry - 1);
  const uint32_t row = (entry - 1) & ~flight.form_mask;
  if (wanted) {
    uint32_t* const mark = flight.rows.marks + row;
    if (flight.rows.IsNear(row)) {
      *mark = flight.number | kUsed;
      wanted = false;
    } else {
      wanted = atomicExch(mark, kMoving) != kMoving;
    }
  }
  const uint32_t mask = __ballot_sync(kFullWarp, wanted);
  if (mask == 0) return;
  uint32_t place = 0;
  if (lane == 0) place = atomicAdd(&flight.counts->wanted, __popc(mask));
  place = __shfl_sync(kFullWarp, place, 0) + __popc(mask & ((1u << lane) - 1));
  if (wanted) flight.rising[place] = {key, {}, row, 0};
}

// Goes around the index at most twice, with blocks of as many slots as a block has threads.
__global__ void __launch_bounds__(kBlockThreads) PickLeaving(const FlightView flight) {
  __shared__ uint64_t shared[1];
  const uint64_t rounds = flight.index.NumberOfBlocks(kBlockThreads);
  const uint32_t lane = threadIdx.x % kWarp, enough = flight.MostLeaving();
  if (enough == 0) return;
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool more = *const_cast<volatile uint32_t*>(&flight.counts->picked) < enough;
      shared[0] = more ? atomicAdd(&flight.clock->looked, 1u) : 2 * rounds;
    }
    __syncthreads();
    if (shared[0] >= 2 * rounds) return;
    const uint64_t at = (flight.clock->hand + shared[0]) % rounds;
    const KeySlot slot = ReadSlot(flight.index.Block(at, kBlockThreads) + threadIdx.x);
    bool leaves = slot.entry != kNoEntry && flight.Has(slot.entry - 1);
    const uint32_t row = (slot.entry - 1) & ~flight.form_mask;
    leaves = leaves && flight.rows.IsNear(row);
    if (leaves) {
      uint32_t* const mark = flight.rows.marks + row;
      const uint32_t last = *mark;
      const bool pinned = (last & ~kUsed) >= flight.pinned_from;  // a row on its way is, too
      leaves = !pinned && (last & kUsed) == 0;
      if (!pinned) *mark = last & ~kUsed;
    }
    const uint32_t mask = __ballot_sync(kFullWarp, leaves);
    if (mask == 0) continue;
    uint32_t place = 0;
    if (lane == 0) place = atomicAdd(&flight.counts->picked, __popc(mask));
    place = __shfl_sync(kFullWarp, place, 0) + __popc(mask & ((1u << lane) - 1));
    if (leaves && place < enough) {
      flight.rows.marks[row] = kMoving;
      flight.leaving[place] = {slot.key, {}, row, 0};
    }
  }
}

// Runs with at least one thread for each row that was found.
__global__ void __launch_bounds__(kBlockThreads)
    AssignRows(const FlightView flight, GpuCounters* counters) {
  const RowsView& rows = flight.rows;
  const uint64_t at = GlobalThread();
  const uint32_t wanted = flight.counts->wanted, rising = flight.MostRising();
  const uint32_t leaving = min(flight.counts->picked, flight.MostLeaving());
  if (at < rising) {
    Move& move = flight.rising[at];
    move.header = *rows.header(move.from);
    move.to = rows.near.At(flight.pools->near.taken + at);
  } else if (at < wanted) {
    rows.marks[flight.rising[at].from] = 0;
  }
  if (at < leaving) {
    Move& move = flight.leaving[at];
    move.header = *rows.header(move.from);
    move.to = rows.far.At(flight.pools->far.taken + at);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&flight.counts->blocks, 1u) + 1 != gridDim.x) return;
  flight.counts->rising = rising;
  flight.counts->leaving = leaving;
  flight.pools->near.taken += rising;
  flight.pools->far.taken += leaving;
  flight.pools->moving += rising + leaving;
  flight.pools->leaving += leaving;
  counters->crowded += wanted - rising;
  flight.clock->hand += flight.clock->looked;
  flight.clock->looked = 0;
  flight.clock->wants = max(flight.clock->wants - flight.clock->wants / 8, wanted);
}

// Copies a record. The whole warp calls it. Each lane loads some vectors before it stores them,
// because a load over the bus takes long.
template <class Vec>
__device__ inline void CopyRecord(const RowsView& rows, uint32_t from, uint32_t to) {
  constexpr uint32_t kAhead = 4;
  const uint32_t vectors = rows.stride * sizeof(uint32_t) / sizeof(Vec);
  const Vec* const source = reinterpret_cast<const Vec*>(rows.weights(from));
  Vec* const target = reinterpret_cast<Vec*>(rows.weights(to));
  for (uint32_t c = threadIdx.x % kWarp; c < vectors; c += kAhead * kWarp) {
    Vec read[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (c + i * kWarp < vectors) read[i] = __ldcg(source + c + i * kWarp);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (c + i * kWarp < vectors) target[c + i * kWarp] = read[i];
    }
  }
}

// Each warp takes one record at a time; those that rise and those that leave alternate, so that the
// bus is busy in both directions.
template <class Vec>
__global__ void __launch_bounds__(kBlockThreads) CopyRecords(const FlightView flight) {
  const uint32_t rising = flight.counts->rising, leaving = flight.counts->leaving;
  const uint32_t both = min(rising, leaving);
  const uint32_t warps = gridDim.x * kBlockThreads / kWarp;
  for (uint32_t i = static_cast<uint32_t>(GlobalThread() / kWarp); i < rising + leaving;
       i += warps) {
    const bool rises = i < 2 * both ? i % 2 == 0 : rising > leaving;
    const uint32_t at = i < 2 * both ? i / 2 : i - both;
    const Move& move = (rises ? flight.rising : flight.leaving)[at];
    CopyRecord<Vec>(flight.rows, move.from, move.to);
  }
}

template <class Vec>
__global__ void __launch_bounds__(kBlockThreads)
    InstallMoves(const FlightView flight, GpuCounters* counters) {
  const RowsView& rows = flight.rows;
  const uint32_t rising = flight.counts->rising, total = rising + flight.counts->leaving;
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t base = blockIdx.x * kBlockThreads + threadIdx.x - lane; base < total;
       base += gridDim.x * kBlockThreads) {
    const uint32_t at = base + lane;
    const bool active = at < total, rises = at < rising;
    Move move{};
    KeySlot* slot = nullptr;
    uint32_t entry = kNoEntry;
    if (active) {
      move = rises ? flight.rising[at] : flight.leaving[at - rising];
      slot = flight.index.SlotOf(move.key, &entry);
    }
    bool moves = slot != nullptr && entry == (move.from | flight.form) + 1;
    if (moves && !rises) moves = rows.marks[move.from] == kMoving;
    RowHeader header{};
    if (moves) header = *rows.header(move.from);
    const bool changed =
        moves && (header.last_step != move.header.last_step || move.header.last_step > flight.step);
    for (uint32_t left = __ballot_sync(kFullWarp, changed); left != 0; left &= left - 1) {
      const int which = __ffs(left) - 1;
      CopyRecord<Vec>(rows, __shfl_sync(kFullWarp, move.from, which),
                      __shfl_sync(kFullWarp, move.to, which));
    }
    if (active) {
      const uint32_t near_mark = flight.number | kUsed;
      uint32_t* const mark = rows.marks + move.from;
      if (*mark == kMoving) *mark = rises ? 0 : near_mark;
      if (moves) {
        rows.marks[move.to] = rises ? near_mark : 0;
        *rows.header(move.to) = header;
        slot->entry = (move.to | flight.form) + 1;
      }
      rows.Give(moves ? move.from : move.to);
    }
    const uint32_t rose = __popc(__ballot_sync(kFullWarp, moves && rises));
    const uint32_t left = __popc(__ballot_sync(kFullWarp, moves && !rises));
    const uint32_t ended = __popc(__ballot_sync(kFullWarp, active));
    const uint32_t ended_leaving = __popc(__ballot_sync(kFullWarp, active && !rises));
    if (lane != 0) continue;
    atomicAdd(&counters->brought, static_cast<unsigned long long>(rose));
    atomicAdd(&counters->spilled, static_cast<unsigned long long>(left));
    atomicAdd(&flight.pools->moving, 0ull - ended);
    atomicAdd(&flight.pools->leaving, 0ull - ended_leaving);
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_TIERS_CUH_
