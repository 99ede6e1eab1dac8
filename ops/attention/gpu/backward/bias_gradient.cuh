// The pass that computes nothing but the gradients of a bias's tables (table_sums.cuh), for
// attention by the bias alone: there is no q, beside whose gradient they could be summed. The
// weights are the bias itself, so dS is dP, which needs no scores.

#ifndef GMETA_OPS_ATTENTION_GPU_BACKWARD_BIAS_GRADIENT_CUH_
#define GMETA_OPS_ATTENTION_GPU_BACKWARD_BIAS_GRADIENT_CUH_

#include "ops/attention/gpu/backward/blocks.cuh"
#include "ops/attention/gpu/bias/table_sums.cuh"

namespace gmeta::hstu {

template <class P>
class BiasConsumer : private BlockConsumer<P> {
 public:
  using BlockConsumer<P>::BlockConsumer;

  __device__ __forceinline__ void Run() {
    float of_buckets[kBucketsOfLane] = {};
    TableSums<P> tables(in_, memory_, group_, of_buckets);
    float products[kNumbers];
    while (NextTile()) {
      tables.Clear();
      do {
        Base::template Multiply<1>(products);
        hopper::Wait<0>();
        hopper::Keep(products);
        Free(&memory_.free[block_.Second().slot()]);
        const BlockHeader<P>& header = memory_.headers[block_.header()];
        if (header.flags & kMasked << group_) MaskBlock<P>(in_, Own(), header, products, products);
        tables.Add(Own(), header.row, BiasOf(block_), OwnSquare(), products);
        Free(&memory_.free[block_.slot()]);
        block_ = block_.AfterNext();
      } while (Find());
      hopper::FenceAsyncProxy();  // the copy engine writes the next tile's rows over the diagonals
      FreeOwn();
    }
    tables.Write();
  }

 private:
  using Base = BlockConsumer<P>;
  using Base::BiasOf, Base::Find, Base::Free, Base::FreeOwn, Base::NextTile, Base::Own,
      Base::OwnSquare;
  using Base::block_, Base::group_, Base::in_, Base::kNumbers, Base::memory_;
};

template <class P>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    BiasGradientKernel(const __grid_constant__ BackwardArguments in) {
#if GMETA_SM90A
  if (in.plan.header->invalid) return;
  RunPass<P, BiasConsumer<P>>(in);
#endif
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BACKWARD_BIAS_GRADIENT_CUH_
