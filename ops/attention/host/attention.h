// HSTU's attention over jagged sequences, and its gradients.
//
//   o_i = s sum_{j in V(i)} SiLU(alpha q_i k_j + rab_ij) v_j
//
// or with the softmax of a row's scores in place of their SiLU.
//
// Layout. q, k, v are (tokens, heads, width): a sequence's tokens one after another, the sequences
// one after another. The unit of work is one head of one sequence. Its q, k and v are first copied
// into the layout that the products want: rows padded with zeros to whole vectors, and k (for
// gradients v too) transposed in blocks of kColumns tokens, so that the scores of a row lie beside
// each other.
//
// Operations. Rows are taken kRows at a time, and for them the blocks of columns one after another.
// A block's scores are computed, weighed and multiplied with v while they lie in the first cache,
// and then discarded: memory grows with the tokens, never with their square. Gradients compute the
// scores once more instead of keeping them.
//
// Masks. A `Visible` says what a row sees, so a few comparisons decide whether to skip a block,
// take it whole or mask it. Within a block, a tile of rows takes the columns from the first to the
// last that any of its rows sees: a causal mask halves the work, and a window makes it linear in
// the length.
//
// Invariants. A unit's results depend on its own tokens alone, and so does the order of its sums.
// Gradients of k and v are sums over rows, made within a unit. Gradients of the bias's tables are
// sums over units. They are made in a number of groups that the batch alone determines, and added
// up in the groups' order. So results are the same to the last bit on any number of threads, and a
// sequence's results don't depend on its neighbours.
//
// Softmax. A row's blocks come one after another, so its output is relative to the greatest score
// so far, and rescaled when that rises (RowSoftmax in tile.h). The logarithms of the sums are kept
// for the gradients.
//
// Why it is fast. All products run at the pace of the multipliers (see multiply.h). The exponential
// is a polynomial on vectors. There is no padding, no work on blocks that no token sees, and none
// of the half dozen passes over (L, L) matrices that attention by TensorFlow's ops takes.

#ifndef GMETA_OPS_ATTENTION_HOST_ATTENTION_H_
#define GMETA_OPS_ATTENTION_HOST_ATTENTION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "ops/attention/host/backward.h"
#include "ops/attention/host/forward.h"

namespace gmeta::hstu {

// Compiles the same code for each width of vectors. The widest that the machine supports is chosen.
#if defined(__x86_64__)
template <Weights kWeights>
__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))) void
Forward16(const Inputs& in, const Unit& unit, float* out, Workspace* work) {
  ForwardHead<16, kWeights>(in, unit, out, work);
}
template <Weights kWeights>
__attribute__((target("avx2,fma"))) void Forward8(const Inputs& in, const Unit& unit, float* out,
                                                  Workspace* work) {
  ForwardHead<8, kWeights>(in, unit, out, work);
}
template <Weights kWeights>
__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))) void
Backward16(const Inputs& in, const float* of_out, const Unit& unit, const Gradients& to,
           BiasGradient* of_bias, Workspace* work) {
  BackwardHead<16, kWeights>(in, of_out, unit, to, of_bias, work);
}
template <Weights kWeights>
__attribute__((target("avx2,fma"))) void Backward8(const Inputs& in, const float* of_out,
                                                   const Unit& unit, const Gradients& to,
                                                   BiasGradient* of_bias, Workspace* work) {
  BackwardHead<8, kWeights>(in, of_out, unit, to, of_bias, work);
}
inline int VectorWidth() {
  static const int width = __builtin_cpu_supports("avx512dq")                                ? 16
                           : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 8
                                                                                             : 4;
  return width;
}
#else
inline int VectorWidth() { return 4; }
#endif

template <Weights kWeights>
void RunForward(const Inputs& in, const Unit& unit, float* out, Workspace* work) {
#if defined(__x86_64__)
  if (VectorWidth() == 16) return Forward16<kWeights>(in, unit, out, work);
  if (VectorWidth() == 8) return Forward8<kWeights>(in, unit, out, work);
#endif
  ForwardHead<4, kWeights>(in, unit, out, work);
}

template <Weights kWeights>
void RunBackward(const Inputs& in, const float* of_out, const Unit& unit, const Gradients& to,
                 BiasGradient* of_bias, Workspace* work) {
#if defined(__x86_64__)
  if (VectorWidth() == 16) return Backward16<kWeights>(in, of_out, unit, to, of_bias, work);
  if (VectorWidth() == 8) return Backward8<kWeights>(in, of_out, unit, to, of_bias, work);
#endif
  BackwardHead<4, kWeights>(in, of_out, unit, to, of_bias, work);
}

// Calls call(constant) with the weights of a call.
template <class Call>
void DispatchWeights(const Inputs& in, const Call& call) {
  switch (in.weights()) {
    case Weights::kBias:
      return call(std::integral_constant<Weights, Weights::kBias>());
    case Weights::kSilu:
      return call(std::integral_constant<Weights, Weights::kSilu>());
    case Weights::kSoftmax:
      return call(std::integral_constant<Weights, Weights::kSoftmax>());
  }
}

// Returns all heads of all sequences, the longest first, so that no thread begins a long one when
// the others are done.
inline std::vector<Unit> Units(const int64_t* offsets, size_t sequences, int heads) {
  std::vector<Unit> units;
  for (size_t i = 0; i < sequences; ++i) {
    const int length = static_cast<int>(offsets[i + 1] - offsets[i]);
    for (int head = 0; length > 0 && head < heads; ++head) {
      units.push_back({static_cast<size_t>(offsets[i]), length, head});
    }
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const Unit& a, const Unit& b) { return a.length > b.length; });
  return units;
}

// Estimates the cycles of a unit, by which a thread pool divides the work.
inline size_t CostOfUnit(const Inputs& in, const std::vector<Unit>& units) {
  size_t pairs = 0;
  for (const Unit& unit : units) pairs += static_cast<size_t>(unit.length) * unit.length / 2;
  return units.empty() ? 1 : 1 + pairs * (in.width + in.values) / 8 / units.size();
}

// Writes `out`, (tokens, heads, values). parallel_for(total, cost, work) calls work(begin, end) for
// parts of [0, total).
template <class ParallelFor>
void Forward(const Inputs& in, const int64_t* offsets, size_t sequences, float* out,
             const ParallelFor& parallel_for) {
  const std::vector<Unit> units = Units(offsets, sequences, in.heads);
  parallel_for(units.size(), CostOfUnit(in, units), [&](size_t begin, size_t end) {
    Workspace work;
    for (size_t i = begin; i < end; ++i) {
      DispatchWeights(in, [&](auto weights) { RunForward<weights()>(in, units[i], out, &work); });
    }
  });
}

// The number of groups of units whose bias gradients are summed separately: enough for any
// machine's threads.
inline constexpr size_t kGroups = 64;

// Writes the gradients, given `of_out` (tokens, heads, values). Each has the shape of its tensor.
// `of_bias` has the tables' sizes and is zero at first.
template <class ParallelFor>
void Backward(const Inputs& in, const int64_t* offsets, size_t sequences, const float* of_out,
              const Gradients& to, BiasGradient* of_bias, const ParallelFor& parallel_for) {
  const std::vector<Unit> units = Units(offsets, sequences, in.heads);
  const size_t groups = in.bias.any() ? std::min(kGroups, units.size()) : units.size();
  std::vector<BiasGradient> of_groups(in.bias.any() ? groups : 0, *of_bias);
  const size_t in_group = groups == 0 ? 0 : (units.size() + groups - 1) / groups;
  parallel_for(groups, 3 * in_group * CostOfUnit(in, units), [&](size_t begin, size_t end) {
    Workspace work;
    for (size_t group = begin; group < end; ++group) {
      BiasGradient* of_group = in.bias.any() ? &of_groups[group] : nullptr;
      for (size_t i = group; i < units.size(); i += groups) {
        const auto run = [&](auto weights) {
          RunBackward<weights()>(in, of_out, units[i], to, of_group, &work);
        };
        DispatchWeights(in, run);
      }
    }
  });
  for (const BiasGradient& of_group : of_groups) of_bias->Add(of_group);
}

}  // namespace gmeta::hstu

#endif  // GMETA_OPS_ATTENTION_HOST_ATTENTION_H_
