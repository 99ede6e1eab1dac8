// Connects every rank of a job with every other: rank r connects to the ranks below it and accepts
// those above it, so two ranks share exactly one connection.
//
// Both ends begin with a Hello: a version, a rank, and the job's token, which only its ranks know.
// Whoever says anything else is a stranger, is closed, and keeps nobody waiting, because all who
// have connected and not yet spoken are awaited together. Ranks wait only for answers of lower
// ones, and rank 0 for nobody's, so they can't wait in a circle.

#ifndef GMETA_OPS_LANE_MESH_H_
#define GMETA_OPS_LANE_MESH_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ops/lane/socket.h"

namespace gmeta::lane {

constexpr size_t kTokenBytes = 64;

struct Hello {
  char magic[8] = {'g', 'm', 'l', 'a', 'n', 'e', '0', '1'};  // ends in the version
  uint32_t rank = 0, size = 0;
  char token[kTokenBytes] = {};

  // Compares all bytes, however many agree, so its time tells nothing about the token.
  bool IsOfJob(const Hello& own) const {
    uint32_t differs = size ^ own.size;
    for (size_t i = 0; i < sizeof magic; ++i) differs |= magic[i] ^ own.magic[i];
    for (size_t i = 0; i < kTokenBytes; ++i) differs |= token[i] ^ own.token[i];
    return differs == 0;
  }
};
static_assert(sizeof(Hello) == 80);

// The job's connections as one rank has them.
class Mesh {
 public:
  // Makes the connections, `addresses` being those of all ranks. Returns why it failed, or "".
  std::string Make(const Socket& listener, int rank, const std::vector<Address>& addresses,
                   const std::string& token, milliseconds patience) {
    const int size = static_cast<int>(addresses.size());
    const Clock::time_point deadline = Clock::now() + patience;
    own_.rank = static_cast<uint32_t>(rank);
    own_.size = static_cast<uint32_t>(size);
    std::memcpy(own_.token, token.data(), std::min(token.size(), kTokenBytes));
    peers_.resize(addresses.size());
    for (int to = 0; to < rank; ++to) {
      const std::string why = Greet(to, addresses[to], deadline);
      if (!why.empty()) return "no connection to rank " + std::to_string(to) + ": " + why;
    }
    return Accept(listener, size - 1 - rank, deadline);
  }

  // By rank; this rank's own is none.
  std::vector<Socket> Take() { return std::move(peers_); }

 private:
  std::string Greet(int to, const Address& address, Clock::time_point deadline) {
    Socket made;
    Hello theirs;
    std::string why = Connect(address, deadline, &made);
    if (why.empty()) why = SendAll(made.fd(), &own_, sizeof own_, deadline);
    if (why.empty()) why = ReceiveAll(made.fd(), &theirs, sizeof theirs, deadline);
    if (!why.empty()) return why;
    if (!theirs.IsOfJob(own_) || theirs.rank != static_cast<uint32_t>(to)) {
      return "who answers at " + address.Text() + " isn't this job's rank " + std::to_string(to);
    }
    peers_[to] = std::move(made);
    return "";
  }

  std::string Accept(const Socket& listener, int missing, Clock::time_point deadline) {
    struct Silent {
      Socket socket;
      Hello said;
      size_t bytes = 0;
    };
    std::vector<Silent> silent;
    while (missing > 0) {
      std::vector<pollfd> waits{{listener.fd(), POLLIN, 0}};
      for (const Silent& one : silent) waits.push_back({one.socket.fd(), POLLIN, 0});
      if (Clock::now() >= deadline) return "timed out: " + Missing() + " did not connect";
      if (poll(waits.data(), waits.size(), UntilDeadline(deadline)) <= 0) continue;
      for (size_t i = silent.size(); i-- > 0;) {
        if (waits[i + 1].revents == 0) continue;
        Silent& one = silent[i];
        const ssize_t got = recv(one.socket.fd(), reinterpret_cast<char*>(&one.said) + one.bytes,
                                 sizeof one.said - one.bytes, 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        one.bytes += got > 0 ? static_cast<size_t>(got) : 0;
        if (got > 0 && one.bytes < sizeof one.said) continue;
        if (got > 0 && Welcome(one.said, &one.socket, deadline)) --missing;
        silent.erase(silent.begin() + static_cast<ptrdiff_t>(i));
      }
      if (waits[0].revents != 0) {
        Socket came(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (came) silent.push_back({std::move(came), {}, 0});
      }
    }
    return "";
  }

  bool Welcome(const Hello& said, Socket* socket, Clock::time_point deadline) {
    if (!said.IsOfJob(own_) || said.rank <= own_.rank || said.rank >= own_.size) return false;
    if (peers_[said.rank]) return false;
    SendAtOnce(socket->fd());
    if (!SendAll(socket->fd(), &own_, sizeof own_, deadline).empty()) return false;
    peers_[said.rank] = std::move(*socket);
    return true;
  }

  std::string Missing() const {
    std::string names;
    for (uint32_t rank = own_.rank + 1; rank < own_.size; ++rank) {
      if (!peers_[rank]) names += (names.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
    return names;
  }

  Hello own_;
  std::vector<Socket> peers_;
};

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_MESH_H_
