// The product that is activated as it is written (silu_projection.cuh) on an emulated GPU: against
// sums in double precision and SiLU of what was written; under any order of threads, any number of
// multiprocessors, and however late copies and products come, the bits are the same.

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "ops/common/gpu/cuda_error.cu"
#include "ops/layer/silu_projection.cu"
#include "tests/native/check.h"

namespace {

using emulated::Pace;
using std::vector;

struct Shape {
  int rows, inner, columns, from;
};

constexpr int kGuard = 64;  // numbers behind each result, which must stay as they are
constexpr uint16_t kPoison = 0x7FCD;

template <class T>
struct Case {
  static constexpr int kDtype = std::is_same_v<T, __nv_bfloat16> ? GMETA_BFLOAT16 : GMETA_FLOAT16;

  Shape shape;
  vector<T> x, w;

  Case(const Shape& shape, uint32_t seed) : shape(shape) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int i = 0; i < shape.rows * shape.inner; ++i) x.push_back(T(normal(random)));
    for (int i = 0; i < shape.inner * shape.columns; ++i) w.push_back(T(normal(random)));
  }
  double Exact(int row, int column, bool magnitudes = false) const {
    double sum = 0;
    for (int i = 0; i < shape.inner; ++i) {
      const double term =
          double(float(x[row * shape.inner + i])) * double(float(w[i * shape.columns + column]));
      sum += magnitudes ? std::fabs(term) : term;
    }
    return sum;
  }
};

template <class T>
struct Found {
  vector<T> z, activated;
};

template <class T>
int Call(const Case<T>& c, Found<T>* found) {
  const Shape& s = c.shape;
  const GmetaSiluProjection projection{Case<T>::kDtype, s.inner,         s.columns,
                                       s.from,          s.rows,          c.x.data(),
                                       c.w.data(),      found->z.data(), found->activated.data()};
  return gmeta_silu_projection(&projection, nullptr);
}

template <class T>
Found<T> Project(const Case<T>& c, Pace pace, uint32_t seed, int multiprocessors) {
  const Shape& s = c.shape;
  T poison;
  poison.bits = kPoison;
  Found<T> found;
  found.z.assign(static_cast<size_t>(s.rows) * s.columns + kGuard, poison);
  found.activated.assign(static_cast<size_t>(s.rows) * (s.columns - s.from) + kGuard, poison);
  emulated::settings = {pace, seed, multiprocessors};
  CHECK_EQ(Call(c, &found), GMETA_CUDA_OK);
  return found;
}

template <class T>
bool SameBits(const vector<T>& a, const vector<T>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].bits != b[i].bits) return false;
  }
  return true;
}

template <class T>
void Check(const Shape& shape, uint32_t seed) {
  const Case<T> c(shape, seed);
  const Found<T> found = Project(c, Pace::kLate, seed, 3);
  const double unit = std::is_same_v<T, __nv_bfloat16> ? 0x1p-8 : 0x1p-11;
  for (int row = 0; row < shape.rows; ++row) {
    for (int column = 0; column < shape.columns; ++column) {
      const T z = found.z[static_cast<size_t>(row) * shape.columns + column];
      const double exact = c.Exact(row, column);
      // Rounded once, after sums in float32.
      const double most = unit * std::fabs(exact) + 1e-6 * c.Exact(row, column, true);
      CHECK(std::fabs(float(z) - exact) <= 1.01 * most);
      if (column < shape.from) continue;
      const T a = found.activated[static_cast<size_t>(row) * (shape.columns - shape.from) + column -
                                  shape.from];
      CHECK_EQ(a.bits, T(gmeta::hstu::Silu(float(z))).bits);
    }
  }
  for (const auto* each : {&found.z, &found.activated}) {
    for (size_t i = each->size() - kGuard; i < each->size(); ++i) {
      CHECK_EQ((*each)[i].bits, kPoison);
    }
  }
  for (const int multiprocessors : {1, 7}) {
    const Found<T> again = Project(c, Pace::kEarly, seed + 1, multiprocessors);
    CHECK(SameBits(again.z, found.z) && SameBits(again.activated, found.activated));
  }
}

// A row that isn't finite spoils itself alone, and a column likewise.
void CheckNeighbours() {
  using T = __nv_bfloat16;
  Case<T> c({140, 72, 320, 64}, 3);
  const Found<T> before = Project(c, Pace::kLate, 1, 2);
  const int row = 130, column = 257;
  c.x[row * c.shape.inner + 70] = T(std::numeric_limits<float>::quiet_NaN());
  c.w[3 * c.shape.columns + column] = T(std::numeric_limits<float>::infinity());
  const Found<T> after = Project(c, Pace::kEarly, 2, 2);
  for (int i = 0; i < c.shape.rows; ++i) {
    for (int j = 0; j < c.shape.columns; ++j) {
      const size_t at = static_cast<size_t>(i) * c.shape.columns + j;
      if (i != row && j != column) CHECK_EQ(after.z[at].bits, before.z[at].bits);
      if (i == row) CHECK(std::isnan(float(after.z[at])));
    }
  }
}

void CheckRefused() {
  using T = __nv_bfloat16;
  for (const Shape& shape : {Shape{3, 12, 64, 0}, Shape{3, 8, 68, 0}, Shape{3, 8, 64, 64},
                             Shape{3, 8, 128, 32}, Shape{3, 8, 128, -64}}) {
    const Case<T> c(shape, 1);
    Found<T> found;
    CHECK_EQ(Call(c, &found), GMETA_CUDA_UNSUPPORTED);
  }
  Found<T> nothing;
  CHECK_EQ(Call(Case<T>({0, 8, 64, 0}, 1), &nothing), GMETA_CUDA_OK);
}

}  // namespace

int main() {
  using Bfloat16 = __nv_bfloat16;
  Check<Bfloat16>({1, 8, 8, 0}, 1);
  Check<__half>({64, 64, 64, 0}, 2);
  Check<Bfloat16>({129, 200, 256, 64}, 3);
  Check<Bfloat16>({128, 72, 264, 192}, 4);
  Check<__half>({300, 136, 520, 128}, 5);
  Check<Bfloat16>({257, 448, 512, 128}, 6);
  CheckNeighbours();
  CheckRefused();
}
