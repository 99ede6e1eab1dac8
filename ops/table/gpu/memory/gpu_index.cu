#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/device/growing.cuh"
#include "ops/table/gpu/device/lookup.cuh"
#include "ops/table/gpu/memory/gpu_index.cuh"

namespace gmeta {
namespace {

#ifdef GMETA_PART_SLOTS  // of tests, so that small tables have many parts
constexpr uint64_t kPartSlots = GMETA_PART_SLOTS;
#else
constexpr uint64_t kPartSlots = uint64_t{1} << 20;
#endif
constexpr uint64_t kFewestSlots = std::min<uint64_t>(1024, kPartSlots / 4);
constexpr uint64_t kKeysPerCut = kPartSlots / 16;
constexpr uint64_t kMostKeys = uint64_t{1} << 32;

// A part grows when it is fuller than kMostLoad; a batch may overfill it up to kHardLoad. The first
// is a little more than three quarters, which a table may be reserved for: keys of parts differ.
uint64_t KeysAtMostLoad(uint64_t slots) { return slots / 64 * 49; }
uint64_t KeysAtHardLoad(uint64_t slots) { return slots / 16 * 15; }

// An upper bound of how many of n keys are in a part of a depth.
uint64_t MostOf(uint64_t n, int depth) {
  const double mean = std::ldexp(static_cast<double>(n), -depth);
  return std::min(n, static_cast<uint64_t>(mean + 8 * std::sqrt(mean)) + 64);
}

}  // namespace

void GpuIndex::Begin(unsigned int* part_keys, cudaStream_t stream) {
  part_keys_ = part_keys;
  directory_ = DeviceMemory(allocator_, kMostParts * sizeof(IndexPart));
  parts_.emplace_back();
  parts_.back().memory = TakeArray(kFewestSlots);
  Clear(stream);
  WriteDirectory(stream);
}

uint64_t GpuIndex::slots() const {
  uint64_t sum = 0;
  for (const Part& part : parts_) sum += part.slots();
  return sum;
}

size_t GpuIndex::bytes() const {
  size_t sum = directory_.bytes() + sizeof(KeySlot) * slots();
  for (const DeviceMemory& array : spare_) sum += array.bytes();
  return sum;
}

void GpuIndex::NoteKeys(const unsigned int* part_keys) {
  since_ = 0;
  is_full_ = false;
  room_.fill(UINT64_MAX);
  for (Part& part : parts_) {
    part.keys = *part_keys++;
    is_full_ = is_full_ || part.keys > KeysAtMostLoad(part.slots());
    const uint64_t most = KeysAtHardLoad(part.slots());
    uint64_t& room = room_[static_cast<size_t>(part.depth)];
    room = std::min(room, most - std::min(most, part.keys));
  }
}

bool GpuIndex::HasRoom(uint64_t n) const {
  for (int depth = 0; depth <= kLog2MostParts; ++depth) {
    if (MostOf(since_ + n, depth) > room_[static_cast<size_t>(depth)]) return false;
  }
  return true;
}

void GpuIndex::CutFullest(uint64_t n, cudaStream_t stream) {
  const auto load = [&](uint32_t number) {
    return static_cast<double>(parts_[number].keys) / static_cast<double>(parts_[number].slots());
  };
  std::vector<uint32_t> full;
  for (uint32_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].keys > KeysAtMostLoad(parts_[i].slots())) full.push_back(i);
  }
  std::sort(full.begin(), full.end(), [&](uint32_t a, uint32_t b) { return load(a) > load(b); });
  const uint64_t most = (n + kKeysPerCut - 1) / kKeysPerCut;
  if (full.size() > most) full.resize(most);
  Replace(full, 0, stream);
}

bool GpuIndex::Grow(uint64_t n, cudaStream_t stream) {
  uint64_t keys = 0;
  std::vector<uint32_t> full;
  for (uint32_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    keys += part.keys;
    if (part.keys + MostOf(n, part.depth) > KeysAtMostLoad(part.slots())) full.push_back(i);
  }
  Require(n <= kMostKeys && keys + n <= kMostKeys,
          owner_ + "it has no room for " + std::to_string(n) + " keys beside " +
              std::to_string(keys) + ": bound it by an eviction");
  Replace(full, n, stream);
  return !full.empty();
}

DeviceMemory GpuIndex::TakeArray(uint64_t slots) {
  if (slots != kPartSlots || spare_.empty()) {
    return DeviceMemory(allocator_, slots * sizeof(KeySlot));
  }
  DeviceMemory array = std::move(spare_.back());
  spare_.pop_back();
  return array;
}

void GpuIndex::Replace(const std::vector<uint32_t>& numbers, uint64_t n, cudaStream_t stream) {
  // Allocates all new memory before it changes anything, so that a lack of memory changes nothing.
  struct Arrays {
    DeviceMemory first, second;
  };
  std::vector<Arrays> made(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const Part& part = parts_[numbers[i]];
    uint64_t slots = part.slots();
    if (slots >= kPartSlots && part.depth < kLog2MostParts) {
      made[i] = {TakeArray(slots), TakeArray(slots)};
      continue;
    }
    const bool small = slots < kPartSlots;
    do {
      slots *= 2;
    } while (part.keys + MostOf(n, part.depth) > KeysAtMostLoad(slots) &&
             !(small && slots >= kPartSlots));
    made[i].first = TakeArray(slots);
  }
  std::vector<DeviceMemory> old;
  const auto begin = [&](uint32_t number, DeviceMemory* array) {
    CheckCuda(cudaMemsetAsync(array->as<void>(), 0, array->bytes(), stream), "clearing a part");
    CheckCuda(cudaMemsetAsync(part_keys_ + number, 0, sizeof *part_keys_, stream),
              "clearing a count");
    std::swap(parts_[number].memory, *array);
  };
  for (size_t i = 0; i < numbers.size(); ++i) {
    const uint32_t number = numbers[i];
    if (made[i].second.bytes() != 0) {
      Part& part = parts_[number];
      const uint32_t bit = 1u << part.depth++;
      log2_entries_ = std::max(log2_entries_, part.depth);
      Part other;
      other.depth = part.depth;
      other.bits = part.bits | bit;
      parts_.push_back(std::move(other));
      begin(static_cast<uint32_t>(parts_.size() - 1), &made[i].second);
    }
    begin(number, &made[i].first);
    old.push_back(std::move(made[i].first));
  }
  WriteDirectory(stream);
  bool frees = false;
  for (DeviceMemory& array : old) {
    const uint64_t count = array.bytes() / sizeof(KeySlot);
    Launch(Rehash, BlocksOf(count), kBlockThreads, 0, stream, "growing an index",
           array.as<const KeySlot>(), count, View());
    if (count == kPartSlots) {
      spare_.push_back(std::move(array));  // its next use comes after this one on the stream
    } else {
      frees = true;
    }
  }
  if (frees) CheckCuda(cudaStreamSynchronize(stream), "growing an index");
}

void GpuIndex::WriteDirectory(cudaStream_t stream) {
  std::vector<IndexPart> entries(size_t{1} << log2_entries_);
  for (uint32_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    longest_ = std::max(longest_, part.slots());
    for (size_t at = part.bits; at < entries.size(); at += size_t{1} << part.depth) {
      entries[at] = {part.memory.as<KeySlot>(),
                     static_cast<uint32_t>(part.slots() / kBucketSlots - 1), i};
    }
  }
  CheckCuda(cudaMemcpyAsync(directory_.as<void>(), entries.data(),
                            entries.size() * sizeof(IndexPart), cudaMemcpyHostToDevice, stream),
            "writing a directory");
}

void GpuIndex::Clear(cudaStream_t stream) {
  for (const Part& part : parts_) {
    CheckCuda(cudaMemsetAsync(part.memory.as<void>(), 0, part.memory.bytes(), stream),
              "clearing keys");
  }
  CheckCuda(cudaMemsetAsync(part_keys_, 0, kMostParts * sizeof *part_keys_, stream),
            "clearing counts of keys");
  const std::vector<unsigned int> none(parts_.size());
  NoteKeys(none.data());
}

}  // namespace gmeta
