// Sparse optimizers as policies: each defines how many floats a row keeps beside its weights, their
// initial values, and how one gradient changes them. The table runs the policy inside its update
// pass, while the record is in the cache ("fused").
//
// A policy is a struct of hyperparameters with
//   size_t SlotFloats(size_t dim) const;                       floats kept for a row of dim weights
//   float InitialSlot() const;                                 initial value of the first slot (at
//                                                              most dim floats); others start at 0
//   Step Begin(float learning_rate, int64_t step) const;       constants of one update call; step
//                                                              counts from 1
//   Step::operator()(size_t dim, const float* g, float* w, float* slots) const
// and is listed in SparseOptimizer and in MakeOptimizer. The formulas are tf_keras's; tests check
// that they agree. Steps also run on the GPU (ops/table/gpu/device/update.cuh). All but
// RowWiseAdagrad's are elementwise, so the GPU runs them weight by weight, as on one-weight rows.
//
// All optimizers are lazy: a call doesn't change a row that has no gradient in it, and the row's
// momenta don't decay. If every row has a gradient in every call, the result is that of the dense
// optimizer. Adam's bias correction uses the table's step, the number of update calls so far, which
// is the same for all rows.

#ifndef GMETA_OPS_TABLE_CORE_OPTIMIZERS_H_
#define GMETA_OPS_TABLE_CORE_OPTIMIZERS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ops/common/host_device.h"

namespace gmeta {

// w -= lr * g
struct Sgd {
  size_t SlotFloats(size_t) const { return 0; }
  float InitialSlot() const { return 0.0f; }

  struct Step {
    float learning_rate;
    GMETA_HOST_DEVICE void operator()(size_t dim, const float* __restrict g, float* __restrict w,
                                      float*) const {
      for (size_t i = 0; i < dim; ++i) w[i] -= learning_rate * g[i];
    }
  };
  Step Begin(float learning_rate, int64_t) const { return {learning_rate}; }
};

// a += g^2; w -= lr * g / sqrt(a + epsilon)
struct Adagrad {
  double initial_accumulator;
  double epsilon;

  size_t SlotFloats(size_t dim) const { return dim; }
  float InitialSlot() const { return static_cast<float>(initial_accumulator); }

  struct Step {
    float learning_rate, epsilon;
    GMETA_HOST_DEVICE void operator()(size_t dim, const float* __restrict g, float* __restrict w,
                                      float* __restrict a) const {
      for (size_t i = 0; i < dim; ++i) {
        a[i] += g[i] * g[i];
        w[i] -= learning_rate * g[i] / std::sqrt(a[i] + epsilon);
      }
    }
  };
  Step Begin(float learning_rate, int64_t) const {
    return {learning_rate, static_cast<float>(epsilon)};
  }
};

// m += (1 - beta1) (g - m); v += (1 - beta2) (g^2 - v)
// w -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon), t = the table's step
struct Adam {
  double beta1;
  double beta2;
  double epsilon;

  size_t SlotFloats(size_t dim) const { return 2 * dim; }
  float InitialSlot() const { return 0.0f; }

  struct Step {
    float alpha, one_minus_beta1, one_minus_beta2, epsilon;
    GMETA_HOST_DEVICE void operator()(size_t dim, const float* __restrict g, float* __restrict w,
                                      float* __restrict slots) const {
      float* __restrict m = slots;
      float* __restrict v = slots + dim;
      for (size_t i = 0; i < dim; ++i) {
        m[i] += (g[i] - m[i]) * one_minus_beta1;
        v[i] += (g[i] * g[i] - v[i]) * one_minus_beta2;
        w[i] -= m[i] * alpha / (std::sqrt(v[i]) + epsilon);
      }
    }
  };
  Step Begin(float learning_rate, int64_t step) const {
    const double t = static_cast<double>(step);
    const double correction = std::sqrt(1.0 - std::pow(beta2, t)) / (1.0 - std::pow(beta1, t));
    return {static_cast<float>(learning_rate * correction), static_cast<float>(1.0 - beta1),
            static_cast<float>(1.0 - beta2), static_cast<float>(epsilon)};
  }
};

// m = momentum * m - lr * g; w += m, or with Nesterov's look-ahead w += momentum * m - lr * g
struct Momentum {
  double momentum;
  bool nesterov;

  size_t SlotFloats(size_t dim) const { return dim; }
  float InitialSlot() const { return 0.0f; }

  struct Step {
    float learning_rate, momentum;
    bool nesterov;
    GMETA_HOST_DEVICE void operator()(size_t dim, const float* __restrict g, float* __restrict w,
                                      float* __restrict m) const {
      for (size_t i = 0; i < dim; ++i) {
        const float step = learning_rate * g[i];
        m[i] = momentum * m[i] - step;
        w[i] += nesterov ? momentum * m[i] - step : m[i];
      }
    }
  };
  Step Begin(float learning_rate, int64_t) const {
    return {learning_rate, static_cast<float>(momentum), nesterov};
  }
};

// a += mean of g^2; w -= lr * g / sqrt(a + epsilon): one float of state for a whole row.
struct RowWiseAdagrad {
  double initial_accumulator;
  double epsilon;

  size_t SlotFloats(size_t) const { return 1; }
  float InitialSlot() const { return static_cast<float>(initial_accumulator); }

  struct Step {
    float learning_rate, epsilon;

    // Updates the row's state by its gradient g(0), g(1), ..., and returns the factor that scales
    // the gradient.
    template <class Gradient>
    GMETA_HOST_DEVICE float Scale(size_t dim, const Gradient& g, float* a) const {
      float squares = 0.0f;
      for (size_t i = 0; i < dim; ++i) {
        const float by = g(i);
        squares += by * by;
      }
      *a += squares / static_cast<float>(dim);
      return learning_rate / std::sqrt(*a + epsilon);
    }
    GMETA_HOST_DEVICE void operator()(size_t dim, const float* __restrict g, float* __restrict w,
                                      float* a) const {
      const float scale = Scale(dim, [&](size_t i) { return g[i]; }, a);
      for (size_t i = 0; i < dim; ++i) w[i] -= scale * g[i];
    }
  };
  Step Begin(float learning_rate, int64_t) const {
    return {learning_rate, static_cast<float>(epsilon)};
  }
};

// w -= lr * weight_decay * w, then Adam: the decay isn't scaled by the moments.
struct AdamW {
  Adam adam;
  double weight_decay;

  size_t SlotFloats(size_t dim) const { return adam.SlotFloats(dim); }
  float InitialSlot() const { return adam.InitialSlot(); }

  struct Step {
    Adam::Step adam;
    float decay;
    GMETA_HOST_DEVICE void operator()(size_t dim, const float* __restrict g, float* __restrict w,
                                      float* __restrict slots) const {
      for (size_t i = 0; i < dim; ++i) w[i] -= decay * w[i];
      adam(dim, g, w, slots);
    }
  };
  Step Begin(float learning_rate, int64_t step) const {
    return {adam.Begin(learning_rate, step), static_cast<float>(learning_rate * weight_decay)};
  }
};

// FTRL-proximal with shrinkage, p = -learning_rate_power:
//   a' = a + g^2; z += g + 2 shrinkage w - (a'^p - a^p) / lr * w; a = a'
//   w = (clip(z, -l1, l1) - z) / (a^p / lr + 2 (l2 + beta / (2 lr)))
struct Ftrl {
  double learning_rate_power;
  double initial_accumulator;
  double l1;
  double l2;
  double l2_shrinkage;
  double beta;

  size_t SlotFloats(size_t dim) const { return 2 * dim; }
  float InitialSlot() const { return static_cast<float>(initial_accumulator); }

  struct Step {
    float learning_rate, power, l1, twice_l2, twice_shrinkage;
    GMETA_HOST_DEVICE void operator()(size_t dim, const float* __restrict g, float* __restrict w,
                                      float* __restrict slots) const {
      if (power == 0.5f) {  // the usual one, and far cheaper than std::pow
        Run(dim, g, w, slots, Root{});
      } else {
        Run(dim, g, w, slots, Raise{power});
      }
    }

   private:
    struct Root {
      GMETA_HOST_DEVICE float operator()(float a) const { return std::sqrt(a); }
    };
    struct Raise {
      float power;
      GMETA_HOST_DEVICE float operator()(float a) const { return std::pow(a, power); }
    };
    GMETA_HOST_DEVICE static float Clip(float x, float bound) {
      return x < -bound ? -bound : bound < x ? bound : x;
    }

    template <class Power>
    GMETA_HOST_DEVICE void Run(size_t dim, const float* __restrict g, float* __restrict w,
                               float* __restrict slots, const Power& raised) const {
      float* __restrict a = slots;
      float* __restrict z = slots + dim;
      for (size_t i = 0; i < dim; ++i) {
        const float before = raised(a[i]);
        a[i] += g[i] * g[i];
        const float after = raised(a[i]);
        z[i] += g[i] + twice_shrinkage * w[i] - (after - before) / learning_rate * w[i];
        w[i] = (Clip(z[i], l1) - z[i]) / (after / learning_rate + twice_l2);
      }
    }
  };
  Step Begin(float learning_rate, int64_t) const {
    return {learning_rate, static_cast<float>(-learning_rate_power), static_cast<float>(l1),
            static_cast<float>(2.0 * l2 + beta / learning_rate),
            static_cast<float>(2.0 * l2_shrinkage)};
  }
};

using SparseOptimizer = std::variant<Sgd, Adagrad, Adam, Momentum, RowWiseAdagrad, AdamW, Ftrl>;

// Returns the optimizer of that name with these hyperparameters, in the order of its fields.
// Returns nothing if no optimizer has that name or if it takes another number of hyperparameters.
inline std::optional<SparseOptimizer> MakeOptimizer(const std::string& name,
                                                    const std::vector<double>& p) {
  if (name == "sgd" && p.empty()) return Sgd{};
  if (name == "adagrad" && p.size() == 2) return Adagrad{p[0], p[1]};
  if (name == "adam" && p.size() == 3) return Adam{p[0], p[1], p[2]};
  if (name == "momentum" && p.size() == 2) return Momentum{p[0], p[1] != 0.0};
  if (name == "rowwise_adagrad" && p.size() == 2) return RowWiseAdagrad{p[0], p[1]};
  if (name == "adamw" && p.size() == 4) return AdamW{{p[0], p[1], p[2]}, p[3]};
  if (name == "ftrl" && p.size() == 6) return Ftrl{p[0], p[1], p[2], p[3], p[4], p[5]};
  return std::nullopt;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_OPTIMIZERS_H_
