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

  std::string Text() const {
    const bool v6 = host.find(':') != std::string::npos;
    return (v6 ? "[" + host + "]:" : host + ":") + std::to_string(port);
  }
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

// The addresses, of IPv4 and IPv6, of an address or of a host's name.
class Resolved {
 public:
  explicit Resolved(const Address& address) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    const std::string port = std::to_string(address.port);
    const int failed = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &list_);
    if (failed != 0) why_ = "no address of host '" + address.host + "': " + gai_strerror(failed);
  }
  Resolved(const Resolved&) = delete;
  Resolved& operator=(const Resolved&) = delete;
  ~Resolved() {
    if (list_ != nullptr) freeaddrinfo(list_);
  }

  // Returns "" for the first address with which `attempt` returns "", else why the last one failed.
  template <class Attempt>
  std::string Try(const Attempt& attempt) const {
    std::string why = why_;
    for (const addrinfo* one = list_; one != nullptr; one = one->ai_next) {
      why = attempt(*one);
      if (why.empty()) break;
    }
    return why;
  }

 private:
  addrinfo* list_ = nullptr;
  std::string why_;
};

inline Socket MakeSocket(const addrinfo& place) {
  return Socket(socket(place.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Listens at `address`, and stores the port that it got there if that was 0. "::" is all addresses,
// including those of IPv4.
inline std::string Listen(Address* address, Socket* listener) {
  return Resolved(*address).Try([&](const addrinfo& place) -> std::string {
    Socket made = MakeSocket(place);
    if (!made) return Reason("no socket");
    const int off = 0;
    if (place.ai_family == AF_INET6) {
      setsockopt(made.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    if (bind(made.fd(), place.ai_addr, place.ai_addrlen) != 0 ||
        listen(made.fd(), SOMAXCONN) != 0 ||
        getsockname(made.fd(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
      return Reason("can't listen at " + address->Text());
    }
    // The port lies in the same place in both families' addresses.
    address->port = ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
    *listener = std::move(made);
    return "";
  });
}

inline std::string Connect(const Address& address, Clock::time_point deadline, Socket* connected) {
  return Resolved(address).Try([&](const addrinfo& place) -> std::string {
    Socket made = MakeSocket(place);
    if (!made) return Reason("no socket");
    if (connect(made.fd(), place.ai_addr, place.ai_addrlen) != 0) {
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
  });
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
