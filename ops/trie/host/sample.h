// Sample: each beam draws one of its children by their probabilities, whatever other beams draw.
//
// The weights of siblings, as whole numbers (ops/trie/weights.h), are added in their order; the
// child drawn is the first whose sum is above Noise::Below of the beam and the sum of all. So beams
// at one node draw independently, a child of weight zero is never drawn, and any way of adding
// draws the same.

#ifndef GMETA_OPS_TRIE_HOST_SAMPLE_H_
#define GMETA_OPS_TRIE_HOST_SAMPLE_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "ops/trie/host/beam_step.h"
#include "ops/trie/noise.h"
#include "ops/trie/weights.h"

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
    const WholeWeights whole(siblings->count());
    uint64_t total = 0, reached = 0;
    for (size_t i = 0; i < siblings->count(); ++i) total += whole.Of(siblings->weight(i));
    const uint64_t end = noise.Below(beam, total);
    size_t drawn = 0;
    while ((reached += whole.Of(siblings->weight(drawn))) <= end) ++drawn;
    to.scores[beam] = from.scores[beam] + siblings->log_prob(drawn);
    to.nodes[beam] = siblings->child(drawn);
    to.beams[beam] = static_cast<int32_t>(beam);
  }
  return {};
}

}  // namespace gmeta::trie

#endif  // GMETA_OPS_TRIE_HOST_SAMPLE_H_
