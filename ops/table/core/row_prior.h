// A Gaussian prior on the weights of rows: the penalty sum of l2 / 2 * w^2, with one l2 for each
// column of a row. Its gradient, l2 * w, joins the gradient of the loss before the optimizer sees
// it.
//
// The penalty is on all rows in every step, but a step visits only the rows that have a gradient.
// So a visit applies the penalty of that step and of those since the row's last update: steps * l2
// * w. With gradient descent, that equals applying it step by step, to the first order in
// learning_rate * l2. After very many missed steps, at most what takes the row to 0 in one step of
// gradient descent is applied: learning_rate * strength <= 1. The penalty of the steps after a
// row's last update is never applied.
//
// In a table with a prior, a record's last step is therefore the step of its last update, or of its
// insertion; lookups don't change it.

#ifndef GMETA_OPS_TABLE_CORE_ROW_PRIOR_H_
#define GMETA_OPS_TABLE_CORE_ROW_PRIOR_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/common/host_device.h"

namespace gmeta {

// The gradient of a weight, with the prior's for `steps` steps; `most` is the largest strength.
GMETA_HOST_DEVICE inline float WithPrior(float gradient, float weight, float l2, float steps,
                                         float most) {
  const float strength = l2 * steps;
  return gradient + (strength < most ? strength : most) * weight;
}

inline float MostStrength(float learning_rate) { return 1.0f / learning_rate; }

template <class Step>
struct StepWithPrior;

// The prior of a table: an l2 for each column, or none.
class RowPrior {
 public:
  RowPrior() = default;
  explicit RowPrior(std::vector<float> l2) : l2_(std::move(l2)) {}

  bool empty() const { return l2_.empty(); }
  const std::vector<float>& l2() const { return l2_; }

  // Returns the gradient of a row of l2().size() weights that was last updated `missed` steps ago.
  // The result is valid until the thread's next call.
  const float* Add(const float* gradient, const float* weights, uint32_t missed, float most) const {
    static thread_local std::vector<float> sum;
    sum.resize(l2_.size());
    const float steps = static_cast<float>(missed);
    for (size_t i = 0; i < l2_.size(); ++i) {
      sum[i] = WithPrior(gradient[i], weights[i], l2_[i], steps, most);
    }
    return sum.data();
  }

  // Returns a sparse optimizer's step that adds the prior's gradient first.
  template <class Step>
  StepWithPrior<Step> With(const Step& step, float learning_rate) const;

 private:
  std::vector<float> l2_;
};

template <class Step>
struct StepWithPrior {
  Step step;
  const RowPrior* prior;
  float most;

  void operator()(uint32_t missed, size_t dim, const float* g, float* w, float* slots) const {
    step(dim, prior->empty() ? g : prior->Add(g, w, missed, most), w, slots);
  }
};

template <class Step>
StepWithPrior<Step> RowPrior::With(const Step& step, float learning_rate) const {
  return {step, this, MostStrength(learning_rate)};
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_ROW_PRIOR_H_
