// Sums of rows and of columns (residual.cuh) on an emulated GPU, against double precision.

#include <cmath>
#include <random>
#include <vector>

#include "ops/common/gpu/cuda_error.cu"
#include "ops/layer/residual.cu"
#include "tests/native/check.h"

namespace {

using std::vector;

template <class T>
constexpr int kDtype = std::is_same_v<T, __nv_bfloat16> ? GMETA_BFLOAT16 : GMETA_FLOAT16;
constexpr int kGuard = 16;  // numbers behind each result, which must stay as they are
constexpr uint16_t kPoison = 0x7FCD;

template <class T>
vector<T> Drawn(int64_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  vector<T> x;
  for (int64_t i = 0; i < size; ++i) x.push_back(T(normal(random)));
  return x;
}

template <class T>
vector<T> Poisoned(int64_t size) {
  T poison;
  poison.bits = kPoison;
  return vector<T>(size + kGuard, poison);
}

template <class T>
void CheckGuard(const vector<T>& x) {
  for (size_t i = x.size() - kGuard; i < x.size(); ++i) CHECK_EQ(x[i].bits, kPoison);
}

template <class T>
void CheckAdded(int rows, int width, bool has_x, bool has_offset) {
  const int64_t size = static_cast<int64_t>(rows) * width;
  const vector<T> x = Drawn<T>(size, 1), offset = Drawn<T>(width, 3);
  vector<T> change = Drawn<T>(size, 2), y = Poisoned<T>(size);
  const auto add = [&](T* to) {
    CHECK_EQ(gmeta_add_rows(kDtype<T>, rows, width, has_x ? x.data() : nullptr, change.data(),
                            has_offset ? offset.data() : nullptr, to, nullptr),
             GMETA_CUDA_OK);
  };
  add(y.data());
  for (int64_t i = 0; i < size; ++i) {
    const float b = float(change[i]) + (has_offset ? float(offset[i % width]) : 0.0f);
    CHECK_EQ(y[i].bits, T((has_x ? float(x[i]) : 0.0f) + b).bits);
  }
  CheckGuard(y);
  add(change.data());  // in place
  for (int64_t i = 0; i < size; ++i) CHECK_EQ(change[i].bits, y[i].bits);
}

template <class T>
void CheckSums(int rows, int width) {
  const vector<T> x = Drawn<T>(static_cast<int64_t>(rows) * width, 1);
  vector<T> sums = Poisoned<T>(width), again = sums;
  vector<float> room(gmeta_column_sums_workspace(width) / sizeof(float), NAN);
  for (vector<T>* each : {&sums, &again}) {
    CHECK_EQ(
        gmeta_column_sums(kDtype<T>, rows, width, x.data(), each->data(), room.data(), nullptr),
        GMETA_CUDA_OK);
    CheckGuard(*each);
    emulated::settings = {emulated::Pace::kLate, 7, 3};
  }
  const double unit = std::is_same_v<T, __nv_bfloat16> ? 0x1p-8 : 0x1p-11;
  for (int column = 0; column < width; ++column) {
    double exact = 0, magnitudes = 0;
    for (int row = 0; row < rows; ++row) {
      const double each = float(x[static_cast<int64_t>(row) * width + column]);
      exact += each, magnitudes += std::fabs(each);
    }
    CHECK(std::fabs(float(sums[column]) - exact) <= unit * std::fabs(exact) + 1e-6 * magnitudes);
    CHECK_EQ(sums[column].bits, again[column].bits);
  }
}

void CheckRefused() {
  vector<__half> x(12), y(12);
  CHECK_EQ(gmeta_add_rows(GMETA_FLOAT16, 1, 12, x.data(), x.data(), nullptr, y.data(), nullptr),
           GMETA_CUDA_UNSUPPORTED);
  CHECK_EQ(gmeta_add_rows(7, 1, 8, x.data(), x.data(), nullptr, y.data(), nullptr),
           GMETA_CUDA_UNSUPPORTED);
}

}  // namespace

int main() {
  using Bfloat16 = __nv_bfloat16;
  for (const bool has_x : {true, false}) {
    for (const bool has_offset : {true, false}) {
      CheckAdded<Bfloat16>(77, 136, has_x, has_offset), CheckAdded<__half>(3, 8, has_x, has_offset);
    }
  }
  CheckAdded<Bfloat16>(0, 8, true, true);
  for (const int rows : {0, 1, 1023, 5000}) CheckSums<Bfloat16>(rows, 264);
  CheckSums<__half>(300, 8), CheckSums<__half>(700, 512);
  CheckRefused();
}
