// The warps of the forward pass (forward.cuh) that compute nothing: one takes tiles from the queue
// and has rows and columns copied, one loads the bias.

#ifndef GMETA_OPS_ATTENTION_GPU_FORWARD_PRODUCE_CUH_
#define GMETA_OPS_ATTENTION_GPU_FORWARD_PRODUCE_CUH_

#include "ops/attention/gpu/forward/memory.cuh"
#include "ops/hopper/turn.cuh"

namespace gmeta::hstu {

template <class P>
__device__ __forceinline__ void ProduceForward(const ForwardArguments& in,
                                               ForwardMemory<P>& memory) {
  using Memory = ForwardMemory<P>;
  using T = typename P::T;
  constexpr int kWidth = P::kWidth;
  constexpr int kColumns = Memory::kColumns;
  constexpr int kBoxes = kWidth / hopper::kBoxWidth;
  constexpr uint32_t kColumnBytes = sizeof(T) * kColumns * kWidth;
  if constexpr (P::kScored) hopper::PrefetchMap(&in.q), hopper::PrefetchMap(&in.k);
  hopper::PrefetchMap(&in.v);
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
  const auto copy_columns = [&](const CUtensorMap* map, auto* to, hopper::Barrier* full,
                                hopper::Barrier* free, hopper::Turn* turn, int head, int token) {
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
        RowView view{0, 0, 0};  // rows past the sequence's end see nothing
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
        const int token = tile.both.token;
        const auto copy_v = [&](int block) {
          copy_columns(&in.v, memory.v, memory.v_full, memory.v_free, &v_turn, tile.head,
                       token + block * kColumns);
        };
        int before = -1;  // its V isn't requested yet: it is needed after the next K
        for (int block = tile.Last(); block >= 0; block = tile.After(block)) {
          if constexpr (!P::kScored) {
            copy_v(block);
            continue;
          }
          copy_columns(&in.k, memory.k, memory.k_full, memory.k_free, &k_turn, tile.head,
                       token + block * kColumns);
          if (before < 0) {  // request rows second: the previous tile uses its own longest
            memory.q_free.Wait(q_turn.phase ^ 1);
            memory.q_full.ArriveExpecting(sizeof(memory.q));
            copy(&in.q, memory.q, &memory.q_full, tile.head, token + tile.both.row, kTileRows);
            q_turn.Next<1>();
          } else {
            copy_v(before);
          }
          before = block;
        }
        if constexpr (P::kScored) copy_v(before);
      }
    }
    if (work >= works) break;
    tile_turn.Next<Memory::kTiles>();
    work = __shfl_sync(0xFFFFFFFFu, next, 0);
  }
  if (lane == 0) LeaveQueue(&in.plan.header->forward);
}

// The warp that loads the bias of each block, in the consumers' order, for the same stages as K's.
template <class P>
__device__ __forceinline__ void LoadForwardBias(const ForwardArguments& in,
                                                ForwardMemory<P>& memory) {
  using Memory = ForwardMemory<P>;
  hopper::Turn tile_turn, turn;
  BiasLoader<true, typename Memory::Bias> loader;
  while (true) {
    memory.tile_full[tile_turn.stage].Wait(tile_turn.phase);
    const ForwardTile<Memory::kColumns>& tile = memory.tiles[tile_turn.stage];
    if (tile.head < 0) return;
    loader.SetOwn(in.bias, in.plan, tile.both.first_strip, tile.both.length, tile.both.row);
    for (int block = tile.Last(); block >= 0; block = tile.After(block)) {
      loader.Fetch(in.bias, block * Memory::kColumns);
      memory.k_free[turn.stage].Wait(turn.phase ^ 1);
      loader.Send(&memory.bias[turn.stage], &memory.k_full[turn.stage], 0);
      turn.Next<Memory::kStages>();
    }
    memory.tile_free[tile_turn.stage].ArriveAsWarp();
    tile_turn.Next<Memory::kTiles>();
  }
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_GPU_FORWARD_PRODUCE_CUH_
