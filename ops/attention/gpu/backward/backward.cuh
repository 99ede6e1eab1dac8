// The gradients of HSTU's attention on Hopper.
//
//   x = alpha q_i k_j + b_ij     P = SiLU(x), where i sees j      dP = dO V^T     dS = dP SiLU'(x)
//   dV = s P^T dO         dK = alpha s dS^T Q              dQ = alpha s dS K
//
// Layout. dK and dV are sums over rows, dQ over columns. A block of threads owns a tile of 128
// columns (of 128 rows for dQ) in one head of one sequence. It goes through the blocks of 64 rows
// (64 columns) that any token of the tile meets, that is, sees or is seen by. So one block of
// threads sums each result, in one order: no atomics, no second pass over partial sums, the same
// bits in each run. The price is that S and dP are computed twice: 7 products of tiles instead of
// 5. At width 256 the sums of dK and dV don't fit in registers together, and each has a launch of
// its own: 8 products.
//
// Both directions do the same work with rows and columns swapped. The inputs are own tiles A, A' (K
// and V; or Q and dO) and a block's B, B' (Q and dO; or K and V):
//
//   X = A B^T     Y = A' B'^T     dS = Y SiLU'(X)     P = SiLU(X)     sum += dS B     sum' += P B'
//
// With softmax, P = exp(X - L) and dS = P (Y - D), for two numbers of each row that are known
// before (softmax_rows.cuh); all else is the same.
//
// There are three warpgroups. A warp of the first requests copies of tiles to a ring of slots, two
// slots a block, and states for each block what to do with it (produce.cuh). Each of the other two
// owns a strip of 64 of the tile's tokens. X and Y never leave the registers. dS and P are rounded
// where the products left X and Y, and are then the left operands of the sums. The sums read the
// same tiles in shared memory, transposed.
//
// If the bias's tables need gradients, the pass for dQ has all of dS in its registers, and sums it
// as well (table_sums.cuh). Then each block of threads has the same tiles in each run, and its next
// products wait for these sums. At width 256 the sums by place leave slots for one block only: the
// next one is copied while dS is summed. A bias of times alone leaves three slots.
//
// Invariants. A block past a sequence's end reads other sequences' numbers, perhaps NaN. Their X
// and Y are replaced by zeros, not multiplied. Their rows of B and B' are zeroed in shared memory
// before the sums, since 0 times NaN isn't 0. Own tokens past the end are computed from such
// numbers, but not written.
//
// Why it is fast. At width 128 a score costs the matrix units 768 or 1,024 operations, and takes
// about ten other instructions. One of these uses the special function unit (t = tanh(x / 2) gives
// SiLU and its derivative). So the matrix units are the limit, provided they never wait. A group
// computes P and dS in halves: the sums of one half run while the next half is computed. The next
// block's X queues behind the sums, and its Y behind X; while they run, the other group computes. A
// tile's first products run while the sums of the previous tile are written. Products of 64 by 64
// read as much from shared memory as it can deliver, so own tiles stay in registers where there is
// room. The grid is as large as the GPU, and blocks of threads draw tiles from a queue, those of
// long sequences first (J. Shah et al., "FlashAttention-3", 2024, whose backward pass sums dQ by
// atomics).

#ifndef GMETA_OPS_ATTENTION_GPU_BACKWARD_BACKWARD_CUH_
#define GMETA_OPS_ATTENTION_GPU_BACKWARD_BACKWARD_CUH_

#include "ops/attention/gpu/backward/blocks.cuh"
#include "ops/attention/gpu/backward/memory.cuh"
#include "ops/attention/gpu/backward/tile.cuh"
#include "ops/attention/gpu/bias/table_sums.cuh"

namespace gmeta::hstu {

// One of the two warpgroups that compute.
template <class P>
class BackwardConsumer : private BlockConsumer<P> {
 public:
  using T = typename P::T;

  using BlockConsumer<P>::BlockConsumer;

  __device__ __forceinline__ void Run() {
    float of_scores[P::kOfScores ? P::kWidth / 2 : 1] = {};
    float of_weights[P::kOfWeights ? P::kWidth / 2 : 1] = {};
    float scores[kNumbers];
    float products[P::kOfScores ? kNumbers : 1];
    uint32_t rounded_scores[2][P::kOfScores ? 8 : 1];
    uint32_t rounded_weights[2][P::kOfWeights ? 8 : 1];
    float of_buckets[kBucketsOfLane] = {};
    RowNumbers own_rows[2];
    TableSums<P> tables(in_, memory_, group_, of_buckets);
    tables.Clear();
    if (!NextTile()) return tables.Write();
    LoadRows(own_rows);
    Multiply<0>(scores);
    if constexpr (P::kOfScores) Multiply<1>(products);
    while (true) {
      // Here X and Y of a block are being computed.
      hopper::Wait<0>();
      hopper::Keep(scores);
      hopper::Keep(products);
      if constexpr (!P::kOfWeights) Free(&memory_.free[block_.Second().slot()]);
      const BlockHeader<P>& header = memory_.headers[block_.header()];
      if (header.flags & kMasked << group_) {
        MaskBlock<P>(in_, Own(), header, scores, products);
        if (header.flags & kPartial) ZeroTails(Own().length - header.row);
      }
      if constexpr (!P::kOfScores) Await(block_.Second());
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // The sums of one half run while the other half is computed.
        float* const of_half = products + (P::kOfScores ? 16 * half : 0);
        if constexpr (P::kSoftmax) {
          DifferentiateSoftmax<P>(kLog2E * in_.alpha, header, own_rows, half, scores + 16 * half,
                                  of_half, rounded_scores[half], rounded_weights[half]);
        } else {
          Differentiate<P>(0.5f * in_.alpha, scores + 16 * half, of_half, rounded_scores[half],
                           rounded_weights[half]);
        }
        if constexpr (P::kOfWeights) {
          Sum(rounded_weights[half], block_.Second(), half, of_weights);
        }
        if constexpr (P::kOfScores) Sum(rounded_scores[half], block_, half, of_scores);
      }
      hopper::Commit();
      if constexpr (P::kOfBias) {
        // The tables' sums need the registers of products that would run beside them.
        hopper::Wait<0>();
        KeepBoth(rounded_scores);
        hopper::Keep(of_scores);
        const int column = header.row;
        const auto bias = BiasOf(block_);
        if constexpr (P::kFreesFirst) Free(&memory_.free[block_.slot()]);
        tables.Add(Own(), column, bias, OwnSquare(), products);
      }
      if constexpr (!P::kOfScores) Free(&memory_.free[block_.slot()]);
      const RingPlace<P> done = block_;
      block_ = block_.AfterNext();
      if (Sees()) {
        // The next block's X queues behind this block's sums. Y follows when the sums are done,
        // because it takes the registers of P and dS.
        Multiply<0>(scores);
        hopper::Wait<1>();
        KeepBoth(rounded_scores);
        KeepBoth(rounded_weights);
        if constexpr (P::kOfWeights) Free(&memory_.free[done.Second().slot()]);
        if constexpr (P::kOfScores && !P::kFreesFirst) Free(&memory_.free[done.slot()]);
        if constexpr (P::kOfScores) Multiply<1>(products);
        continue;
      }
      hopper::Wait<0>();
      KeepBoth(rounded_scores);
      KeepBoth(rounded_weights);
      hopper::Keep(of_scores);
      hopper::Keep(of_weights);
      if constexpr (P::kOfWeights) Free(&memory_.free[done.Second().slot()]);
      if constexpr (P::kOfScores && !P::kFreesFirst) Free(&memory_.free[done.slot()]);
      if (Find()) {
        Multiply<0>(scores);
        if constexpr (P::kOfScores) Multiply<1>(products);
        continue;
      }
      // The tile is done. If the next tile's own tokens could be copied ahead, its first products
      // run while the sums of this one are written.
      const OwnStrip own = Own();  // a copy: the place may describe another tile once freed
      FreeOwn();
      if constexpr (!P::kOwnAhead) Store(own, of_scores, of_weights);
      const bool more = NextTile();
      if (!more) {
        if constexpr (P::kOwnAhead) Store(own, of_scores, of_weights);
        return tables.Write();
      }
      LoadRows(own_rows);
      Multiply<0>(scores);
      if constexpr (P::kOfScores) Multiply<1>(products);
      if constexpr (P::kOwnAhead) Store(own, of_scores, of_weights);
#pragma unroll
      for (float& x : of_scores) x = 0.0f;
#pragma unroll
      for (float& x : of_weights) x = 0.0f;
    }
  }

 private:
  using Base = BlockConsumer<P>;
  using Base::Await, Base::BiasOf, Base::OwnSquare, Base::Find, Base::Free, Base::FreeOwn,
      Base::NextTile, Base::Own, Base::Sees, Base::Uniform;
  using Base::block_, Base::group_, Base::in_, Base::kNumbers, Base::memory_;
  template <int kWhich>
  __device__ __forceinline__ void Multiply(float (&to)[kNumbers]) {
    Base::template Multiply<kWhich>(to);
  }

  template <int kSize>
  static __device__ __forceinline__ void KeepBoth(uint32_t (&halves)[2][kSize]) {
    hopper::Keep(halves[0]);
    hopper::Keep(halves[1]);
  }

  // Loads what softmax needs of the thread's own rows.
  __device__ __forceinline__ void LoadRows(RowNumbers (&rows)[2]) const {
    if constexpr (P::kSoftmax && !P::kColumns) {
      const OwnStrip& own = Own();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows[i] = in_.rows.Of(own.head, own.token, own.row + OwnRow() + 8 * i, own.length);
      }
    }
  }

  __device__ __forceinline__ void Store(
      const OwnStrip& own, const float (&of_scores)[P::kOfScores ? P::kWidth / 2 : 1],
      const float (&of_weights)[P::kOfWeights ? P::kWidth / 2 : 1]) {
    if constexpr (P::kOfScores) {
      StoreSums<T>(of_scores, in_.alpha * in_.scale, own, static_cast<T*>(in_.of_scores),
                   in_.of_scores_stride);
    }
    if constexpr (P::kOfWeights) {
      StoreSums<T>(of_weights, in_.scale, own, static_cast<T*>(in_.of_weights),
                   in_.of_weights_stride);
    }
  }

  // Starts sum += dS B or sum' += P B' for half of the block's tokens.
  __device__ __forceinline__ void Sum(uint32_t (&rounded)[8], const RingPlace<P>& place, int half,
                                      float (&sum)[P::kWidth / 2]) {
    const uint64_t right = hopper::Describe(memory_.slots[Uniform(place.slot())], P::kBoxBytes);
    hopper::Keep(rounded);
    hopper::Begin();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      hopper::Product<T, 1>(sum, rounded + 4 * i,
                            hopper::AdvanceLow(right, (2 * half + i) * hopper::kNextRows), 1);
    }
  }

  // The block's tokens from `row` on belong to other sequences. Replaces them by zeros before the
  // sums. Both groups do this, and write the same.
  __device__ __forceinline__ void ZeroTails(int row) {
    if constexpr (P::kOfWeights) {
      if constexpr (!P::kOfScores) Await(block_.Second());
      ZeroRows<P>(memory_.slots[block_.Second().slot()], row);
    }
    if constexpr (P::kOfScores) ZeroRows<P>(memory_.slots[block_.slot()], row);
    hopper::FenceAsyncProxy();
    if (group_ == 0) {
      hopper::NamedSync(1, 128);
    } else {
      hopper::NamedSync(2, 128);
    }
  }
};

template <class P>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    BackwardKernel(const __grid_constant__ BackwardArguments in) {
#if GMETA_SM90A
  if (in.plan.header->invalid) {
    const int width = in.heads * P::kWidth;
    using T = typename P::T;
    if constexpr (P::kOfScores)
      FillWithNan(static_cast<T*>(in.of_scores), in.of_scores_stride, in.tokens, width);
    if constexpr (P::kOfWeights)
      FillWithNan(static_cast<T*>(in.of_weights), in.of_weights_stride, in.tokens, width);
    return;
  }
  RunPass<P, BackwardConsumer<P>>(in);
#endif
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BACKWARD_BACKWARD_CUH_
