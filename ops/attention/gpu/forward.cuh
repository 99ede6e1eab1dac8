// The forward pass of HSTU's attention on Hopper.
//
//   o_i = s sum_{j in V(i)} SiLU(alpha q_i k_j + b_ij) v_j
//
// Layout. A block of threads owns a tile of 128 rows in one head of one sequence (strips.cuh). It
// goes through the columns that any of the rows sees, kColumns at a time, from the last to the
// first. The copy engine brings rows and columns from device memory, as boxes of 64 numbers a row,
// in the swizzle that the matrix units read. There are three warpgroups: one thread of the first
// requests copies, as far ahead as there are stages; each of the others computes 64 of the rows.
// Scores never leave the registers: the output of one product is, as it lies, the input of the
// next.
//
// Operations. For each block of columns: S = Q K^T; P = SiLU(S), zero where the mask says; O += P
// V. Unlike softmax, this keeps no maximum and no sum, so O is never rescaled. SiLU(x) is h + h
// tanh(h), h = x / 2: one instruction of the special function unit and two others.
//
// Invariants. Numbers of other sequences, which lie in a tile's boxes behind a sequence's end,
// never enter a result: their scores are replaced, not multiplied, and rows of V are zeroed before
// the product, since 0 times NaN isn't 0. A tile's results depend on its sequence alone, and are
// the same to the last bit in each run.
//
// Why it is fast. At width 128 a score costs 512 operations of the matrix units. That takes 1/8 of
// a cycle, and the special function unit takes 1/16: so the two must overlap. Within a warpgroup
// the next block's S is computed while this one's P is made and multiplied. The two warpgroups take
// turns (named barriers), so that one makes its products while the other computes SiLU. The grid is
// as large as the GPU, tiles are taken by falling cost, and a tile's first copies run while the
// tile before ends (J. Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2, for softmax).

#ifndef GMETA_OPS_ATTENTION_GPU_FORWARD_CUH_
#define GMETA_OPS_ATTENTION_GPU_FORWARD_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/gpu/bias.cuh"
#include "ops/attention/gpu/strips.cuh"
#include "ops/hopper/hopper.cuh"
#include "ops/hopper/tensor_map.cuh"
#include "ops/hopper/turn.cuh"
#include "ops/hopper/wgmma.cuh"

namespace gmeta::hstu {

inline constexpr int kConsumers = 2;  // warpgroups that compute
inline constexpr int kForwardThreads = 128 * (1 + kConsumers);

// As many columns as memory has room for, beside two stages and what a bias needs.
template <int kWidth, bool kBiased>
inline constexpr int kForwardColumns = kWidth < 256 ? 128
                                       : kBiased    ? 64
                                                    : 80;

struct ForwardArguments {
  CUtensorMap q, k, v;
  Plan plan;
  const int32_t* visible;
  void* out;
  int64_t out_stride;
  int64_t tokens;
  int heads;
  float alpha;
  float scale;
  GpuBias bias;  // b, only in biased kernels
};

// The tile that a block of threads works on, and its blocks of columns.
template <int kColumns>
struct ForwardTile {
  Strip both;  // the tile's strips, joined: what its rows see together
  int head;    // below 0: no more work

  __device__ __forceinline__ void Find(const ForwardArguments& in, int work) {
    const int strip = in.plan.row_tiles[work / in.heads];
    head = work % in.heads;
    both = in.plan.strips[strip];
    if (both.row + kStripRows < both.length) both.Join(in.plan.strips[strip + 1]);
  }
  __device__ __forceinline__ bool Sees(int block) const {
    const Columns c{block * kColumns, (block + 1) * kColumns};
    return c.begin < both.first_max || (c.begin < both.end_max && c.end > both.begin_min) ||
           (c.begin < both.row + kTileRows && c.end > both.row);
  }
  __device__ __forceinline__ int Last() const {
    const int seen = max(both.first_max, both.end_max);
    return (max(seen, min(both.row + kTileRows, both.length)) - 1) / kColumns;
  }
  // Returns the next block to process after this one; below 0: there is none.
  __device__ __forceinline__ int After(int block) const {
    do --block;
    while (block >= 0 && !Sees(block));
    return block;
  }
};

template <class T, int kWidth, bool kBiased>
struct ForwardMemory {
  static constexpr int kColumns = kForwardColumns<kWidth, kBiased>;
  static constexpr int kStages = 2;

  // Two tiles of rows if they fit: the next tile's rows arrive while this tile ends.
  static constexpr int kTiles = kWidth == 256 ? 1 : 2;

  alignas(1024) T q[kTiles][kTileRows * kWidth];
  alignas(1024) T k[kStages][kColumns * kWidth];
  alignas(1024) T v[kStages][kColumns * kWidth];
  TimeEntries<kBiased> entries;
  ForwardTile<kColumns> tiles[kTiles];
  RowView views[kTiles][kTileRows];
  hopper::Barrier tile_full[kTiles], tile_free[kTiles];
  hopper::Barrier q_full[kTiles], q_free[kTiles];
  hopper::Barrier k_full[kStages], k_free[kStages], v_full[kStages], v_free[kStages];
};

template <class T, int kWidth, bool kBiased>
__device__ __forceinline__ void ProduceForward(const ForwardArguments& in,
                                               ForwardMemory<T, kWidth, kBiased>& memory) {
  using Memory = ForwardMemory<T, kWidth, kBiased>;
  constexpr int kColumns = Memory::kColumns;
  constexpr int kBoxes = kWidth / hopper::kBoxWidth;
  constexpr uint32_t kColumnBytes = sizeof(T) * kColumns * kWidth;
  hopper::PrefetchMap(&in.q), hopper::PrefetchMap(&in.k), hopper::PrefetchMap(&in.v);
  const int works = in.plan.header->tiles * in.heads;
  const int lane = threadIdx.x;
  hopper::Turn tile_turn, q_turn, k_turn, v_turn;
  const auto copy = [&](const CUtensorMap* map, T* to, hopper::Barrier* full, int head, int token,
                        int rows) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      hopper::CopyBox(map, to + box * rows * hopper::kBoxWidth, full, box * hopper::kBoxWidth, head,
                      token);
    }
  };
  const auto copy_columns = [&](const CUtensorMap* map, T(*to)[kColumns* kWidth],
                                hopper::Barrier* full, hopper::Barrier* free, hopper::Turn* turn,
                                int head, int token) {
    free[turn->stage].Wait(turn->phase ^ 1);
    full[turn->stage].ArriveExpecting(kColumnBytes);
    copy(map, to[turn->stage], &full[turn->stage], head, token, kColumns);
    turn->Next<Memory::kStages>();
  };
  for (int work = blockIdx.x;;) {
    memory.tile_free[tile_turn.stage].Wait(tile_turn.phase ^ 1);
    ForwardTile<kColumns>& tile = memory.tiles[tile_turn.stage];
    if (lane == 0) {
      tile.head = -1;
      if (work < works) tile.Find(in, work);
    }
    __syncwarp();
    if (work < works) {
      for (int row = lane; row < kTileRows; row += 32) {
        RowView view{0, 0, 0};  // rows behind the sequence's end see nothing
        if (tile.both.row + row < tile.both.length) {
          const int64_t token = static_cast<int64_t>(tile.both.token) + tile.both.row + row;
          view = reinterpret_cast<const RowView*>(in.visible)[token];
        }
        memory.views[tile_turn.stage][row] = view;
      }
    }
    memory.tile_full[tile_turn.stage].ArriveAsWarp();
    int next = 0;
    if (lane == 0) {
      if (work < works) {
        next = NextWork(&in.plan.header->forward);
        int before = -1;  // its V isn't requested yet: it is needed after the next K
        for (int block = tile.Last(); block >= 0; block = tile.After(block)) {
          const int token = tile.both.token;
          copy_columns(&in.k, memory.k, memory.k_full, memory.k_free, &k_turn, tile.head,
                       token + block * kColumns);
          if (before < 0) {  // request rows second: the tile before uses its own longest
            memory.q_free[q_turn.stage].Wait(q_turn.phase ^ 1);
            memory.q_full[q_turn.stage].ArriveExpecting(sizeof(memory.q[0]));
            copy(&in.q, memory.q[q_turn.stage], &memory.q_full[q_turn.stage], tile.head,
                 token + tile.both.row, kTileRows);
            q_turn.Next<Memory::kTiles>();
          } else {
            copy_columns(&in.v, memory.v, memory.v_full, memory.v_free, &v_turn, tile.head,
                         token + before * kColumns);
          }
          before = block;
        }
        copy_columns(&in.v, memory.v, memory.v_full, memory.v_free, &v_turn, tile.head,
                     tile.both.token + before * kColumns);
      }
    }
    if (work >= works) break;
    tile_turn.Next<Memory::kTiles>();
    work = __shfl_sync(0xFFFFFFFFu, next, 0);
  }
  if (lane == 0) LeaveQueue(&in.plan.header->forward);
}

// One of the warpgroups that compute.
template <class T, int kWidth, bool kBiased>
class ForwardConsumer {
 public:
  using Memory = ForwardMemory<T, kWidth, kBiased>;
  static constexpr int kColumns = Memory::kColumns;

  __device__ __forceinline__ ForwardConsumer(const ForwardArguments& in, Memory& memory)
      : in_(in),
        memory_(memory),
        group_(threadIdx.x / 128 - 1),
        thread_(threadIdx.x % 128),
        row_(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        column_(2 * (threadIdx.x % 4)) {}

  __device__ __forceinline__ void Run() {
    // The first warpgroup begins: the second one passes the turn to it before taking its own.
    if (group_ == 1) hopper::NamedArrive(TurnOf(0), 128 * kConsumers);
    hopper::Turn turn;
    for (;;) {
      memory_.tile_full[turn.stage].Wait(turn.phase);
      const ForwardTile<kColumns> tile = memory_.tiles[turn.stage];
      if (tile.head < 0) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        views_[i] = memory_.views[turn.stage][group_ * kStripRows + row_ + 8 * i];
      }
      Free(&memory_.tile_free[turn.stage]);
      turn.Next<Memory::kTiles>();
      Attend(tile);
      q_turn_.Next<Memory::kTiles>();
    }
  }

 private:
  static __device__ __forceinline__ int TurnOf(int group) { return 1 + group; }
  static constexpr int kTailBarrier = 1 + kConsumers;
  static constexpr int kOwnBarrier = 2 + kConsumers;

  __device__ __forceinline__ void AwaitTurn() {
    hopper::NamedSync(TurnOf(group_), 128 * kConsumers);
  }
  __device__ __forceinline__ void PassTurn() {
    hopper::NamedArrive(TurnOf(1 - group_), 128 * kConsumers);
  }
  __device__ __forceinline__ void Free(hopper::Barrier* barrier) { barrier->ArriveAsWarp(); }

  __device__ __forceinline__ void Attend(const ForwardTile<kColumns>& tile) {
    float out[kWidth / 2];
    float scores[kColumns / 2];
    uint32_t weights[kColumns / 4];
    const int first_row = tile.both.row + group_ * kStripRows;

    int block = tile.Last();
    memory_.q_full[q_turn_.stage].Wait(q_turn_.phase);
    BeginScores(tile, first_row, block, scores);
    memory_.k_full[k_turn_.stage].Wait(k_turn_.phase);
    AwaitTurn();
    Scores(scores);
    PassTurn();
    hopper::Wait<0>();
    hopper::Keep(scores);
    NextK();
    Weigh(tile, first_row, block, scores);
    Round(scores, weights);
    if ((block + 1) * kColumns > tile.both.length) ZeroTail(tile.both.length - block * kColumns);

    int add = 0;
    for (block = tile.After(block); block >= 0; block = tile.After(block)) {
      BeginScores(tile, first_row, block, scores);
      memory_.k_full[k_turn_.stage].Wait(k_turn_.phase);
      AwaitTurn();
      Scores(scores);
      memory_.v_full[v_turn_.stage].Wait(v_turn_.phase);
      Sums(weights, out, add);
      PassTurn();
      add = 1;
      hopper::Wait<1>();
      hopper::Keep(scores);
      NextK();
      Weigh(tile, first_row, block, scores);
      hopper::Wait<0>();
      hopper::Keep(out);
      hopper::Keep(weights);
      NextV();
      Round(scores, weights);
    }
    memory_.v_full[v_turn_.stage].Wait(v_turn_.phase);
    Sums(weights, out, add);
    hopper::Wait<0>();
    hopper::Keep(out);
    NextV();
    Store(tile, first_row, out);
  }

  // Returns the first box of the group's rows of Q.
  __device__ __forceinline__ T* OwnRows() {
    return memory_.q[q_turn_.stage] + group_ * kStripRows * hopper::kBoxWidth;
  }

  __device__ __forceinline__ void NextK() {
    Free(&memory_.k_free[k_turn_.stage]);
    k_turn_.Next<Memory::kStages>();
  }
  __device__ __forceinline__ void NextV() {
    Free(&memory_.v_free[v_turn_.stage]);
    v_turn_.Next<Memory::kStages>();
  }

  // Sets the numbers that S is added to.
  __device__ __forceinline__ void BeginScores(const ForwardTile<kColumns>& tile, int first_row,
                                              int block, float (&scores)[kColumns / 2]) {
    if constexpr (kBiased) {
      BeginWithBias<true>(in_.bias, memory_.entries, tile.both.token, first_row + row_,
                          block * kColumns + column_, scores, KeepNothing());
    }
  }

  // Starts S = Q K^T for the current stage of K, with its bias.
  __device__ __forceinline__ void Scores(float (&scores)[kColumns / 2]) {
    constexpr uint32_t kQBox = 128 * kTileRows, kKBox = 128 * kColumns;
    const uint64_t q = hopper::Describe(OwnRows());
    const uint64_t k = hopper::Describe(memory_.k[k_turn_.stage]);
    hopper::Keep(scores);
    hopper::Begin();
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      hopper::Product<T, 0>(
          scores, hopper::Advance(q, i / 4 * kQBox + i % 4 * hopper::kNextColumns),
          hopper::Advance(k, i / 4 * kKBox + i % 4 * hopper::kNextColumns), kBiased || i > 0);
    }
    hopper::Commit();
  }

  // Starts O += P V for the current stage of V.
  __device__ __forceinline__ void Sums(uint32_t (&weights)[kColumns / 4], float (&out)[kWidth / 2],
                                       int add) {
    const uint64_t v = hopper::Describe(memory_.v[v_turn_.stage], 128 * kColumns);
    hopper::Keep(weights);
    hopper::Keep(out);
    hopper::Begin();
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      hopper::Product<T, 1>(out, &weights[4 * i], hopper::Advance(v, i * hopper::kNextRows),
                            i > 0 ? 1 : add);
    }
    hopper::Commit();
  }

  __device__ __forceinline__ void Weigh(const ForwardTile<kColumns>& tile, int first_row, int block,
                                        float (&scores)[kColumns / 2]) {
    const float half = 0.5f * in_.alpha;
    const Columns columns{block * kColumns, (block + 1) * kColumns};
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float h = half * scores[i];
      scores[i] = fmaf(h, hopper::FastTanh(h), h);
    }
    if (tile.both.SeesAll(columns)) return;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const uint32_t seen =
          views_[which].Seen<kColumns>(first_row + row_ + 8 * which, columns.begin + column_);
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        float& score = scores[i / 2 * 4 + 2 * which + i % 2];
        if ((seen >> (i / 2 + i % 2 * 16) & 1) == 0) score = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void Round(const float (&scores)[kColumns / 2],
                                        uint32_t (&weights)[kColumns / 4]) {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      weights[i] = hopper::RoundedPair<T>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  // Rows of V from `row` on belong to another sequence. Replaces them by zeros. Both warpgroups
  // call it.
  __device__ __forceinline__ void ZeroTail(int row) {
    constexpr int kBoxes = kWidth / hopper::kBoxWidth;
    memory_.v_full[v_turn_.stage].Wait(v_turn_.phase);
    uint4* const v = reinterpret_cast<uint4*>(memory_.v[v_turn_.stage]);
    const int units = (kColumns - row) * 8;  // units of 16 bytes in a box
    for (int i = group_ * 128 + thread_; i < units * kBoxes; i += 128 * kConsumers) {
      v[i / units * kColumns * 8 + row * 8 + i % units] = make_uint4(0, 0, 0, 0);
    }
    hopper::FenceAsyncProxy();
    hopper::NamedSync(kTailBarrier, 128 * kConsumers);
  }

  // Rounds the results and writes them, in whole lines. They pass through the memory of the
  // warpgroup's own rows of Q.
  __device__ __forceinline__ void Store(const ForwardTile<kColumns>& tile, int first_row,
                                        const float (&out)[kWidth / 2]) {
    constexpr int kBoxBytes = 128 * kTileRows;
    char* const own = reinterpret_cast<char*>(OwnRows());
    // The row's number permutes its units of 16 bytes, so that banks don't conflict.
    const auto place = [&](int row, int unit) {
      return own + unit / 8 * kBoxBytes + row * 128 + ((unit % 8) ^ (row % 8)) * 16;
    };
    // Wait until all warps of the group have read the rows of Q that lie here.
    hopper::NamedSync(kOwnBarrier + group_, 128);
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
      const int row = row_ + 8 * (i % 2);
      *reinterpret_cast<uint32_t*>(place(row, i / 2) + column_ * sizeof(T)) =
          hopper::RoundedPair<T>(in_.scale * out[2 * i], in_.scale * out[2 * i + 1]);
    }
    hopper::NamedSync(kOwnBarrier + group_, 128);
    constexpr int kUnits = kWidth / 8;
    const int rows = min(kStripRows, tile.both.length - first_row);
    char* const to =
        static_cast<char*>(in_.out) +
        sizeof(T) * ((tile.both.token + static_cast<int64_t>(first_row)) * in_.out_stride +
                     static_cast<int64_t>(tile.head) * kWidth);
    for (int i = thread_; i < kStripRows * kUnits; i += 128) {
      const int row = i / kUnits, unit = i % kUnits;
      if (row < rows) {
        *reinterpret_cast<uint4*>(to + sizeof(T) * row * in_.out_stride + unit * 16) =
            *reinterpret_cast<const uint4*>(place(row, unit));
      }
    }
    hopper::FenceAsyncProxy();
    Free(&memory_.q_free[q_turn_.stage]);
  }

  const ForwardArguments& in_;
  Memory& memory_;
  const int group_, thread_;
  const int row_, column_;  // place of the thread's first number in a product
  RowView views_[2];        // the views of the thread's two rows
  hopper::Turn q_turn_, k_turn_, v_turn_;
};

template <class T, int kWidth, bool kBiased>
__global__ void __launch_bounds__(kForwardThreads, 1)
    ForwardKernel(const __grid_constant__ ForwardArguments in) {
#if GMETA_SM90A
  if (in.plan.header->invalid) {
    return FillWithNan(static_cast<T*>(in.out), in.out_stride, in.tokens, in.heads * kWidth);
  }
  using Memory = ForwardMemory<T, kWidth, kBiased>;
  Memory& memory = *reinterpret_cast<Memory*>(hopper::SharedMemory());
  if constexpr (kBiased) memory.entries.Make(in.bias);
  if (threadIdx.x == 0) {
    constexpr uint32_t kWarps = 4 * kConsumers * hopper::kWarpArrivals;
    for (int i = 0; i < Memory::kTiles; ++i) {
      memory.tile_full[i].Init(hopper::kWarpArrivals), memory.tile_free[i].Init(kWarps);
      memory.q_full[i].Init(1), memory.q_free[i].Init(kWarps);
    }
    for (int i = 0; i < Memory::kStages; ++i) {
      memory.k_full[i].Init(1), memory.k_free[i].Init(kWarps);
      memory.v_full[i].Init(1), memory.v_free[i].Init(kWarps);
    }
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::GiveRegisters<40>();
    if (threadIdx.x < 32) ProduceForward<T, kWidth, kBiased>(in, memory);
  } else {
    hopper::TakeRegisters<232>();
    ForwardConsumer<T, kWidth, kBiased>(in, memory).Run();
  }
#endif
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_FORWARD_CUH_
