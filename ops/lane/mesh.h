// Connects every rank of a job with every other: rank r connects to the ranks below it and accepts
// those above it, so two ranks share exactly one connection.
//
// Both prove that they know the lane's key, which is never sent
// (gmeta/core/collectives/wire.py does the same between other processes of a job):
//
//     caller -> called    a Hello: a version, a rank, and a nonce
//     called -> caller    its own
//     caller -> called    HMAC-SHA256 of "caller" and both Hellos under the key
//     called -> caller    HMAC-SHA256 of "called" and both Hellos
//
// The nonces are new in each greeting, so a captured greeting can't be reused; the proofs
// cover both ranks and differ in their roles, so none can be sent back or on to another rank. What
// follows on the connection is neither encrypted nor signed: it travels as fast as the wire.
//
// A caller that sends anything else, or nothing for `kGreeting`, is a stranger: its connection is
// closed. It delays no rank, because all callers are served together, `kMostCallers` at a time.
// Ranks wait only for answers of lower ranks, and rank 0 for none, so they can't wait in a circle.

#ifndef GMETA_OPS_LANE_MESH_H_
#define GMETA_OPS_LANE_MESH_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/common/sha256.h"
#include "ops/lane/socket.h"

namespace gmeta::lane {

struct Hello {
  char magic[8] = {'g', 'm', 'l', 'a', 'n', 'e', '0', '2'};  // ends in the version
  uint32_t rank = 0, size = 0;
  unsigned char nonce[32] = {};

  // Makes a nonce; whether there is one.
  bool Draw() { return getentropy(nonce, sizeof nonce) == 0; }

  bool IsOf(uint32_t ranks) const {
    return std::memcmp(magic, Hello().magic, sizeof magic) == 0 && size == ranks;
  }
};
static_assert(sizeof(Hello) == 48, "it is sent as it is");

// The proof of one side that it knows the key, and has seen both Hellos.
inline Sha256Digest Prove(const std::string& key, std::string_view role, const Hello& caller,
                          const Hello& called) {
  std::string message(role);
  message.append(reinterpret_cast<const char*>(&caller), sizeof caller);
  message.append(reinterpret_cast<const char*>(&called), sizeof called);
  return HmacSha256(key, message);
}

// Compares all bytes, however many agree, so its time reveals nothing.
inline bool IsSame(const Sha256Digest& one, const Sha256Digest& other) {
  unsigned char differs = 0;
  for (size_t i = 0; i < one.size(); ++i) differs |= one[i] ^ other[i];
  return differs == 0;
}

// The job's connections as one rank has them.
class Mesh {
 public:
  static constexpr milliseconds kGreeting{30000};  // for a caller's greeting
  static constexpr size_t kMostCallers = 256;      // at a time, besides this job's ranks

  // Makes the connections, `addresses` being those of all ranks. Returns why it failed, or "".
  std::string Make(const Socket& listener, int rank, const std::vector<Address>& addresses,
                   const std::string& key, milliseconds patience) {
    const Clock::time_point deadline = Clock::now() + patience;
    key_ = key;
    rank_ = static_cast<uint32_t>(rank);
    size_ = static_cast<uint32_t>(addresses.size());
    peers_.resize(addresses.size());
    for (int to = 0; to < rank; ++to) {
      const std::string why = Greet(to, addresses[to], deadline);
      if (!why.empty()) return "no connection to rank " + std::to_string(to) + ": " + why;
    }
    return Accept(listener, size_ - 1 - rank_, deadline);
  }

  // By rank; this rank's own is none.
  std::vector<Socket> Take() { return std::move(peers_); }

 private:
  // A caller that has connected, and what it has sent so far: a Hello, then its proof.
  struct Caller {
    Socket socket;
    Clock::time_point until;
    Hello own = {}, said = {};
    Sha256Digest proof = {};
    bool greeted = false;
    size_t bytes = 0;
  };

  std::string Greet(int to, const Address& address, Clock::time_point deadline) {
    Socket made;
    Hello own = NewHello(), theirs;
    Sha256Digest proof;
    std::string why = own.Draw() ? Connect(address, deadline, &made) : Reason("no nonce");
    if (why.empty()) why = SendAll(made.fd(), &own, sizeof own, deadline);
    if (why.empty()) why = ReceiveAll(made.fd(), &theirs, sizeof theirs, deadline);
    if (!why.empty()) return why;
    const std::string stranger = "who answers at " + address.Text() + " isn't this job's rank ";
    if (!theirs.IsOf(size_) || theirs.rank != static_cast<uint32_t>(to)) {
      return stranger + std::to_string(to);
    }
    const Sha256Digest ours = Prove(key_, "caller", own, theirs);
    why = SendAll(made.fd(), ours.data(), ours.size(), deadline);
    if (why.empty()) why = ReceiveAll(made.fd(), proof.data(), proof.size(), deadline);
    if (!why.empty()) return why + " after the greeting: it may have another secret";
    if (!IsSame(proof, Prove(key_, "called", own, theirs))) return stranger + std::to_string(to);
    peers_[to] = std::move(made);
    return "";
  }

  std::string Accept(const Socket& listener, uint32_t missing, Clock::time_point deadline) {
    std::vector<Caller> callers;
    while (missing > 0) {
      const Clock::time_point now = Clock::now();
      if (now >= deadline) return "timed out: " + Missing() + " did not connect";
      const auto is_late = [now](const Caller& one) { return one.until <= now; };
      callers.erase(std::remove_if(callers.begin(), callers.end(), is_late), callers.end());
      Clock::time_point next = deadline;
      std::vector<pollfd> waits{{listener.fd(), POLLIN, 0}};
      for (const Caller& one : callers) {
        next = std::min(next, one.until);
        waits.push_back({one.socket.fd(), POLLIN, 0});
      }
      if (poll(waits.data(), waits.size(), UntilDeadline(next)) <= 0) continue;
      for (size_t i = callers.size(); i-- > 0;) {
        if (waits[i + 1].revents == 0 || Hear(&callers[i])) continue;
        if (Welcome(&callers[i])) --missing;
        callers.erase(callers.begin() + static_cast<ptrdiff_t>(i));
      }
      if (waits[0].revents == 0) continue;
      Socket came(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!came) continue;
      if (callers.size() == kMostCallers + size_) callers.erase(callers.begin());
      callers.push_back({std::move(came), Clock::now() + kGreeting});
    }
    return "";
  }

  // Reads what a caller has sent, and answers its Hello; whether more is to come.
  bool Hear(Caller* one) {
    char* const to = one->greeted ? reinterpret_cast<char*>(one->proof.data())
                                  : reinterpret_cast<char*>(&one->said);
    const size_t size = one->greeted ? one->proof.size() : sizeof one->said;
    const ssize_t got = recv(one->socket.fd(), to + one->bytes, size - one->bytes, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (got <= 0) return false;
    one->bytes += static_cast<size_t>(got);
    if (one->bytes < size) return true;
    if (one->greeted) return false;
    one->own = NewHello();
    if (!one->said.IsOf(size_) || !IsAwaited(one->said.rank) || !one->own.Draw()) return false;
    SendAtOnce(one->socket.fd());
    one->bytes = 0;
    one->greeted = SendAll(one->socket.fd(), &one->own, sizeof one->own, one->until).empty();
    return one->greeted;
  }

  // Keeps the connection of a caller that has proved to be a rank; whether it is one.
  bool Welcome(Caller* one) {
    if (!one->greeted || one->bytes < one->proof.size() || !IsAwaited(one->said.rank)) return false;
    if (!IsSame(one->proof, Prove(key_, "caller", one->said, one->own))) return false;
    const Sha256Digest ours = Prove(key_, "called", one->said, one->own);
    if (!SendAll(one->socket.fd(), ours.data(), ours.size(), one->until).empty()) return false;
    peers_[one->said.rank] = std::move(one->socket);
    return true;
  }

  Hello NewHello() const {
    Hello hello;
    hello.rank = rank_;
    hello.size = size_;
    return hello;
  }

  bool IsAwaited(uint32_t rank) const { return rank > rank_ && rank < size_ && !peers_[rank]; }

  std::string Missing() const {
    std::string names;
    for (uint32_t rank = rank_ + 1; rank < size_; ++rank) {
      if (!peers_[rank]) names += (names.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
    return names;
  }

  std::string key_;
  uint32_t rank_ = 0, size_ = 0;
  std::vector<Socket> peers_;
};

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_MESH_H_
