#include <algorithm>
#include <optional>
#include <string>

#include "ops/common/gpu/cuda_error.cuh"
#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/unique/gpu/owner_order.cuh"
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
  int32_t* moved;
  std::optional<OwnerOrder> order;
  size_t bytes;
};

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
    s.moved = space.Take<int32_t>(n);
    if (n > 0) s.order.emplace(n, ranks, &space);
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
  if (ranks > 0) s.order->Run(s.keys, count, keys, s.moved, counts, stream);
  Launch(unique::Answer, Blocks(n), kThreads, 0, stream, "unique", s.slots, s.moved, size, inverse);
}

namespace {

void RequireSize(int64_t n) {
  Require(n >= 0 && n <= (1 << 30),
          "unique: at most 2^30 ids in a call, got " + std::to_string(n) + ": split the batch");
}

void RequireRanks(int32_t ranks, const std::string& function) {
  Require(ranks >= 1 && ranks <= 1024,
          function + ": ranks must be 1 to 1024, got " + std::to_string(ranks));
}

void RequireRoom(size_t bytes, size_t needed, const std::string& function) {
  Require(bytes >= needed, "unique: the workspace has " + std::to_string(bytes) + " bytes, but " +
                               function + " says " + std::to_string(needed));
}

size_t OrderBytes(int64_t n, int32_t ranks) {
  Workspace space(nullptr);
  if (n > 0) OwnerOrder(n, ranks, &space);
  return space.bytes();
}

int Run(const int64_t* ids, int64_t n, int32_t ranks, int64_t* keys, int32_t* inverse,
        int32_t* counts, int32_t* count, void* workspace, size_t workspace_bytes, void* stream) {
  return Guarded([&] {
    RequireSize(n);
    RequireRoom(workspace_bytes, UniqueBytes(n, ranks), "gmeta_gpu_unique_workspace");
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
    gmeta::RequireRanks(ranks, "unique_by_owner");
    const int status =
        gmeta::Run(ids, n, ranks, keys, inverse, counts, count, workspace, workspace_bytes, stream);
    if (status != GMETA_CUDA_OK) {
      throw gmeta::CudaError(static_cast<gmeta_cuda_status>(status), gmeta_cuda_error());
    }
  });
}

size_t gmeta_gpu_order_by_owner_workspace(int64_t n, int32_t ranks) {
  size_t bytes = 0;
  gmeta::Guarded([&] { bytes = gmeta::OrderBytes(n, ranks); });
  return bytes;
}

int gmeta_gpu_order_by_owner(const int64_t* ids, int64_t n, int32_t ranks, int64_t* keys,
                             int32_t* inverse, int32_t* counts, void* workspace,
                             size_t workspace_bytes, void* stream) {
  return gmeta::Guarded([&] {
    gmeta::RequireSize(n);
    gmeta::RequireRanks(ranks, "order_by_owner");
    gmeta::RequireRoom(workspace_bytes, gmeta::OrderBytes(n, ranks),
                       "gmeta_gpu_order_by_owner_workspace");
    const cudaStream_t queue = static_cast<cudaStream_t>(stream);
    gmeta::CheckCuda(cudaMemsetAsync(counts, 0, sizeof *counts * ranks, queue), "clearing counts");
    if (n == 0) return;
    gmeta::Workspace space(workspace);
    gmeta::OwnerOrder(n, ranks, &space).Run(ids, nullptr, keys, inverse, counts, queue);
  });
}
