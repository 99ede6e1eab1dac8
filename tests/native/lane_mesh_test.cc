// How ranks connect: who proves to know the lane's key gets in, and nobody else.

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ops/lane/mesh.h"
#include "tests/native/check.h"

namespace {

using gmeta::lane::Address;
using gmeta::lane::Listen;
using gmeta::lane::Mesh;
using gmeta::lane::Socket;
using std::chrono::milliseconds;

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void TestRanksConnectOverIpv6() {
  std::vector<Address> addresses(2, Address{"::1", 0});
  Socket listeners[2];
  if (!Listen(&addresses[0], &listeners[0]).empty()) return;  // there is no IPv6 here
  CHECK_EQ(Listen(&addresses[1], &listeners[1]), "");
  std::thread rank1([&] {
    Mesh mesh;
    CHECK_EQ(mesh.Make(listeners[1], 1, addresses, "secret", milliseconds(30000)), "");
  });
  Mesh mesh;
  CHECK_EQ(mesh.Make(listeners[0], 0, addresses, "secret", milliseconds(30000)), "");
  rank1.join();
  Address all{"::", 0};
  CHECK_EQ(Listen(&all, &listeners[0]), "");
  Socket met;
  const auto deadline = gmeta::lane::Clock::now() + milliseconds(30000);
  CHECK_EQ(gmeta::lane::Connect({"127.0.0.1", all.port}, deadline, &met), "");
}

// A rank whose greeting the test speaks itself.
struct Greeting {
  Socket socket;
  gmeta::lane::Hello own, theirs;
  std::string why;

  // Connects and takes the Hello of the other side.
  Greeting(const Address& to, const gmeta::lane::Hello& hello) : own(hello) {
    why = gmeta::lane::Connect(to, Deadline(), &socket);
    if (why.empty()) why = gmeta::lane::SendAll(socket.fd(), &own, sizeof own, Deadline());
    if (why.empty()) {
      why = gmeta::lane::ReceiveAll(socket.fd(), &theirs, sizeof theirs, Deadline());
    }
  }

  // Sends a proof; whether the other side took it.
  bool Prove(const gmeta::Sha256Digest& proof) {
    gmeta::Sha256Digest answer;
    why = gmeta::lane::SendAll(socket.fd(), proof.data(), proof.size(), Deadline());
    if (why.empty()) {
      why = gmeta::lane::ReceiveAll(socket.fd(), answer.data(), answer.size(), Deadline());
    }
    return why.empty();
  }

  static gmeta::lane::Clock::time_point Deadline() {
    return gmeta::lane::Clock::now() + milliseconds(30000);
  }
};

gmeta::lane::Hello HelloOf(uint32_t rank, uint32_t size) {
  gmeta::lane::Hello hello;
  hello.rank = rank;
  hello.size = size;
  CHECK(hello.Draw());
  return hello;
}

// Rank 0 of two listens, and is called by whoever `work` lets call; rank 1 comes in the end.
void CallRankZero(const std::function<void(const Address&)>& work) {
  Socket listeners[2];
  std::vector<Address> addresses(2, Address{"127.0.0.1", 0});
  for (int r = 0; r < 2; ++r) CHECK_EQ(Listen(&addresses[r], &listeners[r]), "");
  std::thread rank0([&] {
    Mesh mesh;
    CHECK_EQ(mesh.Make(listeners[0], 0, addresses, "secret", milliseconds(30000)), "");
  });
  work(addresses[0]);
  Mesh mesh;
  CHECK_EQ(mesh.Make(listeners[1], 1, addresses, "secret", milliseconds(30000)), "");
  rank0.join();
}

void TestStrangersAreRefusedAndKeepNobodyWaiting() {
  std::vector<Socket> silent;
  CallRankZero([&](const Address& to) {
    for (size_t i = 0; i < Mesh::kMostCallers + 20; ++i) {
      silent.emplace_back();
      CHECK_EQ(gmeta::lane::Connect(to, Greeting::Deadline(), &silent.back()), "");
    }
    Socket loud;
    CHECK_EQ(gmeta::lane::Connect(to, Greeting::Deadline(), &loud), "");
    const std::string request(200, 'G');
    CHECK_EQ(gmeta::lane::SendAll(loud.fd(), request.data(), request.size(), Greeting::Deadline()),
             "");
    Socket spare;
    std::vector<Address> addresses{to, Address{"127.0.0.1", 0}};
    CHECK_EQ(Listen(&addresses[1], &spare), "");
    Mesh spy;
    CHECK(Contains(spy.Make(spare, 1, addresses, "guessed", milliseconds(30000)),
                   "no connection to rank 0: connection closed after the greeting: it may have "
                   "another secret"));
    // Another version, another size of the job, and ranks that nobody waits for.
    for (int i = 0; i < 4; ++i) {
      gmeta::lane::Hello hello = HelloOf(i == 1 ? 0 : i == 2 ? 2 : 1, i == 3 ? 3 : 2);
      if (i == 0) hello.magic[7] = '1';
      CHECK_EQ(Greeting(to, hello).why, "connection closed");
    }
  });
}

void TestACapturedGreetingIsWorthNothing() {
  // What a rank said in another greeting of the same job, word for word.
  const gmeta::lane::Hello said = HelloOf(1, 2);
  gmeta::Sha256Digest proof;
  CallRankZero([&](const Address& to) {
    Greeting first(to, said);
    CHECK_EQ(first.why, "");
    proof = gmeta::lane::Prove("secret", "caller", said, first.theirs);
    Greeting again(to, said);
    CHECK(std::memcmp(first.theirs.nonce, again.theirs.nonce, sizeof said.nonce) != 0);
    CHECK(!again.Prove(proof));
    // Nor is the called side's proof taken for the caller's.
    Greeting third(to, said);
    CHECK(!third.Prove(gmeta::lane::Prove("secret", "called", said, third.theirs)));
  });
}

// A stranger has the address of a rank that is gone. It sends back what it hears, or hands it on to
// another rank, which answers truly.
void TestWhoOnlyRepeatsWhatItHearsIsRefused() {
  for (const bool relays : {false, true}) {
    Socket listeners[2];
    std::vector<Address> addresses(3, Address{"127.0.0.1", 0});
    CHECK_EQ(Listen(&addresses[0], &listeners[0]), "");
    CHECK_EQ(Listen(&addresses[2], &listeners[1]), "");
    std::thread stranger([&] {
      CHECK(gmeta::lane::WaitFor(listeners[0].fd(), POLLIN, Greeting::Deadline()));
      Socket came(accept4(listeners[0].fd(), nullptr, nullptr, SOCK_NONBLOCK));
      gmeta::lane::Hello hello;
      CHECK_EQ(gmeta::lane::ReceiveAll(came.fd(), &hello, sizeof hello, Greeting::Deadline()), "");
      hello.rank = 0;
      if (relays) hello = HelloOf(1, 3);
      CHECK_EQ(gmeta::lane::SendAll(came.fd(), &hello, sizeof hello, Greeting::Deadline()), "");
      char proof[32];
      const std::string why =
          gmeta::lane::ReceiveAll(came.fd(), proof, sizeof proof, Greeting::Deadline());
      CHECK_EQ(why.empty(), !relays);  // who isn't rank 0 gets no proof at all
      if (relays) return;
      CHECK_EQ(gmeta::lane::SendAll(came.fd(), proof, sizeof proof, Greeting::Deadline()), "");
    });
    Mesh mesh;
    const std::string why = mesh.Make(listeners[1], 2, addresses, "secret", milliseconds(30000));
    CHECK(Contains(why, "no connection to rank 0: who answers at 127.0.0.1:"));
    CHECK(Contains(why, "isn't this job's rank 0"));
    stranger.join();
  }
}

void TestARankThatDoesNotConnectIsNamed() {
  Socket listener;
  std::vector<Address> addresses(3, Address{"127.0.0.1", 0});
  CHECK_EQ(Listen(&addresses[0], &listener), "");
  Mesh mesh;
  CHECK_EQ(mesh.Make(listener, 0, addresses, "secret", milliseconds(50)),
           "timed out: rank 1, rank 2 did not connect");
}

}  // namespace

int main() {
  TestRanksConnectOverIpv6();
  TestStrangersAreRefusedAndKeepNobodyWaiting();
  TestACapturedGreetingIsWorthNothing();
  TestWhoOnlyRepeatsWhatItHearsIsRefused();
  TestARankThatDoesNotConnectIsNamed();
}
