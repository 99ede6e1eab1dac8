// Sums of segments on an emulated GPU (emulated_gpu/emulation.h): the CUDA source as it stands, by
// its C interface, against plain loops that add in the order that it promises.

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "device_memory.h"
#include "ops/common/gpu/cuda_error.cu"
#include "ops/unique/gpu/segments.cu"
#include "tests/native/check.h"

namespace {

using std::vector;

// Some rows have more positions than are summed in a piece, some none.
void CheckSums(int64_t n, int64_t rows, int64_t dim, uint32_t seed) {
  emulated::settings.seed = seed;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  vector<int32_t> inverse(static_cast<size_t>(n));
  vector<float> values(static_cast<size_t>(n * dim)), sums(static_cast<size_t>(rows * dim), -1);
  for (int32_t& row : inverse)
    row = static_cast<int32_t>(random() % 2 == 0 ? rows / 2 : random() % rows);
  for (float& value : values) value = normal(random);
  const emulated::Workspace room(gmeta_gpu_segment_sum_workspace(n, rows, dim));
  CHECK_EQ(gmeta_gpu_segment_sum(values.data(), dim, inverse.data(), n, rows, sums.data(),
                                 room.data, room.bytes, nullptr),
           0);
  for (int64_t row = 0; row < rows; ++row) {
    vector<int64_t> places;
    for (int64_t i = 0; i < n; ++i) {
      if (inverse[static_cast<size_t>(i)] == row) places.push_back(i);
    }
    for (int64_t d = 0; d < dim; ++d) {
      // Pieces of 256 in their order, then the pieces; a first number is itself.
      float sum = 0.0f;
      for (size_t begin = 0; begin < places.size(); begin += 256) {
        float piece = values[static_cast<size_t>(places[begin] * dim + d)];
        for (size_t i = begin + 1; i < std::min(places.size(), begin + 256); ++i) {
          piece += values[static_cast<size_t>(places[i] * dim + d)];
        }
        sum = begin == 0 ? piece : sum + piece;
      }
      CHECK_EQ(sums[static_cast<size_t>(row * dim + d)], sum);
    }
  }
  vector<float> gathered(values.size(), -1);
  CHECK_EQ(gmeta_gpu_gather_rows(sums.data(), dim, inverse.data(), n, gathered.data(), nullptr), 0);
  for (int64_t i = 0; i < n * dim; ++i) {
    CHECK_EQ(gathered[static_cast<size_t>(i)],
             sums[static_cast<size_t>(inverse[static_cast<size_t>(i / dim)] * dim + i % dim)]);
  }
}

}  // namespace

int main() {
  CheckSums(1, 1, 4, 6);
  CheckSums(900, 7, 8, 7);
  CheckSums(300, 40, 5, 8);
}
