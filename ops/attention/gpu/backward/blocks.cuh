// How a warpgroup of the backward pass (backward.cuh) moves from tile to tile and from block to
// block, and the two products that start every block.

#ifndef GMETA_OPS_ATTENTION_GPU_BACKWARD_BLOCKS_CUH_
#define GMETA_OPS_ATTENTION_GPU_BACKWARD_BLOCKS_CUH_

#include "ops/attention/gpu/backward/memory.cuh"
#include "ops/attention/gpu/backward/produce.cuh"
#include "ops/attention/gpu/backward/tile.cuh"
#include "ops/attention/gpu/bias/begin_scores.cuh"

namespace gmeta::hstu {

template <class P>
class BlockConsumer {
 public:
  using T = typename P::T;

  __device__ __forceinline__ BlockConsumer(const BackwardArguments& in, BackwardMemory<P>& memory)
      : in_(in), memory_(memory), group_(Uniform(threadIdx.x / 128) - 1) {}

 protected:
  static constexpr int kNumbers = 32;  // of the 64 by 64 numbers, those that a thread holds

  __device__ __forceinline__ const OwnStrip& Own() const { return memory_.strips[tile_][group_]; }

  __device__ __forceinline__ void FreeOwn() {
    if constexpr (!P::kOwnInRegisters || P::kAlone) {
      Free(&memory_.own_free[tile_ % P::kOwnBuffers][group_]);
    }
  }

  // Moves to the group's next tile and the first block that it meets. Returns false if there is
  // none.
  __device__ __forceinline__ bool NextTile() {
    while (true) {
      tile_ = (tile_ + 1) % P::kToldTiles;
      const int buffer = tile_ % P::kOwnBuffers;
      memory_.own_full[buffer][group_].Wait(tile_ / P::kOwnBuffers % 2);
      blocks_ = Own().blocks;
      if (blocks_ < 0) return false;
      if constexpr (P::kOwnInRegisters) {
#pragma unroll
        for (int i = P::kScored ? 0 : 1; i < P::kOwnTensors; ++i)
          LoadLeft<P::kBoxBytes>(memory_.own[buffer][group_][i], own_[i]);
        if constexpr (!P::kAlone) Free(&memory_.own_free[buffer][group_]);
      }
      if (Find()) return true;
      FreeOwn();
    }
  }

  // Returns x, which is the same in all lanes, so that the compiler may keep it and what is
  // computed from it in registers shared by the warp.
  static __device__ __forceinline__ int Uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

  // Releases, for this warp, the buffer that the barrier guards.
  __device__ __forceinline__ void Free(hopper::Barrier* barrier) { barrier->ArriveAsWarp(); }

  __device__ __forceinline__ void Await(const RingPlace<P>& place) {
    memory_.full[place.slot()].Wait(place.round());
  }

  // Returns whether the next block exists and the group meets it. Doesn't wait for further blocks:
  // they may need slots that the group still holds.
  __device__ __forceinline__ bool Sees() {
    if (blocks_ == 0) return false;
    Await(block_);
    if (!(memory_.headers[block_.header()].flags & kSeen << group_)) return false;
    --blocks_;
    return true;
  }

  // Moves to the next block that the group meets. Returns false if there is none.
  __device__ __forceinline__ bool Find() {
    while (!Sees()) {
      if (blocks_ == 0) return false;
      --blocks_;
      // A slot's round must not end before the group has waited for it, or the group would miss the
      // next round.
      Await(block_.Second());
      Free(&memory_.free[block_.slot()]);
      Free(&memory_.free[block_.Second().slot()]);
      block_ = block_.AfterNext();
    }
    return true;
  }

  // The number of the warp's 16 own tokens in the tile.
  __device__ __forceinline__ int OwnSquare() const {
    return kSquares * group_ + static_cast<int>(threadIdx.x) % 128 / 32;
  }

  // Returns the bias of a block.
  __device__ __forceinline__ auto BiasOf(const RingPlace<P>& place) const {
    if constexpr (P::kNearBias) {
      return NearBias<!P::kColumns, typename P::Bias>(memory_.bias[place.header()], memory_.values,
                                                      OwnSquare());
    } else {
      return FarBias<!P::kColumns>(in_.bias, memory_.values, in_.plan, Own().first_strip, Own().row,
                                   memory_.headers[place.header()].row, OwnSquare());
    }
  }

  // Starts X = A B^T (kWhich 0), with its bias (which is all of X if it isn't kScored), or Y = A'
  // B'^T (1).
  template <int kWhich>
  __device__ __forceinline__ void Multiply(float (&to)[kNumbers]) {
    constexpr bool kAdds = kWhich == 0 && P::kBiased;
    if constexpr (kAdds) BeginScores(BiasOf(block_), OwnSquare(), to);
    if constexpr (kWhich == 0 && !P::kScored) return;
    const RingPlace<P> place = kWhich == 0 ? block_ : block_.Second();
    if constexpr (kWhich == 1) Await(place);
    const uint64_t right = hopper::Describe(memory_.slots[Uniform(place.slot())]);
    const uint64_t left =
        hopper::Describe(memory_.own[Uniform(tile_ % P::kOwnBuffers)][group_][kWhich]);
    hopper::Keep(to);
    hopper::Begin();
#pragma unroll
    for (int i = 0; i < P::kWidth / 16; ++i) {
      const uint32_t at = i / 4 * P::kBoxBytes + i % 4 * hopper::kNextColumns;
      if constexpr (P::kOwnInRegisters) {
        hopper::Product<T, 0>(to, own_[kWhich] + 4 * i, hopper::AdvanceLow(right, at),
                              kAdds || i > 0);
      } else {
        hopper::Product<T, 0>(to, hopper::AdvanceLow(left, at), hopper::AdvanceLow(right, at),
                              kAdds || i > 0);
      }
    }
    hopper::Commit();
  }

  const BackwardArguments& in_;
  BackwardMemory<P>& memory_;
  const int group_;
  int tile_ = P::kToldTiles - 1;  // the tile's place in memory_.strips
  int blocks_;                    // how many blocks of the tile are left
  RingPlace<P> block_;            // the start of the current or the next block
  uint32_t own_[2][P::kOwnInRegisters ? P::kWidth / 4 : 1];
};

// The body of a kernel of the backward pass. A warp of the first warpgroup runs the producer; the
// other warpgroups run Consumer(in, memory).
template <class P, class Consumer>
__device__ __forceinline__ void RunPass(const BackwardArguments& in) {
  BackwardMemory<P>& memory = *reinterpret_cast<BackwardMemory<P>*>(hopper::SharedMemory());
  if (threadIdx.x == 0) memory.Init();
  if constexpr (P::kBiased) memory.values.Make(in.bias);
  __syncthreads();
  if (threadIdx.x < 128) {
    hopper::GiveRegisters<40>();
    if (threadIdx.x < 32) BackwardProducer<P>(in, memory).Run();
  } else {
    hopper::TakeRegisters<232>();
    Consumer(in, memory).Run();
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BACKWARD_BLOCKS_CUH_
