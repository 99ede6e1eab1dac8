// The kernels that make a plan (strips.cuh).

#include <climits>

#include "ops/attention/gpu/plan/strips.cuh"
#include "ops/common/gpu/cuda_launch.cuh"

namespace gmeta::hstu {
namespace {

constexpr int kThreads = 1024;
constexpr unsigned kAll = 0xFFFFFFFFu;

// Computes exclusive sums over the block's threads, of one number each; `total` is the sum of all.
template <class T>
__device__ T ExclusiveSum(T value, T* total) {
  __shared__ T of_warp[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T sum = value;
  for (int by = 1; by < 32; by *= 2) {
    const T other = __shfl_up_sync(kAll, sum, by);
    if (lane >= by) sum += other;
  }
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    T w = of_warp[lane];
    for (int by = 1; by < 32; by *= 2) {
      const T other = __shfl_up_sync(kAll, w, by);
      if (lane >= by) w += other;
    }
    of_warp[lane] = w;
  }
  __syncthreads();
  *total = of_warp[kThreads / 32 - 1];
  const T before = warp == 0 ? 0 : of_warp[warp - 1];
  __syncthreads();
  return before + sum - value;
}

__host__ __device__ int Pieces(int length, int size) { return (length + size - 1) / size; }

// Finds where each sequence's strips begin, and lists the tiles in the order of work. One block. It
// sorts sequences by their number of tiles, by counting.
__global__ void __launch_bounds__(kThreads)
    ListTiles(const int64_t* offsets, int64_t tokens, int batch, Plan plan) {
  constexpr int kCosts = kThreads;  // number of tiles; a longer sequence counts as the longest
  __shared__ int places[kCosts];
  const auto length_of = [&](int i) { return static_cast<int>(offsets[i + 1] - offsets[i]); };
  const auto cost_of = [](int tiles) { return kCosts - 1 - min(tiles, kCosts - 1); };
  bool invalid = offsets[0] != 0 || offsets[batch] != tokens;
  for (int i = threadIdx.x; i < batch; i += kThreads) {
    invalid = invalid || offsets[i] < 0 || offsets[i + 1] < offsets[i] || offsets[i + 1] > tokens;
  }
  places[threadIdx.x] = 0;
  invalid = __syncthreads_or(invalid);
  if (threadIdx.x == 0) *plan.header = {};
  if (invalid) {
    if (threadIdx.x == 0) plan.header->invalid = 1;
    return;
  }
  int strips = 0;
  for (int begin = 0; begin < batch; begin += kThreads) {
    const int i = begin + threadIdx.x;
    const int length = i < batch ? length_of(i) : 0;
    int more;
    const int strip = strips + ExclusiveSum(Pieces(length, kStripRows), &more);
    if (i < batch) plan.first_strip[i] = strip;
    strips += more;
    const int tiles = Pieces(length, kTileRows);
    if (tiles > 0) atomicAdd(&places[cost_of(tiles)], tiles);
  }
  __syncthreads();
  int tiles;
  const int count = places[threadIdx.x];
  places[threadIdx.x] = ExclusiveSum(count, &tiles);
  __syncthreads();
  if (threadIdx.x == 0) {
    plan.first_strip[batch] = strips;
    plan.header->strips = strips, plan.header->tiles = tiles;
  }
  // Sequences of one cost stay in their own order, so that a batch is always divided the same way.
  __shared__ int tiles_of[kThreads], place_of[kThreads];
  for (int begin = 0; begin < batch; begin += kThreads) {
    const int thread = static_cast<int>(threadIdx.x), i = begin + thread;
    const int own = i < batch ? Pieces(length_of(i), kTileRows) : 0, cost = cost_of(own);
    tiles_of[thread] = own;
    __syncthreads();
    int place = places[cost];
    for (int other = 0; other < thread; ++other) {
      if (cost_of(tiles_of[other]) == cost) place += tiles_of[other];
    }
    place_of[thread] = place;
    __syncthreads();
    if (own > 0) atomicAdd(&places[cost], own);
    // One warp per sequence.
    for (int other = thread / 32; other < min(kThreads, batch - begin); other += kThreads / 32) {
      const int last = tiles_of[other] - 1;
      for (int tile = thread % 32; tile <= last; tile += 32) {
        const int strip = plan.first_strip[begin + other] + tile * kTileStrips;
        plan.row_tiles[place_of[other] + last - tile] = strip;
        plan.column_tiles[place_of[other] + tile] = strip;
      }
    }
    __syncthreads();
  }
}

// Returns the last place i of [0, n) with starts[i] <= x.
__device__ int SequenceOf(const int* starts, int n, int x) {
  int low = 0, high = n;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle] <= x ? low : high) = middle;
  }
  return low;
}

__device__ int WarpMin(int x) { return __reduce_min_sync(kAll, x); }
__device__ int WarpMax(int x) { return __reduce_max_sync(kAll, x); }

// Joins the bounds that the lanes of a warp have found.
__device__ void JoinLanes(Strip* s) {
  s->first_min = WarpMin(s->first_min), s->first_max = WarpMax(s->first_max);
  s->begin_min = WarpMin(s->begin_min), s->begin_max = WarpMax(s->begin_max);
  s->end_min = WarpMin(s->end_min), s->end_max = WarpMax(s->end_max);
}

// Fills the strips, one warp per strip.
__global__ void FindStrips(const int64_t* offsets, const int32_t* visible, int batch, Plan plan) {
  const int index = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = threadIdx.x % 32;
  if (index >= plan.header->strips) return;
  // A sequence without tokens shares its start with the next one. The last of those that share a
  // start is the one that has this strip.
  const int sequence = SequenceOf(plan.first_strip, batch, index);
  const int64_t token = offsets[sequence];
  Strip s;
  s.token = static_cast<int>(token);
  s.length = static_cast<int>(offsets[sequence + 1] - token);
  s.first_strip = plan.first_strip[sequence];
  s.row = (index - s.first_strip) * kStripRows;
  s.first_min = s.begin_min = s.end_min = INT_MAX;
  s.first_max = s.begin_max = s.end_max = 0;
  for (int row = s.row + lane; row < s.row + kStripRows && row < s.length; row += 32) {
    const int32_t* of_row = visible + 3 * (token + row);
    const int first = of_row[0], begin = of_row[1], end = of_row[2];
    s.first_min = min(s.first_min, first), s.first_max = max(s.first_max, first);
    s.begin_min = min(s.begin_min, begin), s.begin_max = max(s.begin_max, begin);
    s.end_min = min(s.end_min, end), s.end_max = max(s.end_max, end);
  }
  JoinLanes(&s);
  if (lane == 0) plan.strips[index] = s;
}

// Joins the strips of each group, one warp per group; the warps of other strips have nothing to do.
__global__ void JoinGroups(Plan plan) {
  const int index = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = threadIdx.x % 32;
  if (index >= plan.header->strips) return;
  Strip s = plan.strips[index];
  const int left = Pieces(s.length - s.row, kStripRows);  // strips of the sequence from this one on
  if ((index - s.first_strip) % kGroupStrips != 0) return;
  if (lane < left) s.Join(plan.strips[index + lane]);
  JoinLanes(&s);
  if (lane == 0) plan.groups[index] = s;
}

// Finds each strip's first tile in the map of times. One block.
__global__ void __launch_bounds__(kThreads) PlaceMapTiles(Plan plan) {
  const int strips = plan.header->strips;
  int64_t tiles = 0;
  for (int begin = 0; begin < strips; begin += kThreads) {
    const int i = begin + static_cast<int>(threadIdx.x);
    const int64_t own = i < strips ? Pieces(plan.strips[i].end(), kStripRows) : 0;
    int64_t more;
    const int64_t first = tiles + ExclusiveSum(own, &more);
    if (i < strips) plan.first_tile[i] = first;
    tiles += more;
  }
  if (threadIdx.x == 0) plan.first_tile[strips] = plan.header->map_tiles = tiles;
}

}  // namespace

void MakePlan(const int64_t* offsets, const int32_t* visible, int64_t tokens, int64_t batch,
              const Plan& plan, cudaStream_t stream) {
  constexpr const char* kWhat = "hstu attention, planning";
  const int sequences = static_cast<int>(batch);
  gmeta::Launch(ListTiles, 1, kThreads, 0, stream, kWhat, offsets, tokens, sequences, plan);
  const int64_t strips = Plan::MaxStrips(tokens, batch);
  constexpr int kWarps = 8;
  if (strips > 0) {
    const auto blocks = static_cast<unsigned>((strips + kWarps - 1) / kWarps);
    gmeta::Launch(FindStrips, blocks, 32 * kWarps, 0, stream, kWhat, offsets, visible, sequences,
                  plan);
    gmeta::Launch(JoinGroups, blocks, 32 * kWarps, 0, stream, kWhat, plan);
    gmeta::Launch(PlaceMapTiles, 1, kThreads, 0, stream, kWhat, plan);
  }
}

}  // namespace gmeta::hstu
