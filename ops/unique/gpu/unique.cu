#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <string>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/unique/gpu/unique.cuh"
#include "ops/unique/gpu/unique_abi.h"
#include "ops/unique/gpu/unique_steps.cuh"
#include "ops/unique/gpu/workspace.cuh"

namespace gmeta {
namespace {

struct Scratch {
  uint32_t* slots;
  size_t slot_count;
  uint32_t words;  // words of bits in a stretch
  uint32_t stretches;
  uint32_t* bits;
  uint32_t* firsts;
  // By owner:
  int64_t* keys;
  uint16_t* owners;
  uint16_t* sorted_owners;
  int32_t* places;
  int32_t* order;
  int32_t* moved;
  void* sort;
  size_t sort_bytes;
  size_t bytes;
};

int OwnerBits(int32_t ranks) {
  int bits = 1;
  while ((1 << bits) <= ranks) ++bits;  // `ranks` itself is one of the numbers
  return bits;
}

Scratch Cut(int64_t n, int32_t ranks, void* base) {
  Workspace space(base);
  Scratch s{};
  s.slot_count = 64;
  while (s.slot_count < static_cast<size_t>(2 * n)) s.slot_count *= 2;
  s.slots = space.Take<uint32_t>(s.slot_count);
  const uint64_t words = (static_cast<uint64_t>(n) + 31) / 32;
  // A stretch has at least 2048 ids, and there are at most 1024 stretches.
  constexpr uint64_t kFewestWords = 64;
  s.words = static_cast<uint32_t>(
      std::max(kFewestWords, (words + unique::kMostStretches - 1) / unique::kMostStretches));
  s.stretches = static_cast<uint32_t>((words + s.words - 1) / s.words);
  s.bits = space.Take<uint32_t>(static_cast<size_t>(s.stretches) * s.words);
  s.firsts = space.Take<uint32_t>(s.stretches);
  if (ranks > 0) {
    s.keys = space.Take<int64_t>(n);
    s.owners = space.Take<uint16_t>(n);
    s.sorted_owners = space.Take<uint16_t>(n);
    s.places = space.Take<int32_t>(n);
    s.order = space.Take<int32_t>(n);
    s.moved = space.Take<int32_t>(n);
    CheckCuda(cub::DeviceRadixSort::SortPairs(nullptr, s.sort_bytes, s.owners, s.sorted_owners,
                                              s.places, s.order, n, 0, OwnerBits(ranks)),
              "sizing the sort by owner");
    s.sort = space.Take<char>(s.sort_bytes);
  }
  s.bytes = space.bytes();
  return s;
}

uint32_t Blocks(int64_t n) {
  return static_cast<uint32_t>((n + unique::kThreads - 1) / unique::kThreads);
}

}  // namespace

size_t UniqueBytes(int64_t n, int32_t ranks) { return Cut(n, ranks, nullptr).bytes; }

void Unique(const int64_t* ids, int64_t n, int32_t ranks, int64_t* keys, int32_t* inverse,
            int32_t* counts, int32_t* count, void* workspace, cudaStream_t stream) {
  using unique::kThreads;
  if (ranks > 0) {
    CheckCuda(cudaMemsetAsync(counts, 0, sizeof *counts * ranks, stream), "clearing counts");
  }
  if (n == 0) {
    CheckCuda(cudaMemsetAsync(count, 0, sizeof *count, stream), "clearing a count");
    return;
  }
  Scratch s = Cut(n, ranks, workspace);
  CheckCuda(cudaMemsetAsync(s.slots, 0xff, s.slot_count * sizeof *s.slots, stream),
            "clearing the scratch table");
  const uint32_t size = static_cast<uint32_t>(n);
  uint32_t* const slot_of = reinterpret_cast<uint32_t*>(inverse);
  Launch(unique::Claim, Blocks(n), kThreads, 0, stream, "unique", ids, size, s.slots,
         static_cast<uint32_t>(s.slot_count - 1), slot_of);
  Launch(unique::Mark, s.stretches, kThreads, 0, stream, "unique", s.slots, slot_of, size, s.words,
         s.bits, s.firsts);
  Launch(unique::Number, s.stretches, kThreads, 0, stream, "unique", ids, s.slots, slot_of, s.words,
         s.bits, s.firsts, ranks > 0 ? s.keys : keys, count);
  if (ranks > 0) {
    const uint32_t blocks = std::min(Blocks(n), 1024u);
    Launch(unique::FindOwners, blocks, kThreads, 0, stream, "unique", s.keys, count, size,
           static_cast<uint32_t>(ranks), s.owners, s.places, counts);
    CheckCuda(cub::DeviceRadixSort::SortPairs(s.sort, s.sort_bytes, s.owners, s.sorted_owners,
                                              s.places, s.order, n, 0, OwnerBits(ranks), stream),
              "sorting by owner");
    Launch(unique::Move, Blocks(n), kThreads, 0, stream, "unique", s.keys, s.order, count, keys,
           s.moved);
  }
  Launch(unique::Answer, Blocks(n), kThreads, 0, stream, "unique", s.slots, s.moved, size, inverse);
}

namespace {

int Run(const int64_t* ids, int64_t n, int32_t ranks, int64_t* keys, int32_t* inverse,
        int32_t* counts, int32_t* count, void* workspace, size_t workspace_bytes, void* stream) {
  return Guarded([&] {
    Require(n >= 0 && n <= (1 << 30),
            "unique: at most 2^30 ids in a call, got " + std::to_string(n) + ": split the batch");
    const size_t needed = UniqueBytes(n, ranks);
    Require(workspace_bytes >= needed,
            "unique: the workspace has " + std::to_string(workspace_bytes) +
                " bytes, but gmeta_gpu_unique_workspace says " + std::to_string(needed));
    Unique(ids, n, ranks, keys, inverse, counts, count, workspace,
           static_cast<cudaStream_t>(stream));
  });
}

}  // namespace
}  // namespace gmeta

size_t gmeta_gpu_unique_workspace(int64_t n, int32_t ranks) {
  size_t bytes = 0;
  gmeta::Guarded([&] { bytes = gmeta::UniqueBytes(n, ranks); });
  return bytes;
}

int gmeta_gpu_unique(const int64_t* ids, int64_t n, int64_t* keys, int32_t* inverse, int32_t* count,
                     void* workspace, size_t workspace_bytes, void* stream) {
  return gmeta::Run(ids, n, 0, keys, inverse, nullptr, count, workspace, workspace_bytes, stream);
}

int gmeta_gpu_unique_by_owner(const int64_t* ids, int64_t n, int32_t ranks, int64_t* keys,
                              int32_t* inverse, int32_t* counts, int32_t* count, void* workspace,
                              size_t workspace_bytes, void* stream) {
  return gmeta::Guarded([&] {
    gmeta::Require(ranks >= 1 && ranks <= 1024,
                   "unique_by_owner: ranks must be 1 to 1024, got " + std::to_string(ranks));
    const int status =
        gmeta::Run(ids, n, ranks, keys, inverse, counts, count, workspace, workspace_bytes, stream);
    if (status != GMETA_CUDA_OK) {
      throw gmeta::CudaError(static_cast<gmeta_cuda_status>(status), gmeta_cuda_error());
    }
  });
}
