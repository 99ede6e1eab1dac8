// The rows of a GPU table of two precisions (ops/table/host/rows.h, MixedRows): rarely used ones
// are half records, the others full ones.
//
// Layout
//   Half records have blocks and a pool of their own, in the form that rows.cuh describes:
//
//     block: 2^k x [float16 weights, bfloat16 slots, padding]   then   2^k x [frequency, last step]
//
//   A row's number gives its form (half_rule.h), so the kernels know it from the index. They are
//   the kernels of full rows, compiled for MixedRowsView: they read four numbers of a half row as 8
//   bytes instead of 16, and convert them to float32 (half_words.h) when all loads are complete. A
//   lane may load rows of both forms at the same time.
//
// Promotion
//   Rows don't change their form while a batch reads them. The thread whose addition brings a row's
//   frequency to the threshold, which it sees from the value before the addition, notes the key; so
//   does each thread that uses a row that has cooled down. When all keys are found and inserted,
//   one more kernel moves the records of those keys (MoveMisfits in forms.cuh) and gives the half
//   records back to their pool. Readers get the same numbers although the row is half until then:
//   float32 represents a half row's numbers exactly.
//
// Cooling
//   After an update, the same kernel moves full rows that have cooled down (half_rule.h) to half
//   ones, when another one has found them.

#ifndef GMETA_OPS_TABLE_GPU_DEVICE_MIXED_ROWS_CUH_
#define GMETA_OPS_TABLE_GPU_DEVICE_MIXED_ROWS_CUH_

#include <cstdint>

#include "ops/common/murmur_hash3.h"
#include "ops/table/core/half_rounding.h"
#include "ops/table/core/half_rule.h"
#include "ops/table/gpu/device/half_words.h"
#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/device/rows.cuh"

namespace gmeta {

// FullRecord's interface to a record of either form. It holds the address of the weights; the
// lowest bit of the address, which is free, is set if they are halves.
class MixedRecord {
 public:
  MixedRecord() = default;
  __device__ MixedRecord(const void* weights, bool half)
      : bits_(reinterpret_cast<unsigned long long>(weights) | half) {}

  __device__ explicit operator bool() const { return bits_ != 0; }
  __device__ MixedRecord OfLane(uint32_t lane) const {
    return MixedRecord(__shfl_sync(kFullWarp, bits_, lane));
  }

  template <class Vec>
  __device__ Vec Load(uint32_t c, uint32_t skipped = 0) const {
    c += skipped;
    if (!is_half()) return __ldcg(vectors<Vec>() + c);
    if constexpr (sizeof(Vec) == sizeof(float)) {
      return __uint_as_float(__ldcg(halves() + c));
    } else {
      const uint2 pairs = __ldcg(reinterpret_cast<const uint2*>(halves()) + c);
      return {__uint_as_float(pairs.x), __uint_as_float(pairs.y), 0.0f, 0.0f};
    }
  }
  template <class Vec>
  __device__ Vec Weights(Vec loaded) const {
    return is_half() ? Widened<Float16>(loaded) : loaded;
  }
  template <class Vec>
  __device__ Vec Slots(Vec loaded) const {
    return is_half() ? Widened<Bfloat16>(loaded) : loaded;
  }
  template <class Vec>
  __device__ void StoreWeights(uint32_t c, Vec vector) const {
    Store<Float16>(c, vector);
  }
  template <class Vec>
  __device__ void StoreSlots(uint32_t c, Vec vector) const {
    Store<Bfloat16>(c, vector);
  }
  // The same, rounding the numbers of a half record at random (half_rounding.h): by 16 bits of a
  // word for each, from `shift` on.
  template <class Vec>
  __device__ void DrawWeights(uint32_t c, Vec vector, const uint32_t* words, int shift) const {
    Draw<Float16>(c, vector, words, shift);
  }
  template <class Vec>
  __device__ void DrawSlots(uint32_t c, Vec vector, const uint32_t* words, int shift) const {
    Draw<Bfloat16>(c, vector, words, shift);
  }
  // `rounds(slot)` rounds the slot of a half record to 16 bits.
  template <class Change, class Rounds>
  __device__ auto ChangeSlot(uint32_t at, const Change& change, const Rounds& rounds) const {
    if (!is_half()) return change(vectors<float>() + at);
    float slot = Bfloat16::Value(halves()[at]);
    const auto result = change(&slot);
    halves()[at] = rounds(slot);
    return result;
  }

  __device__ bool is_half() const { return (bits_ & 1) != 0; }

 private:
  __device__ explicit MixedRecord(unsigned long long bits) : bits_(bits) {}

  template <class Vec>
  __device__ Vec* vectors() const {
    return reinterpret_cast<Vec*>(bits_);
  }
  __device__ uint16_t* halves() const { return reinterpret_cast<uint16_t*>(bits_ & ~1ull); }

  template <class Number, class Vec>
  __device__ static Vec Widened(Vec loaded) {
    if constexpr (sizeof(Vec) == sizeof(float)) {
      return FirstOf<Number>(__float_as_uint(loaded));
    } else {
      const uint32_t low = __float_as_uint(loaded.x), high = __float_as_uint(loaded.y);
      return {FirstOf<Number>(low), SecondOf<Number>(low), FirstOf<Number>(high),
              SecondOf<Number>(high)};
    }
  }
  template <class Number, class Vec>
  __device__ void Store(uint32_t c, Vec vector) const {
    if (!is_half()) {
      vectors<Vec>()[c] = vector;
    } else if constexpr (sizeof(Vec) == sizeof(float)) {
      halves()[c] = Number::Of(vector);
    } else {
      reinterpret_cast<uint2*>(halves())[c] = {PairOf<Number>(vector.x, vector.y),
                                               PairOf<Number>(vector.z, vector.w)};
    }
  }

  template <class Number, class Vec>
  __device__ void Draw(uint32_t c, Vec vector, const uint32_t* words, int shift) const {
    const auto bits = [&](int i) { return words[i] >> shift & 0xffff; };
    if constexpr (sizeof(Vec) == sizeof(float)) {
      halves()[c] = Number::Draw(vector, bits(0));
    } else {
      const auto pair = [&](float first, float second, int i) {
        return uint32_t{Number::Draw(first, bits(i))} | uint32_t{Number::Draw(second, bits(i + 1))}
                                                            << 16;
      };
      reinterpret_cast<uint2*>(halves())[c] = {pair(vector.x, vector.y, 0),
                                               pair(vector.z, vector.w, 2)};
    }
  }

  unsigned long long bits_ = 0;
};

// RowsView's interface to rows of both forms.
struct MixedRowsView {
  using Record = MixedRecord;
  static constexpr bool kMixed = true;

  RowsView full, half;
  HalfRule rule;
  uint32_t stride;  // of full records; a half record holds as many numbers
  uint32_t dim;
  uint32_t slot_floats;
  GpuCounters* counters;
  bool counts_shards;  // whether to keep counters->shard_halves, for 2^log2_shards shards
  int log2_shards;     // also of the sweeps by which rows cool down

  __device__ MixedRecord record(uint32_t row) const {
    return {of(row).weights(row & ~HalfRule::kHalf), HalfRule::IsHalf(row)};
  }
  __device__ RowHeader* header(uint32_t row) const {
    return of(row).header(row & ~HalfRule::kHalf);
  }

  __device__ bool IsOnDisk(uint32_t row) const { return of(row).IsOnDisk(row & ~HalfRule::kHalf); }

  template <class Vec>
  __device__ static Vec Rounded(Vec weights) {
    if constexpr (sizeof(Vec) == sizeof(float)) {
      return Rounded(weights, 0);
    } else {
      return {Rounded(weights.x, 0), Rounded(weights.y, 0), Rounded(weights.z, 0),
              Rounded(weights.w, 0)};
    }
  }

  // Whether a key's row, with this header, is to be half at a step of the table.
  __device__ bool IsToBeHalf(int64_t key, RowHeader header, uint32_t step) const {
    if (!rule.cools() || rule.IsRare(header.frequency)) return rule.IsRare(header.frequency);
    const SweepSchedule sweeps = rule.Sweeps(ShardOf(key), uint64_t{1} << log2_shards);
    return rule.IsToBeHalf(header, sweeps.Latest(step));
  }
  __device__ uint32_t ShardOf(int64_t key) const {
    return static_cast<uint32_t>(MurmurHash3(key) >> 1 >> (63 - log2_shards));
  }

  // Takes half rows for the lanes with `half_form`, and full ones for the others.
  __device__ uint32_t Take(uint32_t mask, bool takes, int64_t key, bool half_form) const {
    const bool takes_half = takes && half_form;
    const uint32_t halves = __ballot_sync(kFullWarp, takes_half);
    uint32_t row = 0;
    if (mask != halves) row = full.Take(mask & ~halves, takes && !takes_half);
    if (halves != 0) {
      const uint32_t number = half.Take(halves, takes_half);
      if (takes_half) row = number | HalfRule::kHalf;
    }
    if (takes_half) CountHalf(key, 1);
    return row;
  }
  __device__ void Give(bool gives, int64_t key, uint32_t row) const {
    const bool gives_half = gives && HalfRule::IsHalf(row);
    full.Give(gives && !gives_half, row);
    half.Give(gives_half, row & ~HalfRule::kHalf);
    if (gives_half) CountHalf(key, ~0u);
  }

 private:
  __device__ const RowsView& of(uint32_t row) const { return HalfRule::IsHalf(row) ? half : full; }
  __device__ static float Rounded(float weight, int) { return Float16::Value(Float16::Of(weight)); }
  __device__ void CountHalf(int64_t key, uint32_t change) const {
    if (!counts_shards) return;
    atomicAdd(counters->shard_halves + ShardOf(key), change);
  }
};

// Gives the row of each of a warp's `moves` lanes a number of the other form, and frees the old
// number. Returns the row's number; that of a row that another thread has moved meanwhile stays
// `row`. The caller writes headers and records. The whole warp calls it.
__device__ inline uint32_t MoveRows(const IndexView& index, const MixedRowsView& rows, int64_t key,
                                    bool moves, uint32_t row) {
  const uint32_t mask = __ballot_sync(kFullWarp, moves);
  if (mask == 0) return row;
  const uint32_t taken = rows.Take(mask, moves, key, !HalfRule::IsHalf(row));
  const bool first = moves && atomicCAS(&index.SlotOf(key)->entry, row + 1, taken + 1) == row + 1;
  rows.Give(moves, key, first ? row : taken);
  return first ? taken : row;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_DEVICE_MIXED_ROWS_CUH_
