// GpuIndex: the parts of a GPU table's index, as the host sees them. Kernels see it as an IndexView
// (device/index.cuh).
//
// Growth is extendible hashing. The directory has 2^k entries, for k bits of the hash. A part of
// depth d has the keys that agree in d of them, and stands in 2^(k - d) entries. An index begins
// as one small part, which grows to kPartSlots slots by doubling. From then on, a part that is
// three quarters full is cut in two: a kernel moves its keys to two new arrays, and the old array
// is kept for the next cut. A cut takes some tenths of a millisecond, whatever the size of the
// table, since arrays fit in the GPU's L2 cache; no call waits for it, and no memory is freed.
//
// Keys are spread evenly, so all parts become full at about the same time. A batch cuts one part
// for each kKeysPerCut of its keys (rounded up), the fullest first. So while a full part waits for
// its turn, it gets about kKeysPerCut keys at most, a sixteenth of its slots, and no batch cuts
// many.
//
// Room. The host knows how many keys each part had when it last read the counters, and how many
// keys have come since. Of n keys, a part of depth d gets more than 8 standard deviations above
// n / 2^d only if the keys were chosen for that. If that fills a part to the last slot, keys are
// not inserted, but counted, and every later call that reads the counters fails.

#ifndef GMETA_OPS_TABLE_GPU_MEMORY_GPU_INDEX_CUH_
#define GMETA_OPS_TABLE_GPU_MEMORY_GPU_INDEX_CUH_

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/table/gpu/device/index.cuh"
#include "ops/table/gpu/memory/device_memory.cuh"

namespace gmeta {

class GpuIndex {
 public:
  // `owner` is for messages.
  GpuIndex(const std::string& owner, const gmeta_gpu_allocator& allocator)
      : owner_(owner), allocator_(allocator) {}

  // Makes the first part. `part_keys` are kMostParts zeros in device memory, which kernels count
  // in and the owner reads.
  void Begin(unsigned int* part_keys, cudaStream_t stream);

  IndexView View() const {
    return {directory_.as<const IndexPart>(), (1u << log2_entries_) - 1, part_keys_, longest_};
  }
  uint64_t slots() const;
  size_t bytes() const;
  // Calls visit(slots, number of slots) for each part.
  template <class Visit>
  void ForEachPart(const Visit& visit) const {
    for (const Part& part : parts_) visit(part.memory.as<const KeySlot>(), part.slots());
  }

  // Notes how many keys each part has, as read; and that up to n more may have come.
  void NoteKeys(const unsigned int* part_keys);
  void MayHaveTaken(uint64_t n) { since_ += n; }

  // Whether every part has room for its share of n more keys.
  bool HasRoom(uint64_t n) const;
  // Whether a part is to be cut.
  bool IsFull() const { return is_full_; }
  // Cuts full parts, as many as a batch of n keys may. Call NoteKeys before and after it.
  void CutFullest(uint64_t n, cudaStream_t stream);
  // Grows each part that would be full with its share of n more keys, and returns whether there
  // are such parts. Call NoteKeys before and after it.
  bool Grow(uint64_t n, cudaStream_t stream);
  // Removes all keys.
  void Clear(cudaStream_t stream);

 private:
  struct Part {
    DeviceMemory memory;
    int depth = 0;
    uint32_t bits = 0;  // those that its keys agree in
    uint64_t keys = 0;  // when they were last read

    uint64_t slots() const { return memory.bytes() / sizeof(KeySlot); }
  };

  DeviceMemory TakeArray(uint64_t slots);
  // Doubles or cuts parts, so that they come nearer to having room for n more keys.
  void Replace(const std::vector<uint32_t>& numbers, uint64_t n, cudaStream_t stream);
  void WriteDirectory(cudaStream_t stream);

  const std::string owner_;
  const gmeta_gpu_allocator allocator_;
  std::vector<Part> parts_;  // by their number
  std::vector<DeviceMemory> spare_;
  int log2_entries_ = 0;
  uint64_t longest_ = 0;  // the slots of the largest part
  DeviceMemory directory_;
  unsigned int* part_keys_ = nullptr;
  uint64_t since_ = 0;
  bool is_full_ = false;
  std::array<uint64_t, kLog2MostParts + 1> room_{};  // the least of the parts of each depth
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_GPU_MEMORY_GPU_INDEX_CUH_
