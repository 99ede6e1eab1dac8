// The gradients of a bias's tables on Hopper: sums of dS over all heads, rows and columns, by
// distance in places and by bucket of time.
//
//   dp_m = s sum_{j - i + n - 1 = m} dS_ij     dt_b = s sum_{b_ij = b} dS_ij     (backward.cuh)
//
// This is another pass like those of the backward pass, with rows as own tokens. It computes the
// same dS once more, in float32, and adds it up instead of multiplying it. Sums over all tiles have
// one order, without atomics: a block of threads has the same tiles in each run
// (BackwardProducer::InTurn), a thread has the same numbers, and the final partial sums are added
// in order of their numbers.
//
// Time. Each thread has a sum for each bucket in its local memory. Neighbours are mostly in one
// bucket, so a thread keeps the current bucket's sum in a register until another bucket comes. It
// compares four numbers of a row at once, whose buckets are the bytes of a word.
//
// Places. A block of 64 by 64 numbers goes through shared memory, in the place of the group's own
// rows, which are in registers by then: number (i, j) lies at i 64 + (j + 7 i + 16 [i >= 32]) mod
// 64. So a diagonal, along which j - i is constant, moves on by 8 banks a row. Two threads share
// the diagonals s and s - 64, which together have one number in each row; each thread takes 32
// rows. Reading 16 neighbouring diagonals of both halves causes few bank conflicts, and so does
// writing 8 rows. The threads add each sum to the warpgroup's slice of the table, in global memory.
// Distances at or beyond the table's ends stay with the thread.

#ifndef GMETA_OPS_ATTENTION_GPU_BIAS_GRADIENT_CUH_
#define GMETA_OPS_ATTENTION_GPU_BIAS_GRADIENT_CUH_

#include "ops/attention/gpu/backward_blocks.cuh"
#include "ops/attention/gpu/bias_sums.cuh"

namespace gmeta::hstu {

struct BiasArguments {
  BackwardArguments backward;
  BiasParts parts;
};

template <class P>
class BiasConsumer : private BlockConsumer<P> {
 public:
  __device__ __forceinline__ BiasConsumer(const BiasArguments& in, BackwardMemory<P>& memory)
      : BlockConsumer<P>(in.backward, memory), parts_(in.parts) {
    slice_ = parts_.slices + static_cast<int64_t>(blockIdx.x * kGroups + group_) * parts_.places;
  }

  __device__ __forceinline__ void Run() {
    float of_bucket[kMostBuckets];
    for (int i = 0; i < parts_.buckets; ++i) of_bucket[i] = 0.0f;
    uint32_t bucket = 0;  // the last numbers' bucket, in each byte; `sum` is theirs
    float sum = 0.0f;
    while (NextTile()) {
      const OwnStrip own = Own();
      do {
        float of_scores[kNumbers];
        uint32_t buckets[kNumbers / 4] = {};
        const int column = Differentiate(own, of_scores, buckets);
        if (parts_.places > 0) AddDiagonals(own, column, of_scores);
        if (parts_.buckets == 0) continue;
#pragma unroll
        for (int word = 0; word < kNumbers / 4; ++word) {
          const float four[4] = {of_scores[NumberOf(word, 0)], of_scores[NumberOf(word, 1)],
                                 of_scores[NumberOf(word, 2)], of_scores[NumberOf(word, 3)]};
          if (buckets[word] == bucket) {
            sum += (four[0] + four[1]) + (four[2] + four[3]);
            continue;
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t next = buckets[word] >> (8 * i) & 0xFF;
            if (next != (bucket & 0xFF)) {
              of_bucket[bucket & 0xFF] += sum;
              bucket = next * 0x01010101u, sum = 0.0f;
            }
            sum += four[i];
          }
        }
      } while (Find());
      hopper::FenceAsyncProxy();  // the copy engine writes the next tile's rows over the diagonals
      FreeOwn();
    }
    if (parts_.buckets > 0) of_bucket[bucket & 0xFF] += sum;
    Write(of_bucket);
  }

 private:
  using Base = BlockConsumer<P>;
  using Base::block_, Base::group_, Base::in_, Base::kNumbers, Base::memory_;
  using Base::Find, Base::Free, Base::FreeOwn, Base::NextTile, Base::Own;

  // Returns which number's bucket is a given byte of a word. A word covers neighbours of a row.
  static __device__ __forceinline__ constexpr int NumberOf(int word, int byte) {
    return (word % 4 * 2 + byte / 2) * 4 + word / 4 * 2 + byte % 2;
  }

  // Computes dS of the current block and frees the block. Returns its first column.
  __device__ __forceinline__ int Differentiate(const OwnStrip& own, float (&scores)[kNumbers],
                                               uint32_t (&buckets)[kNumbers / 4]) {
    float products[kNumbers];
    // Y is computed beside the bias if registers are left for that.
    constexpr bool kBeside = P::kWidth < 256;
    if constexpr (kBeside) Base::template Multiply<1>(products);
    Base::template Multiply<0>(scores, [&](int number, EntryPlace place, bool behind) {
      const int bucket = memory_.entries.BucketAt(in_.bias, place) + behind;
      buckets[number / 2 % 2 * 4 + number / 8] |= bucket << (number / 4 % 2 * 16 + number % 2 * 8);
    });
    if constexpr (!kBeside) Base::template Multiply<1>(products);
    hopper::Wait<0>();
    hopper::Keep(scores);
    hopper::Keep(products);
    const BlockHeader<P>& header = memory_.headers[block_.header()];
    const int column = header.row;
    if (header.flags & kMasked << group_) MaskBlock<P>(in_, own, header, scores, products);
    Free(&memory_.free[block_.slot()]);
    Free(&memory_.free[block_.Second().slot()]);
    block_ = block_.AfterNext();
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const float h = 0.5f * in_.alpha * scores[i], t = hopper::FastTanh(h);
      // Rows behind the sequence's end belong to another sequence.
      const bool counts = own.row + OwnRow() + i / 2 % 2 * 8 < own.length;
      scores[i] = counts ? Slope(t, fmaf(h, t, h)) * products[i] : 0.0f;
    }
    return column;
  }

  // Adds a block's diagonals to the slice. All threads of the warpgroup call it.
  __device__ __forceinline__ void AddDiagonals(const OwnStrip& own, int column,
                                               const float (&of_scores)[kNumbers]) {
    static_assert(P::kOwnTensors * P::kTileBytes >= 64 * 64 * static_cast<int>(sizeof(float)));
    float* const tile = reinterpret_cast<float*>(memory_.own[0][group_]);
    hopper::NamedSync(1 + group_, 128);  // all have read the former contents
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const int of_row = OwnRow() + i / 2 % 2 * 8, of_column = BlockColumn() + i / 4 * 8 + i % 2;
      tile[of_row * 64 + (of_column + 7 * of_row + of_row / 32 * 16) % 64] = of_scores[i];
    }
    hopper::NamedSync(1 + group_, 128);
    // j - i is `shift` in the rows before 64 - shift, and shift - 64 in the others.
    const int thread = static_cast<int>(threadIdx.x) % 128, shift = thread / 2, half = thread % 2;
    const float* const from = tile + half * 32 * 64;
    float before = 0.0f, behind = 0.0f;
#pragma unroll
    for (int row = 0; row < 32; ++row) {
      const float x = from[row * 64 + (shift + 8 * row + 16 * half) % 64];
      if (row < 64 - shift - 32 * half) {
        before += x;
      } else {
        behind += x;
      }
    }
    before += __shfl_xor_sync(0xFFFFFFFFu, before, 1);
    behind += __shfl_xor_sync(0xFFFFFFFFu, behind, 1);
    const float sum = half == 0 ? before : behind;
    const int place = column - own.row + shift - 64 * half + in_.bias.n - 1;
    if (place <= 0) {
      below_ += sum;
    } else if (place >= parts_.places - 1) {
      above_ += sum;
    } else {
      slice_[place] += sum;
    }
  }

  static __device__ __forceinline__ float OfWarp(float x) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, by);
    return x;
  }

  __device__ __forceinline__ void Write(const float* of_bucket) {
    const int warp = static_cast<int>(blockIdx.x) * BiasParts::kWarps + group_ * 4 +
                     static_cast<int>(threadIdx.x) % 128 / 32;
    float* const to = parts_.of_warps + static_cast<int64_t>(warp) * parts_.OfWarp();
    const auto write = [&](int at, float x) {
      x = OfWarp(x);
      if (threadIdx.x % 32 == 0) to[at] = x;
    };
    write(0, below_);
    write(1, above_);
    for (int i = 0; i < parts_.buckets; ++i) write(2 + i, of_bucket[i]);
  }

  const BiasParts& parts_;
  float* slice_;
  float below_ = 0.0f, above_ = 0.0f;  // for distances at or beyond the ends of the table
};

template <class P>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    BiasGradientKernel(const __grid_constant__ BiasArguments in) {
#if GMETA_SM90A
  if (in.backward.plan.header->invalid) return;
  RunPass<P, BiasConsumer<P>>(in.backward, in);
#endif
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BIAS_GRADIENT_CUH_
