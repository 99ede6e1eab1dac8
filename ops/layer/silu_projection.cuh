// A product of matrices and the activation of its columns, in one pass on Hopper.
//
//   Z = X W,  A = SiLU(Z[:, from:])        X (rows, inner), W (inner, columns)
//
// It is the projection of an HSTU layer: Z are u, v, q and k before their activation, which the
// gradient needs, A what attention reads. Beside a product and a pass of its own for SiLU, memory
// is spared the reading of Z, and A is written while the matrix units work.
//
// Layout. A block of threads owns a tile of 128 rows by 256 columns at a time. The sum's places go
// by in steps of 64: a box of X and four of W, by the copy engine, into one of four stages. W is
// read as it lies, rows of the sum ("transposed", wgmma.cuh). Three warpgroups: one thread of the
// first asks for copies, across tiles, as far ahead as there are stages; each of the others sums
// 64 rows by 256 columns in 128 registers a thread. Tiles are dealt out in turns, columns first, so
// that those in work at a time share rows of X, and W stays in the cache.
//
// Invariants. SiLU is computed from Z as it is rounded and written, by the function that a pass of
// its own uses: A has the same bits as gmeta_silu of Z. What lies outside of the matrices is read
// as zeros and never written, by the copy engine's own checks. An element's sum takes its places in
// rising order whatever the launch, so that results are the same to the last bit in each run.
//
// Why it is fast. The matrix units have work all the time: a tile that is summed is rounded to 64
// registers a thread, the next one's sums begin, and while they are made the warp activates the
// tile before and sends it off, an eighth at a time, spread over the steps. So results also leave
// evenly. Written at once, a tile's 128 KiB took a quarter of the time, nothing else went on
// meanwhile (two warpgroups can be four steps apart, which is less than that takes), and all blocks
// wrote together. What a part costs beside its numbers are a fence and a request to the copy
// engine: there is one of each for a box and what is activated of it. Columns are dealt out one
// further in each row of tiles: those without activation would else always be the same blocks'.
// Blocks in clusters that share boxes of W, and loads of the cache with them, were no faster.

#ifndef GMETA_OPS_LAYER_SILU_PROJECTION_CUH_
#define GMETA_OPS_LAYER_SILU_PROJECTION_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "ops/hopper/hopper.cuh"
#include "ops/hopper/tensor_map.cuh"
#include "ops/hopper/turn.cuh"
#include "ops/hopper/wgmma.cuh"
#include "ops/layer/activation.cuh"

namespace gmeta::hstu {

inline constexpr int kProjectionGroups = 2;  // warpgroups that sum
inline constexpr int kProjectionThreads = 128 * (1 + kProjectionGroups);
inline constexpr int kProjectionRows = 64 * kProjectionGroups, kProjectionColumns = 256;
inline constexpr int kProjectionPlaces = 64;   // of the sum, in a step
inline constexpr int kProjectionBoxRows = 16;  // of results, which a warp writes

struct ProjectionArguments {
  CUtensorMap x, w, z, activated;
  int rows, inner, columns;
  int activated_from;  // a column, at a box's edge

  __host__ __device__ __forceinline__ int ColumnTiles() const {
    return (columns + kProjectionColumns - 1) / kProjectionColumns;
  }
  __host__ __device__ __forceinline__ int Tiles() const {
    return (rows + kProjectionRows - 1) / kProjectionRows * ColumnTiles();
  }
  __device__ __forceinline__ int Steps() const {
    return (inner + kProjectionPlaces - 1) / kProjectionPlaces;
  }
  __device__ __forceinline__ int Row(int tile) const {
    return tile / ColumnTiles() * kProjectionRows;
  }
  __device__ __forceinline__ int Column(int tile) const {
    const int tiles = ColumnTiles();
    return (tile % tiles + tile / tiles) % tiles * kProjectionColumns;
  }
};

template <class T>
struct ProjectionMemory {
  static constexpr int kStages = 4;
  static constexpr int kBoxes = kProjectionColumns / hopper::kBoxWidth;

  struct Stage {
    alignas(1024) T x[kProjectionRows * kProjectionPlaces];
    T w[kBoxes][kProjectionPlaces * hopper::kBoxWidth];
  };
  Stage stages[kStages];
  // Of each warp that sums a box of results, and one of what is activated of it.
  struct Out {
    T z[kProjectionBoxRows * hopper::kBoxWidth], activated[kProjectionBoxRows * hopper::kBoxWidth];
  };
  alignas(1024) Out out[4 * kProjectionGroups];
  hopper::Barrier full[kStages], free[kStages];
};

// One thread: asks for the steps of all tiles of the block.
template <class T>
__device__ __forceinline__ void ProduceProjection(const ProjectionArguments& in,
                                                  ProjectionMemory<T>& memory) {
  using Memory = ProjectionMemory<T>;
  const int tiles = in.Tiles(), steps = in.Steps();
  hopper::PrefetchMap(&in.x), hopper::PrefetchMap(&in.w);
  hopper::PrefetchMap(&in.z), hopper::PrefetchMap(&in.activated);
  hopper::Turn turn;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int row = in.Row(tile), column = in.Column(tile);
    for (int step = 0; step < steps; ++step) {
      typename Memory::Stage& stage = memory.stages[turn.stage];
      hopper::Barrier* const full = &memory.full[turn.stage];
      const int place = step * kProjectionPlaces;
      memory.free[turn.stage].Wait(turn.phase ^ 1);
      full->ArriveExpecting(sizeof(stage));
      hopper::CopyBox(&in.x, stage.x, full, place, 0, row);
#pragma unroll
      for (int box = 0; box < Memory::kBoxes; ++box) {
        hopper::CopyBox(&in.w, stage.w[box], full, column + box * hopper::kBoxWidth, 0, place);
      }
      turn.Next<Memory::kStages>();
    }
  }
}

// Of a warp: the tile that was summed last, rounded, and its way to memory.
template <class T>
class ProjectionWriter {
 public:
  using Memory = ProjectionMemory<T>;
  static constexpr int kParts = 2 * Memory::kBoxes;  // which Write takes one after another

  __device__ __forceinline__ ProjectionWriter(const ProjectionArguments& in, Memory& memory)
      : in_(in), out_(memory.out[threadIdx.x / 32 - 4]), column_(in.columns) {}

  // Sums as wgmma leaves them, of the warp's 16 rows from `row` on.
  __device__ __forceinline__ void Take(int row, int column,
                                       const float (&sums)[kProjectionColumns / 2]) {
    row_ = row, column_ = column;
#pragma unroll
    for (int i = 0; i < kProjectionColumns / 4; ++i) {
      pairs_[i] = hopper::RoundedPair<T>(sums[2 * i], sums[2 * i + 1]);
    }
  }

  // Half of a box; with the second half it is sent off. Nothing, where nothing was taken.
  template <int kPart>
  __device__ __forceinline__ void Write() {
    constexpr int kBox = kPart / 2, kHalf = kPart % 2;
    const int column = column_ + kBox * hopper::kBoxWidth;
    if (column >= in_.columns) return;
    const bool is_activated = column >= in_.activated_from;
    const bool first_lane = threadIdx.x % 32 == 0;
    const uint32_t* const pairs = pairs_ + 16 * kBox + 8 * kHalf;
    if constexpr (kHalf == 0) {
      if (first_lane) hopper::AwaitReadBoxes<0>();  // those before, from the same memory
      __syncwarp();
    }
    Store<kHalf>(out_.z, pairs);
    if (is_activated) {
      uint32_t activated[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) activated[i] = Activated(pairs[i]);
      Store<kHalf>(out_.activated, activated);
    }
    if constexpr (kHalf == 1) {
      hopper::FenceAsyncProxy();
      __syncwarp();
      if (!first_lane) return;
      hopper::SendBox(&in_.z, out_.z, column, 0, row_);
      if (is_activated) {
        hopper::SendBox(&in_.activated, out_.activated, column - in_.activated_from, 0, row_);
      }
    }
  }

  // What the last tile is written by, since no other is summed meanwhile.
  __device__ __forceinline__ void Finish() {
    WriteAll(std::make_integer_sequence<int, kParts>());
    if (threadIdx.x % 32 == 0) hopper::AwaitReadBoxes<0>();  // before the memory is another's
  }

 private:
  template <int... kEach>
  __device__ __forceinline__ void WriteAll(std::integer_sequence<int, kEach...>) {
    (Write<kEach>(), ...);
  }

  __device__ __forceinline__ static uint32_t Activated(uint32_t z) {
    T pair[2];
    std::memcpy(pair, &z, sizeof(pair));
    return hopper::RoundedPair<T>(Silu(static_cast<float>(pair[0])),
                                  Silu(static_cast<float>(pair[1])));
  }

  // 32 columns of a box, in its swizzle: of 16 rows, units of 8 numbers. A lane tells where a row
  // of one of the four matrices is: of rows 0 to 7 and 8 to 15 of a unit, then of the unit after.
  template <int kHalf>
  __device__ __forceinline__ void Store(T* box, const uint32_t* pairs) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int unit = (4 * kHalf + 2 * i + lane / 16) ^ (lane % 8);
      hopper::StoreMatrices(box + lane % 16 * hopper::kBoxWidth + unit * 8, pairs + 4 * i);
    }
  }

  const ProjectionArguments& in_;
  typename Memory::Out& out_;
  int row_ = 0, column_;  // of the tile; it begins behind the last column: there is none
  uint32_t pairs_[kProjectionColumns / 4];
};

// One of the warpgroups that sum.
template <class T>
class ProjectionConsumer {
 public:
  using Memory = ProjectionMemory<T>;
  using Writer = ProjectionWriter<T>;

  __device__ __forceinline__ ProjectionConsumer(const ProjectionArguments& in, Memory& memory)
      : in_(in), memory_(memory), writer_(in, memory), group_(threadIdx.x / 128 - 1) {}

  __device__ __forceinline__ void Run() {
    const int tiles = in_.Tiles();
    const int row = group_ * 64 + threadIdx.x % 128 / 32 * kProjectionBoxRows;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      float sums[kProjectionColumns / 2];
      before_ = -1, step_ = 0;
      SumParts(sums, std::make_integer_sequence<int, Writer::kParts>());
      hopper::Wait<0>();
      hopper::Keep(sums);
      memory_.free[before_].ArriveAsWarp();
      writer_.Take(in_.Row(tile) + row, in_.Column(tile), sums);
    }
    writer_.Finish();
  }

 private:
  template <int... kEach>
  __device__ __forceinline__ void SumParts(float (&sums)[kProjectionColumns / 2],
                                           std::integer_sequence<int, kEach...>) {
    (SumPart<kEach>(sums), ...);
  }

  // The steps of a tile's part, and while the first is summed a part of the tile before is written.
  template <int kPart>
  __device__ __forceinline__ void SumPart(float (&sums)[kProjectionColumns / 2]) {
    const int end = (kPart + 1) * in_.Steps() / Writer::kParts;
    if (kPart == 0 || step_ < end) Step(sums);
    writer_.template Write<kPart>();
    while (step_ < end) Step(sums);
  }

  // Begins a step, and awaits the one before.
  __device__ __forceinline__ void Step(float (&sums)[kProjectionColumns / 2]) {
    typename Memory::Stage& stage = memory_.stages[turn_.stage];
    memory_.full[turn_.stage].Wait(turn_.phase);
    const uint64_t x =
        hopper::Describe(stage.x + group_ * 64 * kProjectionPlaces);  // K-major: a box
    const uint64_t w = hopper::Describe(stage.w[0], sizeof(stage.w[0]));
    hopper::Keep(sums);
    hopper::Begin();
#pragma unroll
    for (int i = 0; i < kProjectionPlaces / 16; ++i) {
      hopper::Product<T, 1>(sums, hopper::Advance(x, i * hopper::kNextColumns),
                            hopper::Advance(w, i * hopper::kNextRows), i > 0 || step_ > 0);
    }
    hopper::Commit();
    hopper::Wait<1>();
    if (before_ >= 0) memory_.free[before_].ArriveAsWarp();
    before_ = turn_.stage;
    turn_.Next<Memory::kStages>();
    ++step_;
  }

  const ProjectionArguments& in_;
  Memory& memory_;
  Writer writer_;
  const int group_;
  int step_ = 0;     // of the tile, the next one
  int before_ = -1;  // the stage whose products may still be on their way
  hopper::Turn turn_;
};

template <class T>
__global__ void __launch_bounds__(kProjectionThreads, 1)
    ProjectionKernel(const __grid_constant__ ProjectionArguments in) {
#if GMETA_SM90A
  using Memory = ProjectionMemory<T>;
  Memory& memory = *reinterpret_cast<Memory*>(hopper::SharedMemory());
  if (threadIdx.x == 0) {
    for (int i = 0; i < Memory::kStages; ++i) {
      memory.full[i].Init(1);
      memory.free[i].Init(4 * kProjectionGroups * hopper::kWarpArrivals);
    }
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::GiveRegisters<40>();
    if (threadIdx.x == 0) ProduceProjection(in, memory);
  } else {
    hopper::TakeRegisters<232>();
    ProjectionConsumer<T>(in, memory).Run();
  }
#endif
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_LAYER_SILU_PROJECTION_CUH_
