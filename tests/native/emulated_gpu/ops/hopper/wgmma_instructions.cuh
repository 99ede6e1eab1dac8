// In place of ops/hopper/wgmma_instructions.cuh: products by loops, at the time that
// emulation.h says. Each thread computes its own sums; a left operand in registers is that of the
// four threads that share two rows.

#ifndef GMETA_OPS_HOPPER_WGMMA_INSTRUCTIONS_CUH_
#define GMETA_OPS_HOPPER_WGMMA_INSTRUCTIONS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ops/hopper/hopper.cuh"

namespace gmeta::hopper {

inline float NumberOf(uint16_t bits, bool bfloat16) {
  if (bfloat16) {
    __nv_bfloat16 x;
    x.bits = bits;
    return static_cast<float>(x);
  }
  __half x;
  x.bits = bits;
  return static_cast<float>(x);
}

// A number of a described tile: of row `row` and place `place` of 16 of the sum (K-major), or of a
// transposed tile, where `place` is a row of memory.
inline float NumberAt(uint64_t description, int row, int place, bool transposed, bool bfloat16) {
  const auto field = [&](int bit) {
    return static_cast<uint32_t>(description >> bit & 0x3FFF) << 4;
  };
  if (description >> 62 != 1) emulated::Fail("a product of what isn't swizzled by 128 bytes");
  const int line = transposed ? place : row, at = transposed ? row % 64 : place;
  const uint32_t box = transposed ? row / 64 * field(16) : 0;
  const uint32_t address = field(0) + box + line / 8 * field(32) + line % 8 * 128 + 2 * at;
  uint16_t bits;
  std::memcpy(&bits, emulated::shared_memory + Swizzled(address), 2);
  return NumberOf(bits, bfloat16);
}

// One thread's share of a product. `quad` are the products of the four threads of its rows, `right`
// (columns, 16) the right operand.
inline void Multiply(const emulated::Product* const (&quad)[4], const float* right, int thread) {
  const emulated::Product& own = *quad[thread % 4];
  float left[2][16];
  for (int half = 0; half < 2; ++half) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
    for (int place = 0; place < 16; ++place) {
      if (own.left_in_registers) {
        const uint32_t word = quad[place % 8 / 2]->left_registers[half + place / 8 * 2];
        left[half][place] = NumberOf(static_cast<uint16_t>(word >> place % 2 * 16), own.bfloat16);
      } else {
        left[half][place] = NumberAt(own.left, row, place, false, own.bfloat16);
      }
    }
  }
  for (int column = 0; column < own.columns / 4; ++column) {
    const float* of_column = right + (column / 2 * 8 + 2 * (thread % 4) + column % 2) * 16;
    for (int half = 0; half < 2; ++half) {
      float& to = own.sums[column / 2 * 4 + 2 * half + column % 2];
      float sum = own.add ? to : 0.0f;
      for (int place = 0; place < 16; ++place) sum += left[half][place] * of_column[place];
      to = sum;
    }
  }
}

// All threads of a warp: computes those of their products that are of groups before `group`.
inline void MultiplyBefore(int group) {
  emulated::Block& block = emulated::Current();
  auto& own = block.fiber->products;
  auto& right = block.warp().numbers;
  size_t count = 0, size = 0;  // of right operands
  for (; count < own.size() && own[count].first < group; ++count) size += own[count].second.columns;
  right.resize(std::max(right.size(), 16 * size));
  block.MeetWarp();
  float* to = right.data();
  for (size_t i = 0; i < count; ++i) {
    const emulated::Product& product = own[i].second;
    for (int column = block.lane(); column < product.columns; column += 32) {
      for (int place = 0; place < 16; ++place) {
        to[column * 16 + place] =
            NumberAt(product.right, column, place, product.right_transposed, product.bfloat16);
      }
    }
    to += product.columns * 16;
  }
  block.MeetWarp();
  const float* from = right.data();
  const unsigned first = block.fiber->index.x / 4 * 4;
  for (size_t i = 0; i < count; ++i) {
    const emulated::Product* quad[4];
    for (unsigned other = 0; other < 4; ++other) {
      quad[other] = &block.fibers[first + other]->products[i].second;
    }
    Multiply(quad, from, static_cast<int>(block.fiber->index.x % 128));
    from += own[i].second.columns * 16;
  }
  block.MeetWarp();
  own.erase(own.begin(), own.begin() + static_cast<int64_t>(count));
  block.MeetWarp();
}

inline void Begin() {}
inline void Commit() {
  const int groups = ++emulated::Current().fiber->groups;
  if (emulated::settings.pace == emulated::Pace::kEarly) MultiplyBefore(groups);
}
template <int kGroups>
void Wait() {
  MultiplyBefore(emulated::Current().fiber->groups - kGroups);
}
template <class Number, size_t kSize>
void Keep(Number (&)[kSize]) {}

template <class T>
uint32_t RoundedPair(float first, float second) {
  return T(first).bits | static_cast<uint32_t>(T(second).bits) << 16;
}

inline void Ask(const emulated::Product& product) {
  auto* const fiber = emulated::Current().fiber;
  fiber->products.push_back({fiber->groups, product});
}
template <class T, int kTransposed, size_t kSums>
void Product(float (&d)[kSums], uint64_t a, uint64_t b, int add) {
  Ask({d, static_cast<int>(2 * kSums), false, a, nullptr, b, add != 0, kTransposed == 1,
       std::is_same_v<T, __nv_bfloat16>});
}
template <class T, int kTransposed, size_t kSums>
void Product(float (&d)[kSums], const uint32_t* a, uint64_t b, int add) {
  Ask({d, static_cast<int>(2 * kSums), true, 0, a, b, add != 0, kTransposed == 1,
       std::is_same_v<T, __nv_bfloat16>});
}

}  // namespace gmeta::hopper

#endif  // GMETA_OPS_HOPPER_WGMMA_INSTRUCTIONS_CUH_
