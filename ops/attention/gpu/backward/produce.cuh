// The producer of the backward pass (backward.cuh): a warp that finds the blocks that a tile meets,
// and requests their copies.
//
// The lanes examine 32 blocks at once, each from the six numbers of a strip, unless the numbers of
// all 32 strips together show that the tile meets none of them. Consumers decide nothing: a word
// that comes with each block says what to do with it.

#ifndef GMETA_OPS_ATTENTION_GPU_BACKWARD_PRODUCE_CUH_
#define GMETA_OPS_ATTENTION_GPU_BACKWARD_PRODUCE_CUH_

#include "ops/attention/gpu/backward/memory.cuh"

namespace gmeta::hstu {

template <class P>
class BackwardProducer {
 public:
  __device__ __forceinline__ BackwardProducer(const BackwardArguments& in,
                                              BackwardMemory<P>& memory)
      : in_(in), memory_(memory), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void Run() {
    const int* const tiles = P::kColumns ? in_.plan.column_tiles : in_.plan.row_tiles;
    WorkQueue* const queue =
        P::kColumns ? &in_.plan.header->backward_columns : &in_.plan.header->backward_rows;
    const int works = in_.plan.header->tiles * in_.heads;
    for (int work = blockIdx.x, turn = 0; work < works;) {
      const int strip = tiles[work / in_.heads];
      head_ = work % in_.heads;
      if constexpr (P::kOfBias) {
        work = InTurn(++turn);
      } else if (lane_ == 0) {
        work = NextWork(queue);  // it isn't waited for until the tile is done
      }
      own_ = in_.plan.strips + strip;
      token_ = own_->token, length_ = own_->length, row_ = own_->row;
      const int blocks = (length_ + kStripRows - 1) / kStripRows;
      own_end_ = length_;
      if (!P::kColumns && blocks % 2 == 1) {
        // The last rows see most: let them share a tile, and the first strip stand alone.
        if (row_ == 0) {
          own_end_ = kStripRows;
        } else {
          --own_, row_ -= kStripRows;
        }
      }
      // Most sequences have one group, whose blocks are examined once.
      const int flags = blocks <= kGroupStrips ? FlagsIn(0, blocks) : 0;
      const unsigned met = blocks <= kGroupStrips ? 1 : GroupsMet(0, blocks);
      int seen = __popc(Seen(flags));
      if (blocks > kGroupStrips) {
        ForEachGroup(blocks, met, [&](int first) { seen += __popc(Seen(FlagsIn(first, blocks))); });
      }
      CopyOwn(seen);
      if constexpr (P::kNearBias) {
        loader_.SetOwn(in_.bias, in_.plan, own_->first_strip, length_, row_);
      }
      ForEachGroup(blocks, met, [&](int first) {
        CopyBlocks(first, blocks <= kGroupStrips ? flags : FlagsIn(first, blocks));
      });
      if constexpr (!P::kOfBias) work = __shfl_sync(kAll, work, 0);
    }
    own_end_ = 0;
    CopyOwn(-1);
    if (!P::kOfBias && lane_ == 0) LeaveQueue(queue);
  }

 private:
  static constexpr unsigned kAll = 0xFFFFFFFFu;

  // Sums over all tiles are the same in each run only if each block of threads always has the same
  // tiles. The tiles are dealt out back and forth among the blocks, as costs fall from tile to
  // tile.
  static __device__ __forceinline__ int InTurn(int turn) {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    return turn * blocks + (turn % 2 == 0 ? block : blocks - 1 - block);
  }

  static __device__ __forceinline__ unsigned Seen(int flags) {
    return __ballot_sync(kAll, flags & (kSeen | kSeen << 1));
  }

  // Calls function(first block) for each group of 32 blocks that the tile may meet; `met` has a bit
  // for each of the first 32 groups.
  template <class Function>
  __device__ __forceinline__ void ForEachGroup(int blocks, unsigned met,
                                               const Function& function) const {
    for (int group = 0;;) {
      for (; met != 0; met &= met - 1) function((group + __ffs(met) - 1) * kGroupStrips);
      group += 32;
      if (group * kGroupStrips >= blocks) return;
      met = GroupsMet(group, blocks);
    }
  }

  // Returns a bit for each of the 32 groups from `group` on that the tile may meet.
  __device__ __forceinline__ unsigned GroupsMet(int group, int blocks) const {
    const int first = (group + lane_) * kGroupStrips;
    return __ballot_sync(kAll, first < blocks && MeetsGroup(first));
  }

  // Returns whether the tile may meet any of the 32 blocks from `first` on.
  __device__ __forceinline__ bool MeetsGroup(int first) const {
    if constexpr (P::kColumns) {
      const Columns own{row_, min(row_ + kTileRows, length_)};
      return in_.plan.groups[own_->first_strip + first].Sees(own, kGroupRows);
    }
    const int column = first * kStripRows;
    const Columns columns{column, min(column + kGroupRows, length_)};
    return own_[0].Sees(columns) || (row_ + kStripRows < own_end_ && own_[1].Sees(columns));
  }

  __device__ __forceinline__ int FlagsIn(int first, int blocks) const {
    return first + lane_ < blocks ? FlagsOf(first + lane_) : 0;
  }
  __device__ __forceinline__ int FlagsOf(int block) const {
    const int row = block * kStripRows;
    int flags = row + kStripRows > length_ ? kPartial : 0;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int own_row = row_ + group * kStripRows;
      if (own_row >= own_end_) break;
      const int column = P::kColumns ? own_row : row;
      const Columns columns{column, min(column + kStripRows, length_)};
      const Strip& rows = P::kColumns ? in_.plan.strips[own_->first_strip + block] : own_[group];
      if (!rows.Sees(columns)) continue;
      flags |= kSeen << group;
      // Tables sum what other results leave out: rows past the end.
      const bool behind = P::kOfBias && own_row + kStripRows > length_;
      if ((flags & kPartial) || behind || !rows.SeesAll(columns)) flags |= kMasked << group;
    }
    return flags;
  }

  // Copies 64 tokens to `to`. Lane 0 only.
  __device__ __forceinline__ void Copy(const CUtensorMap* map, char* to, hopper::Barrier* full,
                                       int row) const {
#pragma unroll
    for (int box = 0; box < P::kBoxes; ++box) {
      hopper::CopyBox(map, to + box * P::kBoxBytes, full, box * hopper::kBoxWidth, head_,
                      token_ + row);
    }
  }

  __device__ __forceinline__ void CopyOwn(int blocks) {
    const int buffer = tile_ % P::kOwnBuffers;
    const uint32_t round = tile_ / P::kOwnBuffers % 2;
    if (lane_ == 0) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int row = row_ + group * kStripRows;
        hopper::Barrier* const full = &memory_.own_full[buffer][group];
        memory_.own_free[buffer][group].Wait(round ^ 1);
        memory_.strips[tile_][group] = {
            {token_, length_, row, head_}, blocks < 0 ? 0 : own_->first_strip, blocks};
        if (row < own_end_) {
          constexpr int kFirst = P::kScored ? 0 : 1;
          full->ArriveExpecting((P::kOwnTensors - kFirst) * P::kTileBytes);
#pragma unroll
          for (int i = kFirst; i < P::kOwnTensors; ++i)
            Copy(&in_.own[i], memory_.own[buffer][group][i], full, row);
        } else {
          full->Arrive();
        }
      }
    }
    __syncwarp();
    tile_ = (tile_ + 1) % P::kToldTiles;
  }

  // Copies those of the 32 blocks from `first` on that any row sees.
  __device__ __forceinline__ void CopyBlocks(int first, int flags_of_lane) {
    using Loader = decltype(loader_);
    typename Loader::RowTiles of_lane{0, 0};
    if (P::kNearBias && P::kColumns && in_.bias.map != nullptr && flags_of_lane != 0) {
      of_lane = Loader::TilesOf(in_.plan, own_->first_strip + first + lane_);
    }
    for (unsigned seen = Seen(flags_of_lane); seen != 0; seen &= seen - 1) {
      const int lane = __ffs(seen) - 1;
      const int flags = __shfl_sync(kAll, flags_of_lane, lane);
      const int row = (first + lane) * kStripRows;
      BlockHeader<P>& header = memory_.headers[place_.header()];
      if constexpr (P::kNearBias) {
        loader_.Fetch(
            in_.bias, row,
            {__shfl_sync(kAll, of_lane.first, lane), __shfl_sync(kAll, of_lane.count, lane)});
      }
      FetchRows(row);
      memory_.free[place_.slot()].Wait(place_.round() ^ 1);
      if (lane_ == 0) {
        if constexpr (P::kScored) {
          Copy(&in_.others[0], memory_.slots[place_.slot()], &memory_.full[place_.slot()], row);
        }
        header.row = row, header.flags = flags;
      }
      if (P::kColumns && (flags & (kMasked | kMasked << 1))) LoadViews(row, &header);
      SendRows(&header);
      // With three slots the second may be free only after the first has been announced.
      if constexpr (P::kEven) CopySecond(row);
      hopper::Barrier* const full = &memory_.full[place_.slot()];
      constexpr uint32_t kBytes = P::kScored ? P::kTileBytes : 0;
      if constexpr (P::kNearBias) {
        loader_.Send(&memory_.bias[place_.header()], full, kBytes);
      } else {
        full->ArriveAsWarpExpecting(kBytes);
      }
      if constexpr (!P::kEven) CopySecond(row);
      place_ = place_.AfterNext();
    }
  }

  // Copies the second tile of the block at place_.
  __device__ __forceinline__ void CopySecond(int row) {
    const int slot = place_.Second().slot();
    memory_.free[slot].Wait(place_.Second().round() ^ 1);
    memory_.full[slot].ArriveAsWarpExpecting(P::kTileBytes);
    if (lane_ == 0) Copy(&in_.others[1], memory_.slots[slot], &memory_.full[slot], row);
  }

  // Loads what the rows of a block see; rows past the sequence's end see nothing.
  __device__ __forceinline__ void LoadViews(int row, BlockHeader<P>* header) const {
#pragma unroll
    for (int i = 0; i < kStripRows; i += 32) {
      RowView view{0, 0, 0};
      if (row + i + lane_ < length_) {
        const int32_t* of_row = in_.visible + 3 * (static_cast<int64_t>(token_) + row + i + lane_);
        view = {of_row[0], of_row[1], of_row[2]};
      }
      if constexpr (kOfRows > 0) {
        header->views[i + lane_] = NarrowView::Of(view, row_);
      } else {
        header->views[i + lane_] = view;
      }
    }
  }

  // Fetches what softmax needs of a block's rows, and writes it to the header.
  __device__ __forceinline__ void FetchRows(int row) {
    if constexpr (kOfRows > 0) {
#pragma unroll
      for (int i = 0; i < kOfRows; ++i) {
        rows_[i] = in_.rows.Of(head_, token_, row + 32 * i + lane_, length_);
      }
    }
  }
  __device__ __forceinline__ void SendRows(BlockHeader<P>* header) const {
    if constexpr (kOfRows > 0) {
#pragma unroll
      for (int i = 0; i < kOfRows; ++i) header->rows[32 * i + lane_] = rows_[i];
    }
  }

  const BackwardArguments& in_;
  BackwardMemory<P>& memory_;
  const int lane_;
  RingPlace<P> place_;
  BiasLoader<!P::kColumns, typename P::Bias> loader_;
  static constexpr int kOfRows = P::kColumns && P::kSoftmax ? kStripRows / 32 : 0;
  RowNumbers rows_[kOfRows > 0 ? kOfRows : 1];  // of the block that comes next
  // The tile.
  const Strip* own_;
  int token_ = 0, length_ = 0, row_ = 0, head_ = 0;
  int own_end_ = 0;  // the tile's tokens are before this place in the sequence
  int tile_ = 0;     // the tile's place in memory_.strips
};

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_BACKWARD_PRODUCE_CUH_
