// IoRing: reads many pieces of a file at once by io_uring, without a library.
//
// A drive answers dozens of random reads in the time of one if all of them wait in its queue. A
// thread that calls pread has one in the queue. The kernel's ring (io_uring(7)) takes a list of
// reads in one system call and returns them in any order:
//
//   SQ  submission queue: the head is the kernel's, the tail ours; entries name the reads
//   CQ  completion queue: the tail is the kernel's, the head ours; entries carry results
//
// Read keeps up to kDepth reads in flight, and returns when all pieces are there. A short read is
// continued. Kernels before 5.6, and sandboxes that forbid io_uring, have no ring: OfThread returns
// null, and the caller uses pread.
//
// Each thread has a ring of its own, so a ring needs no lock.

#ifndef GMETA_OPS_TABLE_DISK_IO_RING_H_
#define GMETA_OPS_TABLE_DISK_IO_RING_H_

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#define GMETA_HAVE_IO_URING 1
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace gmeta::disk {

// Bytes of a file, and where to put them.
struct ReadPiece {
  uint64_t offset;
  size_t bytes;
  char* to;
};

// Why a read failed; `error` is an errno, 0 if all is well. A file that ends too early is EIO.
struct ReadOutcome {
  int error = 0;
  uint64_t offset = 0;
};

#ifdef GMETA_HAVE_IO_URING

class IoRing {
 public:
  static constexpr unsigned kDepth = 128;

  // The calling thread's ring; null if the kernel refuses one.
  static IoRing* OfThread() {
    thread_local IoRing ring;
    return ring.fd_ >= 0 ? &ring : nullptr;
  }

  ReadOutcome Read(int fd, const std::vector<ReadPiece>& pieces) {
    std::vector<ReadPiece> left = pieces;  // what each piece still wants
    std::vector<size_t> waiting(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) waiting[i] = pieces.size() - 1 - i;
    ReadOutcome outcome;
    unsigned in_flight = 0;
    while (in_flight > 0 || (!waiting.empty() && outcome.error == 0)) {
      unsigned fresh = 0;
      while (outcome.error == 0 && in_flight + fresh < kDepth && !waiting.empty()) {
        Push(fd, left[waiting.back()], waiting.back());
        waiting.pop_back();
        ++fresh;
      }
      // Enters even with a failure, to collect what is in flight: the kernel writes to its memory.
      if (Enter() < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        outcome = {errno, 0};
        break;
      }
      in_flight += fresh;
      Collect([&](size_t i, int result) {
        --in_flight;
        ReadPiece& piece = left[i];
        if (result == -EAGAIN || result == -EINTR) {
          waiting.push_back(i);
        } else if (result <= 0) {
          if (outcome.error == 0) outcome = {result == 0 ? EIO : -result, piece.offset};
        } else if (static_cast<size_t>(result) < piece.bytes) {
          piece.offset += static_cast<size_t>(result);
          piece.to += result;
          piece.bytes -= static_cast<size_t>(result);
          waiting.push_back(i);
        }
      });
    }
    return outcome;
  }

  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;
  ~IoRing() {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
  }

 private:
  IoRing() {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, kDepth, &params));
    if (fd_ < 0) return;
    // One mapping for both rings is a feature of 5.4; IORING_OP_READ came with 5.6.
    const unsigned wanted = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
    const size_t sq = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t cq = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = sq > cq ? sq : cq;
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    if ((params.features & wanted) == wanted) {
      rings_ = Map(rings_bytes_, IORING_OFF_SQ_RING);
      entries_ = Map(entries_bytes_, IORING_OFF_SQES);
    }
    if (rings_ == nullptr || entries_ == nullptr) {
      close(fd_);
      fd_ = -1;
      return;
    }
    char* const base = static_cast<char*>(rings_);
    sq_tail_ = reinterpret_cast<unsigned*>(base + params.sq_off.tail);
    sq_mask_ = *reinterpret_cast<unsigned*>(base + params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<unsigned*>(base + params.sq_off.array);
    cq_head_ = reinterpret_cast<unsigned*>(base + params.cq_off.head);
    cq_tail_ = reinterpret_cast<unsigned*>(base + params.cq_off.tail);
    cq_mask_ = *reinterpret_cast<unsigned*>(base + params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
  }

  void* Map(size_t bytes, uint64_t offset) const {
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                          static_cast<off_t>(offset));
    return at == MAP_FAILED ? nullptr : at;
  }

  void Push(int fd, const ReadPiece& piece, size_t number) {
    const unsigned tail = *sq_tail_, slot = tail & sq_mask_;
    io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[slot];
    entry = {};
    entry.opcode = IORING_OP_READ;
    entry.fd = fd;
    entry.off = piece.offset;
    entry.addr = reinterpret_cast<uint64_t>(piece.to);
    entry.len = static_cast<uint32_t>(piece.bytes);
    entry.user_data = number;
    sq_array_[slot] = slot;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++unsubmitted_;
  }

  // Submits what was pushed, and waits for at least one completion.
  int Enter() {
    const int taken = static_cast<int>(
        syscall(SYS_io_uring_enter, fd_, unsubmitted_, 1, IORING_ENTER_GETEVENTS, nullptr, 0));
    if (taken > 0) unsubmitted_ -= static_cast<unsigned>(taken);
    return taken;
  }

  template <class Visit>
  void Collect(const Visit& visit) {
    unsigned head = *cq_head_;
    const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
      const io_uring_cqe& one = completions_[head & cq_mask_];
      visit(static_cast<size_t>(one.user_data), one.res);
    }
    __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
  }

  int fd_ = -1;
  void* rings_ = nullptr;
  size_t rings_bytes_ = 0;
  void* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  unsigned* sq_tail_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* sq_array_ = nullptr;
  unsigned unsubmitted_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
};

#else

class IoRing {
 public:
  static IoRing* OfThread() { return nullptr; }
  ReadOutcome Read(int, const std::vector<ReadPiece>&) { return {ENOSYS, 0}; }
};

#endif

}  // namespace gmeta::disk

#endif  // GMETA_OPS_TABLE_DISK_IO_RING_H_
