// TCP sockets as the lane uses them: they never block, send small messages at once, and aren't
// inherited by programs that this process starts. A function that can fail returns why, or "".

#ifndef GMETA_OPS_LANE_SOCKET_H_
#define GMETA_OPS_LANE_SOCKET_H_

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace gmeta::lane {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Owns a file descriptor; -1 is none.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

struct Address {
  std::string host;
  int port = 0;

  std::string Text() const { return host + ":" + std::to_string(port); }
};

inline std::string Reason(const std::string& what) { return what + ": " + std::strerror(errno); }

// Milliseconds until a deadline, as poll() takes them: rounded up, at least 0, at most a minute.
inline int UntilDeadline(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count() + 1;
  return left < 0 ? 0 : left > 60000 ? 60000 : static_cast<int>(left);
}

// Waits until a socket can be read (POLLIN) or written (POLLOUT); whether it could before the
// deadline.
inline bool WaitFor(int fd, int16_t events, Clock::time_point deadline) {
  while (Clock::now() < deadline) {
    pollfd one{fd, events, 0};
    if (poll(&one, 1, UntilDeadline(deadline)) > 0) return true;
  }
  return false;
}

inline void SendAtOnce(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// Resolves an IPv4 address or a name of a host.
inline std::string Resolve(const Address& address, sockaddr_in* found) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  const int failed = getaddrinfo(address.host.c_str(), nullptr, &hints, &list);
  if (failed != 0) return "no address of host '" + address.host + "': " + gai_strerror(failed);
  std::memcpy(found, list->ai_addr, sizeof *found);
  found->sin_port = htons(static_cast<uint16_t>(address.port));
  freeaddrinfo(list);
  return "";
}

// Listens at `address`, and puts the port that it got into it if that was 0.
inline std::string Listen(Address* address, Socket* listener) {
  sockaddr_in place;
  if (std::string why = Resolve(*address, &place); !why.empty()) return why;
  Socket made(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made) return Reason("no socket");
  socklen_t size = sizeof place;
  sockaddr* const plain = reinterpret_cast<sockaddr*>(&place);
  if (bind(made.fd(), plain, size) != 0 || listen(made.fd(), SOMAXCONN) != 0 ||
      getsockname(made.fd(), plain, &size) != 0) {
    return Reason("can't listen at " + address->Text());
  }
  address->port = ntohs(place.sin_port);
  *listener = std::move(made);
  return "";
}

inline std::string Connect(const Address& address, Clock::time_point deadline, Socket* connected) {
  sockaddr_in place;
  if (std::string why = Resolve(address, &place); !why.empty()) return why;
  Socket made(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made) return Reason("no socket");
  if (connect(made.fd(), reinterpret_cast<sockaddr*>(&place), sizeof place) != 0) {
    if (errno != EINPROGRESS) return Reason("can't connect to " + address.Text());
    if (!WaitFor(made.fd(), POLLOUT, deadline))
      return address.Text() + " doesn't answer: timed out";
    socklen_t size = sizeof errno;
    getsockopt(made.fd(), SOL_SOCKET, SO_ERROR, &errno, &size);
    if (errno != 0) return Reason("can't connect to " + address.Text());
  }
  SendAtOnce(made.fd());
  *connected = std::move(made);
  return "";
}

// Sends or receives all of `size` bytes; for the few bytes of a handshake.
inline std::string SendAll(int fd, const void* data, size_t size, Clock::time_point deadline) {
  for (const char* at = static_cast<const char*>(data); size > 0;) {
    const ssize_t sent = send(fd, at, size, MSG_NOSIGNAL);
    if (sent > 0) {
      at += sent;
      size -= static_cast<size_t>(sent);
    } else if (errno != EAGAIN && errno != EINTR) {
      return Reason("can't send");
    } else if (!WaitFor(fd, POLLOUT, deadline)) {
      return "timed out";
    }
  }
  return "";
}

inline std::string ReceiveAll(int fd, void* data, size_t size, Clock::time_point deadline) {
  for (char* at = static_cast<char*>(data); size > 0;) {
    const ssize_t got = recv(fd, at, size, 0);
    if (got == 0) return "connection closed";
    if (got > 0) {
      at += got;
      size -= static_cast<size_t>(got);
    } else if (errno != EAGAIN && errno != EINTR) {
      return Reason("can't receive");
    } else if (!WaitFor(fd, POLLIN, deadline)) {
      return "timed out";
    }
  }
  return "";
}

}  // namespace gmeta::lane

#endif  // GMETA_OPS_LANE_SOCKET_H_
