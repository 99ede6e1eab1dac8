// GPU ops whose work runs on the side stream (side_stream.h). Such an op is asynchronous: it queues
// its work, and ends once the GPU is done with it. No thread of TensorFlow waits meanwhile.

#ifndef GMETA_OPS_COMMON_KERNELS_BESIDE_H_
#define GMETA_OPS_COMMON_KERNELS_BESIDE_H_

#include <chrono>
#include <functional>
#include <utility>

#include "ops/common/kernels_gpu.h"
#include "ops/common/side_stream.h"

namespace gmeta {

// Runs an op's work beside the compute stream, then calls `done`.
//   begin(side)  allocates all memory, then calls side->Follow() and queues the work
//   end()        outputs the results; copies of it keep memory that the work uses
// Both return a status, and `end` isn't called after an error. What the side stream has been given
// before an error is waited for, because `done` releases the memory.
template <class Begin, class End>
void RunBeside(tensorflow::OpKernelContext* context, const Begin& begin, End end,
               tensorflow::AsyncOpKernel::DoneCallback done) {
  constexpr std::chrono::microseconds kSoon{50};  // about what it takes to wake two threads
  SideStream* side = nullptr;
  OP_REQUIRES_OK_ASYNC(context, CudaStatus(SideStream::Beside(CudaStream(context), &side)), done);
  const auto fail = [&](absl::Status status) {
    side->Await();
    OP_REQUIRES_OK_ASYNC(context, status, done);
  };
  if (absl::Status status = begin(side); !status.ok()) return fail(std::move(status));
  const auto here = std::this_thread::get_id();
  const auto ended = [context, end, done, here](int code) {
    absl::Status status = CudaStatus(code);  // whose text is this thread's
    const auto finish = [context, end, done, status] {
      OP_REQUIRES_OK_ASYNC(context, status, done);
      OP_REQUIRES_OK_ASYNC(context, end(), done);
      done();
    };
    // What follows an op runs in `done`, and may take long or wait for other work beside.
    if (std::this_thread::get_id() == here || context->runner() == nullptr) return finish();
    const auto run = *context->runner();  // which `finish` may destroy
    run(finish);
  };
  if (absl::Status status = CudaStatus(side->Then(kSoon, ended)); !status.ok()) fail(status);
}

// Queues a copy on the side stream. One of the tensors is in host memory, which should be pinned.
inline absl::Status CopyBeside(const tensorflow::Tensor& from, const SideStream& side,
                               tensorflow::Tensor* to) {
  return CudaStatus(
      gmeta_gpu_stream_copy(to->data(), from.data(), from.TotalBytes(), side.stream()));
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_KERNELS_BESIDE_H_
