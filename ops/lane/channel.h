// The lane: one ordered channel for the collectives of a job's N ranks, over TCP.
//
// Layout. A rank has a connection with each other rank (mesh.h). A collective is one exchange, or
// two for a large allreduce. In an exchange a rank sends to every other rank one frame (frame.h),
// followed by the data for that rank, perhaps none.
//
// Invariants. The order of collectives is the program's, the same on all ranks. It isn't
// negotiated, but checked: a frame carries its number in the order, its kind, its type and its
// name. A rank sends exactly one frame per peer and exchange, and ends an exchange when it has
// received all that the others sent in it, so what it reads next belongs to the next exchange. If
// only some ranks take part in an alltoall (`Call::ranks`), the others get no frame; they make one
// of their own, so numbers agree. After a failure the channel stays failed: unless it is in the
// middle of data it states the cause in a last frame, and it stops sending, which the other ranks
// notice at once. So they can name the rank that was lost first: a rank that closes between frames
// without a last frame is that rank, and one that closes in the middle of data may be, if no other
// is.
//
// Operations. Alltoallv: the frames carry the sizes, so a rank allocates when the last frame has
// arrived, and no round is spent on sizes. Allreduce: small data are sent by every rank to every
// rank; otherwise each rank sums one part of the elements and sends the sum to the others. Either
// way an element is summed in the order of ranks, so all ranks have the same bits, whichever way
// was taken.
//
// Why it is fast. A small exchange is one system call per peer to send, and one to receive frame
// and data together into the peer's inbox; large data go directly to their place. All peers' sends
// and receives progress together on non-blocking sockets, so no two ranks can wait for each other
// with full buffers. A rank that waits polls for some microseconds, yielding its core in between,
// before it sleeps in poll(): an answer then costs no wake-up. A caller may spend these
// microseconds itself and leave only the sleep to another thread (`Advance`).

#ifndef GMETA_OPS_LANE_CHANNEL_H_
#define GMETA_OPS_LANE_CHANNEL_H_

#include <sched.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/lane/abort.h"
#include "ops/lane/frame.h"
#include "ops/lane/socket.h"

namespace gmeta::lane {

// Bytes to be sent.
struct Part {
  const char* data = nullptr;
  size_t bytes = 0;
};

class Channel {
 public:
  static constexpr size_t kFewBytes = 64 << 10;  // an allreduce of so many to each sends all
  static constexpr std::chrono::microseconds kLook{50};
  static constexpr milliseconds kAsk{100};  // for what others know of a loss

  // `sockets` by rank, this rank's own being none. A rank that doesn't come within `patience` fails
  // the collective; 0 waits without limit.
  Channel(std::vector<Socket> sockets, int rank, milliseconds patience)
      : rank_(rank), patience_(patience) {
    for (Socket& socket : sockets) {
      peers_.push_back(std::make_unique<Peer>());
      peers_.back()->socket = std::move(socket);
    }
  }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

  // Takes how many bytes each rank has sent, and returns where they go, rank by rank without gaps;
  // nullptr fails the channel.
  using Allocate = std::function<char*(const std::vector<uint64_t>& bytes)>;

  // Sends `parts[r]` to rank r; those who take no part get nothing. Returns why it failed, or "".
  std::string Alltoallv(const Call& call, std::vector<Part> parts, const Allocate& allocate) {
    BeginAlltoallv(call, std::move(parts), allocate);
    Advance(true);
    return failed_;
  }

  // Sums `n` values over the ranks, in place.
  template <class T>
  std::string Allreduce(const Call& call, T* values, size_t n) {
    BeginAllreduce(call, values, n);
    Advance(true);
    return failed_;
  }

  // The same in parts, so that a thread may begin a collective and another wait for its end. What
  // the arguments point to is used until `Advance` returns true.
  void BeginAlltoallv(const Call& call, std::vector<Part> parts, const Allocate& allocate) {
    then_ = nullptr;
    Begin(call, std::move(parts),
          [this, width = call.width, allocate](const std::vector<uint64_t>& bytes, char** to) {
            for (int r = 0; r < size(); ++r) {
              if (width != 0 && bytes[r] % width != 0) {
                return "rank " + std::to_string(r) + " sent " + std::to_string(bytes[r]) +
                       " bytes, which aren't whole rows";
              }
            }
            char* at = allocate(bytes);
            if (at == nullptr) return std::string("there is no place for what was sent");
            for (int r = 0; r < size(); at += bytes[r++]) to[r] = at;
            return std::string();
          });
  }

  template <class T>
  void BeginAllreduce(const Call& call, T* values, size_t n) {
    const size_t ranks = peers_.size(), own = static_cast<size_t>(rank_);
    const bool few = n * sizeof(T) <= kFewBytes;
    const auto begin = [=](size_t r) { return few ? 0 : n * r / ranks; };
    const auto part = [=](size_t r) {
      const size_t end = few ? n : n * (r + 1) / ranks;
      return Part{reinterpret_cast<const char*>(values + begin(r)), (end - begin(r)) * sizeof(T)};
    };
    const size_t mine = part(own).bytes / sizeof(T);
    T* const terms = reinterpret_cast<T*>(Scratch(ranks * mine * sizeof(T)));
    std::vector<Part> parts(ranks);
    for (size_t r = 0; r < ranks; ++r) parts[r] = part(r);
    Begin(call, parts, [=](const std::vector<uint64_t>& bytes, char** to) {
      for (size_t r = 0; r < ranks; ++r) to[r] = reinterpret_cast<char*>(terms + r * mine);
      return Expect(bytes, [&](size_t) { return mine * sizeof(T); });
    });
    then_ = [=] {
      T* const sums = values + begin(own);
      std::copy(terms, terms + mine, sums);
      for (size_t r = 1; r < ranks; ++r) {
        for (size_t i = 0; i < mine; ++i) sums[i] += terms[r * mine + i];
      }
      if (few) return;
      Call share = call;
      share.kind = Kind::kShare;
      Begin(share, std::vector<Part>(ranks, part(own)),
            [=](const std::vector<uint64_t>& bytes, char** to) {
              for (size_t r = 0; r < ranks; ++r) to[r] = reinterpret_cast<char*>(values + begin(r));
              return Expect(bytes, [&](size_t r) { return part(r).bytes; });
            });
    };
  }

  // Continues what has begun. Returns whether it has ended, successfully or not (`failure`);
  // without `may_sleep` it returns false as soon as others have kept it waiting for a moment.
  bool Advance(bool may_sleep) {
    while (under_way_) {
      if (!Move(may_sleep)) return false;
      under_way_ = false;
      if (failed_.empty() && then_) std::exchange(then_, nullptr)();  // may begin another exchange
    }
    return true;
  }

  // Compares `call` with the other ranks' and sends no data: an exchange, which `Advance` ends.
  void BeginCheck(const Call& call) {
    BeginAlltoallv(call, std::vector<Part>(peers_.size()),
                   [this](const std::vector<uint64_t>&) { return &nothing_; });
  }

  // Why the channel has failed, or "".
  const std::string& failure() const { return failed_; }

  // Fails the channel because of what its owner has found, between exchanges.
  void GiveUp(const std::string& cause, const std::string& where) {
    if (failed_.empty()) Fail(cause, where);
  }

  // Reads the others' notices, between exchanges. Returns why one is lost, or "".
  std::string Hear() {
    std::string why;
    for (int r = 0; r < size() && why.empty(); ++r) {
      if (r != rank_) PeekFrame(r, &why);
    }
    return why;
  }

  // Notifies the others, between exchanges, that this rank waits in a collective of this number.
  void TellWaiting(uint64_t number) {
    for (int r = 0; r < size(); ++r) Tell(r, Frame::Notice(Kind::kWaiting, number, ""));
  }

  // The ranks of `call` that haven't sent notice that they wait in it; for those that have begun
  // another exchange, which one.
  std::string AbsentFrom(uint64_t number, const Call& call) {
    std::string text, why;
    for (int r = 0; r < size(); ++r) {
      if (r == rank_ || !call.Has(r)) continue;
      Peer& peer = *peers_[r];
      const bool is_elsewhere = PeekFrame(r, &why);
      if (!is_elsewhere && peer.waits_in == number) continue;
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(r);
      if (is_elsewhere) text += ", which is in " + peer.got.Text() + ",";
    }
    return text;
  }

  // What fails the collective in progress, and later ones; for any thread.
  Abort& abort() { return abort_; }

 private:
  using Place = std::function<std::string(const std::vector<uint64_t>& bytes, char** to)>;

  struct Peer {
    Socket socket;
    // Received and not yet used; may be the beginning of the next frame.
    std::array<char, 16 << 10> inbox;
    size_t inbox_begin = 0, inbox_end = 0;
    Frame sent, got;
    size_t unsent = 0;  // bytes, of frame and data together
    bool has_frame = false;
    uint64_t missing = 0;  // bytes of data
    char* to = nullptr;
    uint64_t waits_in = UINT64_MAX;  // as its last notice said
  };

  char* Scratch(size_t bytes) {
    if (bytes > scratch_bytes_) {
      scratch_.reset(new char[bytes]);
      scratch_bytes_ = bytes;
    }
    return scratch_.get();
  }

  template <class Expected>
  std::string Expect(const std::vector<uint64_t>& bytes, const Expected& expected) const {
    for (size_t r = 0; r < bytes.size(); ++r) {
      if (bytes[r] != expected(r)) {
        return "rank " + std::to_string(r) + " sent " + std::to_string(bytes[r]) +
               " bytes instead of " + std::to_string(expected(r));
      }
    }
    return "";
  }

  // `place` takes the sizes by rank and returns where the data of each go, or why they can't.
  void Begin(const Call& call, std::vector<Part> parts, Place place) {
    under_way_ = true;
    placed_ = false;
    parts_ = std::move(parts);
    place_ = std::move(place);
    here_ = Frame(call, sequence_++);
    moved_ = Clock::now();
    for (int r = 0; r < size(); ++r) {
      Peer& peer = *peers_[r];
      peer.sent = peer.got = here_;
      const bool is_peer = r != rank_ && call.Has(r);
      peer.sent.bytes = peer.got.bytes = parts_[r].bytes;
      peer.has_frame = !is_peer;
      peer.missing = 0;
      peer.unsent = is_peer ? sizeof(Frame) + parts_[r].bytes : 0;
    }
  }

  // Continues an exchange; returns whether it has ended.
  bool Move(bool may_sleep) {
    while (failed_.empty()) {
      bool progress = false, ended = true;
      for (int r = 0; r < size(); ++r) {
        if (r == rank_) continue;
        Peer& peer = *peers_[r];
        std::string why;
        if (peer.unsent > 0) why = Send(r, parts_[r], &progress);
        if (why.empty() && (!peer.has_frame || (placed_ && peer.missing > 0))) {
          why = peer.has_frame ? ReceiveData(r, &progress) : ReceiveFrame(r, &progress);
        }
        if (!why.empty()) return Fail(why, Here());
        if (peer.unsent > 0 || !peer.has_frame || peer.missing > 0) ended = false;
      }
      if (!placed_ && AllFrames()) {
        const std::string why = PlaceData();
        if (!why.empty()) return Fail(why, Here());
        placed_ = true;
        continue;  // small data are in the inboxes already
      }
      if (ended && placed_) return true;
      if (const std::string why = abort_.Because(); !why.empty()) return Fail(why, "");
      const Clock::time_point now = Clock::now();
      if (progress) {
        moved_ = now;
      } else if (now - moved_ < kLook) {
        sched_yield();
      } else if (!may_sleep) {
        return false;
      } else if (patience_.count() > 0 && now - moved_ >= patience_) {
        return Fail("timed out: " + Awaited() + " did not come within " +
                        std::to_string(patience_.count() / 1000) + " s",
                    " to " + here_.Text());
      } else {
        Sleep();
      }
    }
    return true;
  }

  bool AllFrames() const {
    return std::all_of(peers_.begin(), peers_.end(), [](const auto& p) { return p->has_frame; });
  }

  std::string PlaceData() {
    std::vector<uint64_t> bytes(peers_.size());
    std::vector<char*> to(peers_.size());
    for (size_t r = 0; r < peers_.size(); ++r) bytes[r] = peers_[r]->got.bytes;
    const std::string why = place_(bytes, to.data());
    if (!why.empty()) return why;
    for (size_t r = 0; r < peers_.size(); ++r) {
      peers_[r]->to = to[r];
      peers_[r]->missing = static_cast<int>(r) == rank_ ? 0 : bytes[r];
    }
    const Part& own = parts_[rank_];
    if (own.bytes > 0 && to[rank_] != own.data) std::memcpy(to[rank_], own.data, own.bytes);
    return "";
  }

  std::string Send(int to, const Part& part, bool* progress) {
    Peer& peer = *peers_[to];
    const size_t all = sizeof(Frame) + part.bytes, done = all - peer.unsent;
    const size_t of_frame = std::min(done, sizeof(Frame)), of_data = done - of_frame;
    iovec pieces[] = {{reinterpret_cast<char*>(&peer.sent) + of_frame, sizeof(Frame) - of_frame},
                      {const_cast<char*>(part.data) + of_data, part.bytes - of_data}};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = 2;
    const ssize_t sent = sendmsg(peer.socket.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return IsLater() ? "" : Blame(to);
    peer.unsent -= static_cast<size_t>(sent);
    *progress = true;
    return "";
  }

  std::string ReceiveFrame(int from, bool* progress) {
    Peer& peer = *peers_[from];
    std::string why;
    const size_t before = peer.inbox_end - peer.inbox_begin;
    peer.has_frame = PeekFrame(from, &why);
    *progress |= peer.has_frame || peer.inbox_end - peer.inbox_begin != before;
    if (!peer.has_frame) return why;
    peer.inbox_begin += sizeof(Frame);
    if (peer.got.Matches(peer.sent)) return "";
    return "rank " + std::to_string(from) + " is in " + peer.got.Text();
  }

  // Reads until the inbox begins with the frame of an exchange, and takes the notices before it.
  // Returns whether it does; `why` describes a lost peer, or one that gives up.
  bool PeekFrame(int from, std::string* why) {
    Peer& peer = *peers_[from];
    while (true) {
      const size_t kept = peer.inbox_end - peer.inbox_begin;
      if (kept < sizeof(Frame)) {
        std::memmove(peer.inbox.data(), peer.inbox.data() + peer.inbox_begin, kept);
        peer.inbox_begin = 0;
        peer.inbox_end = kept;
        const ssize_t got = recv(peer.socket.fd(), peer.inbox.data() + kept,
                                 peer.inbox.size() - kept, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && !IsLater())) *why = Lost(from);
        if (got <= 0) return false;
        peer.inbox_end += static_cast<size_t>(got);
        continue;
      }
      std::memcpy(&peer.got, peer.inbox.data() + peer.inbox_begin, sizeof(Frame));
      if (peer.got.kind == Kind::kGone) {
        *why = peer.got.Name();
        return false;
      }
      if (peer.got.kind != Kind::kWaiting) return true;
      peer.waits_in = peer.got.sequence;
      peer.inbox_begin += sizeof(Frame);
    }
  }

  std::string ReceiveData(int from, bool* progress) {
    Peer& peer = *peers_[from];
    const size_t kept = std::min<size_t>(peer.inbox_end - peer.inbox_begin, peer.missing);
    if (kept > 0) {
      std::memcpy(peer.to, peer.inbox.data() + peer.inbox_begin, kept);
      peer.inbox_begin += kept;
      return Took(&peer, kept, progress);
    }
    const ssize_t got = recv(peer.socket.fd(), peer.to, peer.missing, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && !IsLater())) return Blame(from);
    return got < 0 ? "" : Took(&peer, static_cast<size_t>(got), progress);
  }

  // Finds which rank's loss broke the connection with `lost`, which itself may have failed because
  // of another: polls those that are between frames for a moment.
  std::string Blame(int lost) {
    const Clock::time_point until = Clock::now() + kAsk;
    while (true) {
      for (int r = 0; r < size(); ++r) {
        const Peer& peer = *peers_[r];
        const bool amid_data =
            under_way_ && peer.has_frame && (placed_ ? peer.missing : peer.got.bytes) > 0;
        std::string why;
        if (r != rank_ && !amid_data) PeekFrame(r, &why);
        if (!why.empty()) return why;
      }
      if (Clock::now() >= until) return Lost(lost);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  static std::string Took(Peer* peer, size_t bytes, bool* progress) {
    peer->to += bytes;
    peer->missing -= bytes;
    *progress = true;
    return "";
  }

  // Sleeps until data can be received from or sent to a peer, a thread aborts, or patience ends.
  void Sleep() {
    waits_.assign(1, {abort_.fd(), POLLIN, 0});
    for (const auto& peer : peers_) {
      int16_t events = 0;
      if (peer->unsent > 0) events |= POLLOUT;
      if (!peer->has_frame || (placed_ && peer->missing > 0)) events |= POLLIN;
      if (events != 0) waits_.push_back({peer->socket.fd(), events, 0});
    }
    const bool forever = patience_.count() == 0;
    const Clock::time_point patient = forever ? Clock::time_point::max() : moved_ + patience_;
    poll(waits_.data(), waits_.size(), UntilDeadline(std::min(patient, abort_.at())));
    abort_.Reset();
  }

  static bool IsLater() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

  static std::string Lost(int rank) { return "connection closed by rank " + std::to_string(rank); }

  // The ranks whose frame is missing, or else whose data are.
  std::string Awaited() const {
    std::string text;
    const bool frames = AllFrames();
    for (int r = 0; r < size(); ++r) {
      const Peer& peer = *peers_[r];
      if (frames ? peer.missing > 0 || peer.unsent > 0 : !peer.has_frame) {
        text += (text.empty() ? "rank " : ", rank ") + std::to_string(r);
      }
    }
    return text;
  }

  std::string Here() const {
    return ", while rank " + std::to_string(rank_) + " is in " + here_.Text();
  }

  void Tell(int to, const Frame& notice) {
    const Peer& peer = *peers_[to];
    const bool amid = peer.unsent > 0 && peer.unsent < sizeof(Frame) + parts_[to].bytes;
    if (to == rank_ || amid || !peer.socket) return;
    SendAll(peer.socket.fd(), &notice, sizeof notice, Clock::now() + kAsk);
  }

  // Ends sending rather than closing, so that what is on its way, such as the frame that names this
  // rank's collective, still arrives.
  bool Fail(const std::string& cause, const std::string& where) {
    failed_ = cause + where;
    for (int r = 0; r < size(); ++r) {
      if (!peers_[r]->socket) continue;
      Tell(r, Frame::Notice(Kind::kGone, sequence_, cause));
      shutdown(peers_[r]->socket.fd(), SHUT_WR);
    }
    return true;
  }

  const int rank_;
  const milliseconds patience_;
  std::vector<std::unique_ptr<Peer>> peers_;
  uint64_t sequence_ = 0;
  std::string failed_;  // of the thread that is in a collective
  // The exchange in progress.
  bool under_way_ = false, placed_ = false;
  Frame here_;
  std::vector<Part> parts_;
  Place place_;
  std::function<void()> then_;  // what follows it in the same collective
  Clock::time_point moved_;     // when bytes last moved
  std::unique_ptr<char[]> scratch_;
  size_t scratch_bytes_ = 0;
  std::vector<pollfd> waits_;
  Abort abort_;
  char nothing_ = 0;
};

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_CHANNEL_H_
