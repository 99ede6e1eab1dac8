// The forward pass of HSTU's attention on Hopper.
//
//   o_i = s sum_{j in V(i)} SiLU(alpha q_i k_j + b_ij) v_j
//
// Layout. A block of threads owns a tile of 128 rows in one head of one sequence (strips.cuh). It
// goes through the columns that any of the rows sees, kColumns at a time, from the last to the
// first. The copy engine brings rows and columns from device memory, as boxes of 64 numbers a row,
// in the swizzle that the matrix units read. There are three warpgroups: one thread of the first
// requests copies, as far ahead as there are stages (produce.cuh); each of the others
// computes 64 of the rows, which it keeps in registers if there is room. Scores never leave the
// registers: the output of one product is, in place, the input of the next.
//
// Operations. For each block of columns: S = Q K^T; P = SiLU(S), zero where the mask says; O += P
// V. Unlike softmax, this keeps no maximum and no sum, so O is never rescaled. SiLU(x) is h + h
// tanh(h), h = x / 2: one instruction of the special function unit and two others. With softmax,
// row_softmax.cuh weighs the scores, and O is divided by the sums of weights in the end.
//
// Invariants. Numbers of other sequences, which lie in a tile's boxes past a sequence's end,
// never enter a result: their scores are replaced, not multiplied, and rows of V are zeroed before
// the product, since 0 times NaN isn't 0. A tile's results depend on its sequence alone, and are
// the same to the last bit in each run.
//
// Why it is fast. At width 128 a score costs 512 operations of the matrix units. That takes 1/8 of
// a cycle, and the special function unit takes 1/16: so the two must overlap. Within a warpgroup
// the next block's S is computed while this one's P is made and multiplied. The two warpgroups take
// turns (named barriers), so that one makes its products while the other computes SiLU. The grid is
// as large as the GPU, tiles are taken by falling cost, and a tile's first copies run while the
// previous tile ends (J. Shah et al., "FlashAttention-3", 2024, sections 3.1 and 3.2, for softmax).

#ifndef GMETA_OPS_ATTENTION_GPU_FORWARD_FORWARD_CUH_
#define GMETA_OPS_ATTENTION_GPU_FORWARD_FORWARD_CUH_

#include "ops/attention/gpu/bias/begin_scores.cuh"
#include "ops/attention/gpu/forward/memory.cuh"
#include "ops/attention/gpu/forward/produce.cuh"
#include "ops/attention/gpu/fragments.cuh"
#include "ops/hopper/hopper.cuh"
#include "ops/hopper/turn.cuh"
#include "ops/hopper/wgmma.cuh"

namespace gmeta::hstu {

// One of the warpgroups that compute.
template <class P>
class ForwardConsumer {
 public:
  using T = typename P::T;
  using Memory = ForwardMemory<P>;
  static constexpr int kWidth = P::kWidth;
  static constexpr int kColumns = Memory::kColumns;
  static constexpr bool kOwnInRegisters = P::kScored && Memory::kOwnInRegisters;
  static constexpr uint32_t kQBox = 128 * kTileRows;

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
      q_turn_.Next<1>();
    }
  }

 private:
  static __device__ __forceinline__ int TurnOf(int group) { return 1 + group; }
  static constexpr int kTailBarrier = 1 + kConsumers;

  __device__ __forceinline__ void AwaitTurn() {
    hopper::NamedSync(TurnOf(group_), 128 * kConsumers);
  }
  __device__ __forceinline__ void PassTurn() {
    hopper::NamedArrive(TurnOf(1 - group_), 128 * kConsumers);
  }
  __device__ __forceinline__ void Free(hopper::Barrier* barrier) { barrier->ArriveAsWarp(); }

  __device__ __forceinline__ void Attend(const ForwardTile<kColumns>& tile) {
    float out[kWidth / 2];
    uint32_t own[kOwnInRegisters ? kWidth / 4 : 1];
    float scores[kColumns / 2];
    uint32_t weights[kColumns / 4];
    const int first_row = tile.both.row + group_ * kStripRows;

    int block = tile.Last();
    if constexpr (P::kScored) {
      memory_.q_full.Wait(q_turn_.phase);
      if constexpr (kOwnInRegisters) {
        LoadLeft<kQBox>(OwnRows(), own);
        Free(&memory_.q_free);
      }
    }
    AwaitK();
    BeginScores(scores);
    if constexpr (P::kScored) {
      AwaitTurn();
      Scores(own, scores);
      PassTurn();
      hopper::Wait<0>();
      hopper::Keep(scores);
    }
    NextK();
    RowSoftmax<kColumns> softmax;
    Weigh(tile, first_row, block, scores, &softmax);
    Round(scores, weights);
    if ((block + 1) * kColumns > tile.both.length) ZeroTail(tile.both.length - block * kColumns);

    int add = 0;
    int next = 0;
    for (block = tile.After(block); block >= 0; block = P::kSoftmax ? next : tile.After(block)) {
      AwaitK();
      BeginScores(scores);
      AwaitTurn();
      if constexpr (P::kScored) Scores(own, scores);
      memory_.v_full[v_turn_.stage].Wait(v_turn_.phase);
      Sums(weights, out, add);
      PassTurn();
      add = 1;
      if constexpr (P::kScored) {
        hopper::Wait<1>();
        hopper::Keep(scores);
      }
      NextK();
      Weigh(tile, first_row, block, scores, &softmax);
      if constexpr (P::kSoftmax) {
        // The branches of this search keep the compiler from waiting before the weights are made.
        hopper::Keep(scores);
        next = tile.After(block);
      }
      hopper::Wait<0>();
      hopper::Keep(out);
      hopper::Keep(weights);
      NextV();
      if constexpr (P::kSoftmax) softmax.Rescale(out);
      Round(scores, weights);
    }
    memory_.v_full[v_turn_.stage].Wait(v_turn_.phase);
    Sums(weights, out, add);
    hopper::Wait<0>();
    hopper::Keep(out);
    NextV();
    if constexpr (P::kScored && !kOwnInRegisters) Free(&memory_.q_free);
    const OwnPlace own_rows{tile.both.token, tile.both.length, first_row, tile.head};
    T* const to = static_cast<T*>(in_.out);
    if constexpr (P::kSoftmax) {
      softmax.Finish();
      StoreLogSums(own_rows, softmax.LogSums());
      StoreSums<T>(out, softmax.Factors(in_.scale), own_rows, to, in_.out_stride);
    } else {
      StoreSums<T>(out, in_.scale, own_rows, to, in_.out_stride);
    }
  }

  // Returns the first box of the group's rows of Q.
  __device__ __forceinline__ T* OwnRows() {
    return memory_.q + group_ * kStripRows * hopper::kBoxWidth;
  }

  // Waits for K and for the block's bias.
  __device__ __forceinline__ void AwaitK() { memory_.k_full[k_turn_.stage].Wait(k_turn_.phase); }

  __device__ __forceinline__ void NextK() {
    Free(&memory_.k_free[k_turn_.stage]);
    k_turn_.Next<Memory::kStages>();
  }
  __device__ __forceinline__ void NextV() {
    Free(&memory_.v_free[v_turn_.stage]);
    v_turn_.Next<Memory::kStages>();
  }

  // Sets the numbers that S is added to.
  __device__ __forceinline__ void BeginScores(float (&scores)[kColumns / 2]) {
    if constexpr (P::kBiased) {
      const int own = kSquares * group_ + thread_ / 32;
      hstu::BeginScores(
          NearBias<true, typename Memory::Bias>(memory_.bias[k_turn_.stage], memory_.values, own),
          own, scores);
    }
  }

  // Starts S = Q K^T for the current stage of K, with its bias.
  __device__ __forceinline__ void Scores(uint32_t (&own)[kOwnInRegisters ? kWidth / 4 : 1],
                                         float (&scores)[kColumns / 2]) {
    constexpr uint32_t kKBox = 128 * kColumns;
    const uint64_t k = hopper::Describe(memory_.k[k_turn_.stage]);
    const uint64_t q = hopper::Describe(OwnRows());
    if constexpr (kOwnInRegisters) hopper::Keep(own);
    hopper::Keep(scores);
    hopper::Begin();
#pragma unroll
    for (int i = 0; i < kWidth / 16; ++i) {
      const uint64_t right = hopper::Advance(k, i / 4 * kKBox + i % 4 * hopper::kNextColumns);
      if constexpr (kOwnInRegisters) {
        hopper::Product<T, 0>(scores, own + 4 * i, right, P::kBiased || i > 0);
      } else {
        hopper::Product<T, 0>(scores,
                              hopper::Advance(q, i / 4 * kQBox + i % 4 * hopper::kNextColumns),
                              right, P::kBiased || i > 0);
      }
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
                                        float (&scores)[kColumns / 2],
                                        RowSoftmax<kColumns>* softmax) {
    if constexpr (P::kSoftmax) {
      Mask(tile, first_row, block, -INFINITY, scores);
      return softmax->Weigh(kLog2E * in_.alpha, scores);
    }
    const float half = 0.5f * in_.alpha;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      if constexpr (!P::kScored) break;  // the weights are the bias
      const float h = half * scores[i];
      scores[i] = fmaf(h, hopper::FastTanh(h), h);
    }
    Mask(tile, first_row, block, 0.0f, scores);
  }

  // Replaces the numbers of columns that a row doesn't see.
  __device__ __forceinline__ void Mask(const ForwardTile<kColumns>& tile, int first_row, int block,
                                       float by, float (&scores)[kColumns / 2]) {
    const Columns columns{block * kColumns, (block + 1) * kColumns};
    if (tile.both.SeesAll(columns)) return;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const uint32_t seen =
          views_[which].Seen<kColumns>(first_row + row_ + 8 * which, columns.begin + column_);
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        float& score = scores[i / 2 * 4 + 2 * which + i % 2];
        if ((seen >> (i / 2 + i % 2 * 16) & 1) == 0) score = by;
      }
    }
  }

  // Writes those of the thread's two rows.
  __device__ __forceinline__ void StoreLogSums(const OwnPlace& own, float2 log_sums) {
    if (column_ != 0) return;  // one of the four threads that hold a row
    const int row = own.row + row_;
    float* const to = in_.log_sums + own.head * in_.tokens + own.token + row;
    if (row < own.length) to[0] = log_sums.x;
    if (row + 8 < own.length) to[8] = log_sums.y;
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

  const ForwardArguments& in_;
  Memory& memory_;
  const int group_, thread_;
  const int row_, column_;  // place of the thread's first number in a product
  RowView views_[2];        // the views of the thread's two rows
  hopper::Turn q_turn_, k_turn_, v_turn_;
};

template <class P>
__global__ void __launch_bounds__(kForwardThreads, 1)
    ForwardKernel(const __grid_constant__ ForwardArguments in) {
#if GMETA_SM90A
  if (in.plan.header->invalid) {
    return FillWithNan(static_cast<typename P::T*>(in.out), in.out_stride, in.tokens,
                       in.heads * P::kWidth);
  }
  using Memory = ForwardMemory<P>;
  Memory& memory = *reinterpret_cast<Memory*>(hopper::SharedMemory());
  if constexpr (P::kBiased) memory.values.Make(in.bias);
  if (threadIdx.x == 0) {
    constexpr uint32_t kWarps = 4 * kConsumers * hopper::kWarpArrivals;
    constexpr uint32_t kLoader = P::kBiased ? hopper::kWarpArrivals : 0;
    for (int i = 0; i < Memory::kTiles; ++i) {
      memory.tile_full[i].Init(hopper::kWarpArrivals), memory.tile_free[i].Init(kWarps + kLoader);
    }
    memory.q_full.Init(1), memory.q_free.Init(kWarps);
    for (int i = 0; i < Memory::kStages; ++i) {
      memory.k_full[i].Init(P::kScored + kLoader), memory.k_free[i].Init(kWarps);
      memory.v_full[i].Init(1), memory.v_free[i].Init(kWarps);
    }
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::GiveRegisters<40>();
    if (threadIdx.x < 32) {
      ProduceForward<P>(in, memory);
    } else if constexpr (P::kBiased) {
      if (threadIdx.x < 64) LoadForwardBias<P>(in, memory);
    }
  } else {
    hopper::TakeRegisters<232>();
    ForwardConsumer<P>(in, memory).Run();
  }
#endif
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_FORWARD_FORWARD_CUH_
