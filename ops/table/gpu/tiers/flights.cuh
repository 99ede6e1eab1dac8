// Two tiers of a GPU table's rows: near ones in GPU memory, far ones in pinned host memory. The
// kernels that move rows between them.
//
// The index of all keys is in GPU memory, and a row's number determines its tier (rows.cuh). So a
// key is in one tier; kernels find and change every row where it is, a far one over the bus; and a
// move has no effect on results: it copies a record, and changes the entry of its key. Rows,
// statistics, evictions and saved content are those of a table that is all in GPU memory, bit for
// bit. Moves only determine what crosses the bus while a step waits.
//
// A flight is one prefetch's moves. It takes five kernels:
//
//   in the table's turn   ListWanted    the batch's far rows; marks its near rows as used
//                         PickLeaving   near rows to make room
//                         AssignRows    new numbers for both, and their headers as they are now
//   beside compute        CopyFlight    both ways over the bus at once, on a stream of its own, in
//                                       the order of places in host memory: the GPU translates few
//                                       addresses of host memory at a time
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
//   far   0, or in tables with rows on disk the number of the last batch that asked (disk.cuh)
//   kMoving while the row is on its way, so that no later flight takes it as well. A prefetch that
//   asks for a near row on its way out writes its own number: that move is then given up.
//
// The clock's hand goes around the index's slots, block by block. A near row is passed over if one
// of the latest prefetches has requested it: its batch may be waiting or in progress (a pin). If it
// was used since the hand last passed, it is passed over once. As a scan of the index finds keys
// and numbers together, rows needn't know their keys. It reads 16 bytes per slot, densely.
//
// How many rows move: as many wanted ones as there are free near rows; the others stay, are counted
// as `crowded`, and are read over the bus. Enough leave that the next flight finds free rows while
// those that leave in earlier flights may still be on their way: what a flight wants, times the
// flights, but at most `most_free`. A flight is assumed to want the most that recent ones wanted,
// reduced by an eighth with each flight.

#ifndef GMETA_OPS_TABLE_GPU_TIERS_FLIGHTS_CUH_
#define GMETA_OPS_TABLE_GPU_TIERS_FLIGHTS_CUH_

#include <cstdint>

#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/table/gpu/tiers/copy_records.cuh"

namespace gmeta {

struct Move {
  int64_t key;
  RowHeader header;  // when the number `to` was assigned
  uint32_t from, to;
};

struct FlightCounts {
  uint32_t wanted, picked;   // rows found
  uint32_t rising, leaving;  // rows that move
  uint32_t blocks;           // that have assigned numbers
  uint32_t copied;           // groups of records whose copies have begun
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
  // The moves in the order in which they are copied: by `places`, and moves[i] is rising[i], or
  // leaving[i - most].
  uint32_t *places, *moves, *sorted_moves;
  uint32_t log2_place_rows, log2_places;
  FlightCounts* counts;
  Clock* clock;

  // Where a move's record is in host memory: rising records come first, then leaving ones.
  __device__ uint32_t PlaceOf(uint32_t row, bool leaves) const {
    return row >> log2_place_rows | uint32_t{leaves} << log2_places;
  }
  __device__ uint32_t NoPlace() const { return 2u << log2_places; }
  __device__ bool Has(uint32_t row) const { return (row & form_mask) == form; }
  __device__ const Move& Sorted(uint32_t at) const {
    const uint32_t move = sorted_moves[at];
    return move < most ? rising[move] : leaving[move - most];
  }
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
    } else if (flight.rows.IsOnDisk(row)) {
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

// The slots that a block looks at in one turn: a thread loads some before it uses any.
inline constexpr uint32_t kClockAhead = 4;
inline constexpr uint32_t kClockSlots = kClockAhead * kBlockThreads;

// Goes around the index at most twice. Two threads may look at a row at the same time, and the one
// that changes the mark takes it. As many blocks look at once as may find half of what is to leave:
// if they looked at far more, rows would lose their mark of use without need.
__global__ void __launch_bounds__(kBlockThreads) PickLeaving(const FlightView flight) {
  __shared__ uint64_t shared[1];
  const uint64_t rounds = flight.index.NumberOfBlocks(kClockSlots);
  const uint32_t lane = threadIdx.x % kWarp, enough = flight.MostLeaving();
  const uint64_t near_slots = rounds * kClockSlots / max(flight.rows.near_rows, 1u);
  if (blockIdx.x > enough * near_slots / (2 * kClockSlots)) return;
  if (enough == 0) return;
  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool more = *const_cast<volatile uint32_t*>(&flight.counts->picked) < enough;
      shared[0] = more ? atomicAdd(&flight.clock->looked, 1u) : 2 * rounds;
    }
    __syncthreads();
    if (shared[0] >= 2 * rounds) return;
    const uint64_t block = (flight.clock->hand + shared[0]) % rounds;
    const KeySlot* const slots = flight.index.Block(block, kClockSlots);
    if (slots == nullptr) continue;
    KeySlot slot[kClockAhead];
    bool leaves[kClockAhead];
    uint32_t mark[kClockAhead];
#pragma unroll
    for (uint32_t i = 0; i < kClockAhead; ++i) {
      slot[i] = ReadSlot(slots + threadIdx.x + i * kBlockThreads);
    }
#pragma unroll
    for (uint32_t i = 0; i < kClockAhead; ++i) {
      const uint32_t row = slot[i].entry - 1;
      leaves[i] = slot[i].entry != kNoEntry && flight.Has(row) &&
                  flight.rows.IsNear(row & ~flight.form_mask);
      mark[i] = leaves[i] ? flight.rows.marks[row & ~flight.form_mask] : kMoving;
    }
#pragma unroll
    for (uint32_t i = 0; i < kClockAhead; ++i) {
      const uint32_t row = (slot[i].entry - 1) & ~flight.form_mask;
      if ((mark[i] & ~kUsed) >= flight.pinned_from) {  // or it is on its way
        leaves[i] = false;
      } else if ((mark[i] & kUsed) != 0) {
        atomicCAS(flight.rows.marks + row, mark[i], mark[i] & ~kUsed);
        leaves[i] = false;
      } else {
        leaves[i] = atomicCAS(flight.rows.marks + row, mark[i], kMoving) == mark[i];
      }
      const uint32_t mask = __ballot_sync(kFullWarp, leaves[i]);
      if (mask == 0) continue;
      uint32_t place = 0;
      if (lane == 0) place = atomicAdd(&flight.counts->picked, __popc(mask));
      place = __shfl_sync(kFullWarp, place, 0) + __popc(mask & ((1u << lane) - 1));
      if (!leaves[i]) continue;
      if (place < enough) {
        flight.leaving[place] = {slot[i].key, {}, row, 0};
      } else {
        flight.rows.marks[row] = mark[i];
      }
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
  if (at < flight.most) {
    const uint32_t i = static_cast<uint32_t>(at), j = flight.most + i, none = flight.NoPlace();
    flight.places[i] = i < rising ? flight.PlaceOf(flight.rising[i].from, false) : none;
    flight.places[j] = i < leaving ? flight.PlaceOf(flight.leaving[i].to, true) : none;
    flight.moves[i] = i;
    flight.moves[j] = j;
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

inline constexpr uint32_t kCopyThreads = 1024;  // so that few multiprocessors copy
inline constexpr uint32_t kCopyTogether = 8;    // records

// Warps take groups of records in turn, one that rises and one that leaves, so that the bus is busy
// in both directions.
template <class Vec>
__global__ void __launch_bounds__(kCopyThreads) CopyFlight(const FlightView flight) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t rising = flight.counts->rising, leaving = flight.counts->leaving;
  const uint32_t rising_groups = (rising + kCopyTogether - 1) / kCopyTogether;
  const uint32_t leaving_groups = (leaving + kCopyTogether - 1) / kCopyTogether;
  const uint32_t both = min(rising_groups, leaving_groups);
  while (true) {
    uint32_t group = 0;
    if (lane == 0) group = atomicAdd(&flight.counts->copied, 1u);
    group = __shfl_sync(kFullWarp, group, 0);
    if (group >= rising_groups + leaving_groups) return;
    const bool rises = group < 2 * both ? group % 2 == 0 : rising_groups > leaving_groups;
    const uint32_t first = (group < 2 * both ? group / 2 : group - both) * kCopyTogether;
    const uint32_t count = min(kCopyTogether, (rises ? rising : leaving) - first);
    Move move{};
    if (lane < count) move = flight.Sorted((rises ? 0 : rising) + first + lane);
    CopyRecords<Vec>(flight.rows, move.from, move.to, count);
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
      CopyRecords<Vec>(rows, __shfl_sync(kFullWarp, move.from, which),
                       __shfl_sync(kFullWarp, move.to, which), 1);
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
    }
    rows.Give(active, moves ? move.from : move.to);
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

#endif  // GMETA_OPS_TABLE_GPU_TIERS_FLIGHTS_CUH_
