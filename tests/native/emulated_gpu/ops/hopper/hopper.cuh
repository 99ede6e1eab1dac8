// In place of ops/hopper/hopper.cuh: what its instructions do, in C++.

#ifndef GMETA_OPS_HOPPER_HOPPER_CUH_
#define GMETA_OPS_HOPPER_HOPPER_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#define GMETA_SM90A 1

namespace gmeta::hopper {

inline constexpr int kMaxSharedBytes = static_cast<int>(emulated::kSharedBytes);
inline constexpr uint32_t kWarpArrivals = 1;

inline uint32_t SharedAddress(const void* pointer) { return emulated::SharedOffset(pointer); }
inline char* SharedMemory() { return emulated::shared_memory; }

// The swizzle of 128 bytes: bits 4 to 6 of an address by its bits 7 to 9.
inline uint32_t Swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

class Barrier {
 public:
  void Init(uint32_t arrivals) {
    emulated::SharedOffset(this);
    arrivals_ = pending_ = static_cast<uint16_t>(arrivals);
    phase_ = 0, bytes_ = 0;
  }
  void Arrive() {
    if (pending_ == 0) emulated::Fail("more arrivals at a barrier than it has been told of");
    --pending_;
    EndPhase();
  }
  void ArriveExpecting(uint32_t bytes) {
    bytes_ += static_cast<int>(bytes);
    Arrive();
  }
  void ArriveAsWarp() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive();
  }
  void ArriveAsWarpExpecting(uint32_t bytes) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ArriveExpecting(bytes);
  }
  void Come(int bytes) {
    bytes_ -= bytes;
    EndPhase();
  }
  void Wait(uint32_t phase) {
    emulated::Current().Await([this, phase] { return phase_ != phase; });
  }

 private:
  void EndPhase() {
    if (pending_ > 0 || bytes_ != 0) return;
    pending_ = arrivals_;
    phase_ ^= 1;
  }

  uint16_t arrivals_, pending_;
  int32_t bytes_ : 31;  // announced, and still to come
  uint32_t phase_ : 1;
};
static_assert(sizeof(Barrier) == 8);

inline void FenceBarrierInit() {}
inline void FenceAsyncProxy() {}
inline void PrefetchMap(const CUtensorMap*) {}
template <int>
void GiveRegisters() {}
template <int>
void TakeRegisters() {}

// Copies 64 numbers of 16 bits a row; what lies behind the last token, or the last number of a row,
// is zeros.
inline void CopyBox(const CUtensorMap* map, void* to, Barrier* done, int d, int head, int token) {
  const uint32_t at = SharedAddress(to);
  if (at % 1024 != 0) emulated::Fail("a box isn't at a multiple of 1,024 bytes");
  emulated::Current().Copy([=] {
    for (int row = 0; row < map->rows; ++row) {
      const bool row_there = token + row < map->sizes[2] && head < map->sizes[1];
      const char* from =
          map->data + (token + row) * map->strides[2] + head * map->strides[1] + 2 * d;
      for (int unit = 0; unit < 8; ++unit) {
        char* place = emulated::shared_memory + Swizzled(at + 128 * row + 16 * unit);
        if (row_there && d + 8 * unit < map->sizes[0]) {
          std::memcpy(place, from + 16 * unit, 16);
        } else {
          std::memset(place, 0, 16);
        }
      }
    }
    done->Come(128 * map->rows);
  });
}

inline void CopyBytes(void* to, const void* from, uint32_t bytes, Barrier* done) {
  if (SharedAddress(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0)
    emulated::Fail("a copy of bytes isn't of whole units of 16");
  emulated::Current().Copy([=] {
    std::memcpy(to, from, bytes);
    done->Come(static_cast<int>(bytes));
  });
}

// The way back, of what is in memory when the copy happens.
inline void SendBox(const CUtensorMap* map, const void* from, int d, int head, int token) {
  const uint32_t at = SharedAddress(from);
  if (at % 1024 != 0) emulated::Fail("a box isn't at a multiple of 1,024 bytes");
  emulated::Current().Send([=] {
    for (int row = 0; row < map->rows && token + row < map->sizes[2]; ++row) {
      char* to = map->data + (token + row) * map->strides[2] + head * map->strides[1] + 2 * d;
      for (int unit = 0; unit < 8 && d + 8 * unit < map->sizes[0]; ++unit) {
        std::memcpy(to + 16 * unit, emulated::shared_memory + Swizzled(at + 128 * row + 16 * unit),
                    16);
      }
    }
  });
}
template <int kBoxes>
void AwaitReadBoxes() {
  emulated::Current().SendAllBut(kBoxes);
}

inline void NamedArrive(int barrier, int threads) {
  emulated::Block::Arrive(&emulated::Current().named[barrier], threads);
}
inline void NamedSync(int barrier, int threads) {
  emulated::Current().Meet(&emulated::Current().named[barrier], threads);
}

inline void LoadMatrices(const void* row, uint32_t* words) {
  const uint64_t* rows = emulated::Current().Exchange(SharedAddress(row));
  const int lane = emulated::Current().lane();
  for (int i = 0; i < 4; ++i) {
    std::memcpy(&words[i], emulated::shared_memory + rows[8 * i + lane / 4] + 4 * (lane % 4), 4);
  }
}

inline void StoreMatrices(void* row, const uint32_t* words) {
  const uint64_t* rows = emulated::Current().Exchange(SharedAddress(row));
  const int lane = emulated::Current().lane();
  for (int i = 0; i < 4; ++i) {
    std::memcpy(emulated::shared_memory + rows[8 * i + lane / 4] + 4 * (lane % 4), &words[i], 4);
  }
}

inline float FastExp2(float x) { return std::exp2(x); }
inline float FastLog2(float x) { return std::log2(x); }
inline float FastReciprocal(float x) { return 1.0f / x; }
inline float FastTanh(float x) { return std::tanh(x); }

}  // namespace gmeta::hopper

#endif  // GMETA_OPS_HOPPER_HOPPER_CUH_
