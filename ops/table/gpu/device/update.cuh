// The optimizer's step on the records of distinct keys, in one kernel: it finds the row, sums its
// gradients, reads weights and slots, runs the policy of optimizers.h, and writes them back.
//
// A warp takes 32 keys and finds them together. Then groups of its lanes each take a row, and each
// lane takes 16 bytes of the weights and of each slot, so that a record is read once and written
// once, whole sectors at a time. The kernel loads the records and the first gradients of two rows
// before it uses any of them.
//
// Policies are written for a row of any width. All but RowWiseAdagrad work element by element, so a
// lane calls them for rows of one weight, whose slots are in registers. This file is compiled
// without fused multiply-add, so that the results have the same bits as on the CPU. Only Ftrl with
// a power other than -0.5 differs, as far as pow differs on the two machines. A half row
// (mixed_rows.cuh) is computed in float32 and rounded when it is written back (half_rounding.h).

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_UPDATE_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_UPDATE_CUH_

#include <cstdint>
#include <type_traits>

#include "ops/common/philox.h"
#include "ops/table/core/half_rounding.h"
#include "ops/table/core/optimizers.h"
#include "ops/table/core/row_prior.h"
#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/device/mixed_rows.cuh"
#include "ops/table/gpu/device/rows.cuh"
#include "ops/unique/gpu/segments.cuh"

namespace gmeta {

// `Rows` is RowsView or MixedRowsView.
template <class Rows>
struct UpdateBatch {
  IndexView index;
  Rows rows;
  const int64_t* keys;
  uint32_t n;  // number of keys; if `count` is given, an upper bound of it, and *count is exact
  const int32_t* count;
  const float* gradients;
  bool summed;  // one gradient per key; else one per position, which `segments` assigns to keys
  SegmentsView segments;  // without starts: every key has a gradient
  uint32_t vectors;
  uint32_t log2_lanes;
  uint32_t step;
  const float* l2;  // of the prior, one for each column; null: none
  float most;       // the largest strength of the prior
  // Of tables of two precisions:
  HalfRounding rounding;
  int64_t* rare_no_more;  // keys whose rows are to be promoted; null: no row cools down
};

// Queues the update. `step` is the table's step after the update. If `vector` is true, a vector has
// four floats, else one.
template <class Rows>
void LaunchUpdate(const UpdateBatch<Rows>& batch, const SparseOptimizer& optimizer,
                  float learning_rate, int64_t step, bool vector, cudaStream_t stream);

// The number of slots per weight.
template <class Optimizer>
inline constexpr int kSlotsOf = 2;
template <>
inline constexpr int kSlotsOf<Sgd> = 0;
template <>
inline constexpr int kSlotsOf<Adagrad> = 1;
template <>
inline constexpr int kSlotsOf<Momentum> = 1;
template <>
inline constexpr int kSlotsOf<RowWiseAdagrad> = 0;

template <class Vec>
__device__ float& Element(Vec& vector, uint32_t i) {
  if constexpr (kVecFloats<Vec> == 1) {
    return vector;
  } else {
    return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
  }
}

// Draws the words of vector c of a row: the block of its columns, or the column's own word.
template <class Vec>
__device__ void DrawWords(const HalfRounding& rounding, uint32_t c, uint32_t above, int64_t key,
                          uint32_t step, uint32_t words[4]) {
  constexpr bool kWhole = kVecFloats<Vec> == 4;
  const uint32_t block = (kWhole ? c : c / 4) | above;
  Philox4x32<1>(rounding.seed, HalfRounding::CounterOf(block, key, step), words);
  if constexpr (!kWhole) {
    words[0] = c % 4 == 0 ? words[0] : c % 4 == 1 ? words[1] : c % 4 == 2 ? words[2] : words[3];
  }
}

// Writes vector c of the weights of a key's row, and of each of its slots.
template <int kSlots, class Rows, class Vec>
__device__ void StoreVectors(const UpdateBatch<Rows>& batch, const typename Rows::Record& record,
                             const int64_t* key, uint32_t c, Vec weights, const Vec* slots) {
  const uint32_t vectors = batch.vectors;
  if constexpr (Rows::kMixed) {
    if (batch.rounding.at_random && record.is_half()) {
      uint32_t words[4];
      DrawWords<Vec>(batch.rounding, c, 0, *key, batch.step, words);
      record.DrawWeights(c, weights, words, 0);
      if constexpr (kSlots > 0) record.DrawSlots(vectors + c, slots[0], words, 16);
      if constexpr (kSlots > 1) {
        DrawWords<Vec>(batch.rounding, c, HalfRounding::kSecondSlot, *key, batch.step, words);
        record.DrawSlots(2 * vectors + c, slots[1], words, 0);
      }
      return;
    }
  }
  record.StoreWeights(c, weights);
#pragma unroll
  for (int s = 0; s < kSlots; ++s) record.StoreSlots((s + 1) * vectors + c, slots[s]);
}

template <class Rows, class Optimizer, class Vec, bool kSummed>
__global__ void __launch_bounds__(kBlockThreads, 3)
    UpdateRows(const UpdateBatch<Rows> batch, const typename Optimizer::Step optimizer) {
  using Record = typename Rows::Record;
  constexpr bool kRowWise = std::is_same_v<Optimizer, RowWiseAdagrad>;
  constexpr int kSlots = kSlotsOf<Optimizer>;
  constexpr uint32_t kAhead = 2;
  __shared__ uint32_t shared[2];
  const BlockCount updates(shared), ignored(shared + 1);

  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t at = blockIdx.x * kBlockThreads + threadIdx.x;
  const uint32_t first = at - lane;
  const uint32_t n = batch.count == nullptr ? batch.n : static_cast<uint32_t>(*batch.count);
  const bool active = at < n;
  const int64_t key = active ? batch.keys[at] : 0;
  const uint32_t entry = FindEntries<false>(batch.index, key, active);
  const bool indexed = batch.segments.starts != nullptr;
  int32_t start = 0, count = 0;  // place of the key's gradients among the sorted positions
  if (indexed && active) {
    start = __ldg(batch.segments.starts + at);
    count = __ldg(batch.segments.starts + at + 1) - start;
  }
  const bool has_gradient = !indexed || count > 0;  // a row without one stays as it is
  const bool found = entry != kNoEntry && has_gradient;
  const Record own = found ? batch.rows.record(entry - 1) : Record();
  float missed = 0.0f;  // the steps that the row pays the prior for
  if (found) {
    RowHeader* const header = batch.rows.header(entry - 1);
    if (batch.l2 != nullptr) missed = static_cast<float>(batch.step - header->last_step);
    header->last_step = batch.step;
  }
  if constexpr (Rows::kMixed) {
    if (batch.rare_no_more != nullptr) {  // rows that were cold
      const bool promoted = found && HalfRule::IsHalf(entry - 1) &&
                            !batch.rows.rule.IsRare(batch.rows.header(entry - 1)->frequency);
      ListKeys(key, promoted, batch.rare_no_more, &batch.rows.counters->rare_no_more);
    }
  }
  updates.Add(found);
  ignored.Add(active && has_gradient && !found);

  const uint32_t dim = batch.rows.dim;
  float scale = 0.0f;
  if constexpr (kRowWise) {
    const auto round_slot = [&](float slot) {
      if (!batch.rounding.at_random) return Bfloat16::Of(slot);
      uint32_t words[4];
      DrawWords<float>(batch.rounding, 0, 0, key, batch.step, words);
      return Bfloat16::Draw(slot, words[0] >> 16);
    };
    if (found) {
      scale = own.ChangeSlot(
          dim,
          [&](float* slot) {
            const float* const sums = batch.gradients + static_cast<size_t>(at) * dim;
            return optimizer.Scale(
                dim,
                [&](size_t i) {
                  const auto column = static_cast<uint32_t>(i);
                  if (batch.l2 == nullptr) return sums[i];
                  const float w = own.Weights(own.template Load<float>(column));
                  return WithPrior(sums[i], w, batch.l2[i], missed, batch.most);
                },
                slot);
          },
          round_slot);
    }
  }

  const uint32_t vectors = batch.vectors;
  const uint32_t lanes = 1u << batch.log2_lanes;
  const uint32_t rows = kWarp >> batch.log2_lanes;  // rows that the warp takes at once
  const auto gradient = [&](int32_t place, uint32_t c) {
    return batch.segments.template Row<Vec>(batch.gradients, place, vectors, c);
  };
  for (uint32_t base = 0; base < kWarp; base += rows * kAhead) {
    Record record[kAhead];
    uint32_t which[kAhead];
    int32_t starts[kAhead], counts[kAhead];
    float scales[kAhead], steps[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      which[i] = base + i * rows + (lane >> batch.log2_lanes);
      record[i] = own.OfLane(which[i] % kWarp);
      if (!kSummed) {
        starts[i] = __shfl_sync(kFullWarp, start, which[i] % kWarp);
        counts[i] = __shfl_sync(kFullWarp, count, which[i] % kWarp);
      }
      if (kRowWise) scales[i] = __shfl_sync(kFullWarp, scale, which[i] % kWarp);
      if (batch.l2 != nullptr) steps[i] = __shfl_sync(kFullWarp, missed, which[i] % kWarp);
      if (which[i] >= kWarp) record[i] = Record();
    }
    for (uint32_t c = lane & (lanes - 1); c < vectors; c += lanes) {
      Vec w[kAhead], g[kAhead], second[kAhead], slots[kAhead][kSlots + 1];
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        if (!record[i]) continue;
        w[i] = record[i].template Load<Vec>(c);
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          slots[i][s] = record[i].template Load<Vec>(c, (s + 1) * vectors);
        }
        if (kSummed) {
          g[i] = __ldcs(reinterpret_cast<const Vec*>(batch.gradients) +
                        static_cast<size_t>(first + which[i]) * vectors + c);
        } else if (counts[i] <= kPiece) {
          g[i] = gradient(starts[i], c);
          if (counts[i] > 1) second[i] = gradient(starts[i] + 1, c);
        }
      }
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        if (!record[i]) continue;
        if (!kSummed) {
          if (counts[i] > kPiece) {
            g[i] = batch.segments.template SumPieces<Vec>(first + which[i], counts[i], vectors, c);
          } else if (counts[i] > 1) {
            g[i] = AddInOrder<Vec>(g[i] + second[i], 2, counts[i],
                                   [&](int32_t k) { return gradient(starts[i] + k, c); });
          }
        }
        w[i] = record[i].Weights(w[i]);
#pragma unroll
        for (int s = 0; s < kSlots; ++s) slots[i][s] = record[i].Slots(slots[i][s]);
#pragma unroll
        for (uint32_t e = 0; e < kVecFloats<Vec>; ++e) {
          float by = Element(g[i], e);
          if (batch.l2 != nullptr) {
            const float l2 = __ldg(batch.l2 + c * kVecFloats<Vec> + e);
            by = WithPrior(by, Element(w[i], e), l2, steps[i], batch.most);
          }
          if constexpr (kRowWise) {
            Element(w[i], e) -= scales[i] * by;
          } else {
            float state[kSlots + 1];
#pragma unroll
            for (int s = 0; s < kSlots; ++s) state[s] = Element(slots[i][s], e);
            optimizer(1, &by, &Element(w[i], e), state);
#pragma unroll
            for (int s = 0; s < kSlots; ++s) Element(slots[i][s], e) = state[s];
          }
        }
        StoreVectors<kSlots>(batch, record[i], batch.keys + first + which[i], c, w[i], slots[i]);
      }
    }
  }

  __syncthreads();
  if (threadIdx.x == 0) {
    GpuCounters* counters = batch.rows.counters;
    using Count = unsigned long long;
    if (updates.sum() != 0) atomicAdd(&counters->updates, Count{updates.sum()});
    if (ignored.sum() != 0) atomicAdd(&counters->ignored, Count{ignored.sum()});
  }
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_UPDATE_CUH_
