// Sample: each beam draws one of its children by their probabilities, whatever other beams draw.
//
// The weights of siblings (siblings.h) are added in their order, in double precision; the child
// drawn is the first whose sum is above u times that of all, u being Noise::Uniform of the beam. So
// beams at one node draw apart, and a child of weight zero never comes.

#ifndef GMETA_OPS_TRIE_HOST_SAMPLE_H_
#define GMETA_OPS_TRIE_HOST_SAMPLE_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "ops/trie/host/beam_step.h"
#include "ops/trie/noise.h"

namespace gmeta::trie {

// Draws for all beams of a user: `to` has as many places as there are beams.
inline BeamStep::Outcome Sample(const Level& level, const Beams& from, const Noise& noise,
                                Siblings* siblings, const NextBeams& to) {
  for (size_t beam = 0; beam < from.beams; ++beam) {
    to.scores[beam] = -std::numeric_limits<float>::infinity();
    to.nodes[beam] = to.beams[beam] = -1;
    if (from.nodes[beam] < 0) continue;
    if (std::isnan(from.scores[beam])) return {Problem::kScore, beam};
    const Problem problem =
        siblings->Read(level, from.nodes[beam], from.logits + beam * from.codes, from.codes);
    if (problem != Problem::kNone) return {problem, beam};
    if (siblings->count() == 0) continue;
    double total = 0.0, reached = 0.0;
    for (size_t i = 0; i < siblings->count(); ++i) total += siblings->weight(i);
    const double end = noise.Uniform(beam) * total;
    size_t drawn = 0;  // u is below 1, and the same sums are formed again: one is above `end`
    while ((reached += siblings->weight(drawn)) <= end) ++drawn;
    to.scores[beam] = from.scores[beam] + siblings->log_prob(drawn);
    to.nodes[beam] = siblings->child(drawn);
    to.beams[beam] = static_cast<int32_t>(beam);
  }
  return {};
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_SAMPLE_H_
