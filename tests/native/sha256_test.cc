#include "ops/common/sha256.h"

#include <string>
#include <string_view>

#include "tests/native/check.h"

namespace {

using gmeta::HexSha256;

std::string Hex(const gmeta::Sha256Digest& digest) {
  std::string hex;
  for (const unsigned char byte : digest) {
    for (const int digit : {byte >> 4, byte & 15}) hex += "0123456789abcdef"[digit];
  }
  return hex;
}

void TestDigestsAreThoseOfTheStandard() {
  CHECK_EQ(HexSha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(HexSha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(HexSha256(std::string(1000000, 'a')),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // hashlib.sha256(bytes(range(256)) * 4) up to lengths around those where a block is full.
  const std::pair<size_t, const char*> expected[] = {
      {55, "463eb28e72f82e0a96c0a4cc53690c571281131f672aa229e0d45ae59b598b59"},
      {56, "da2ae4d6b36748f2a318f23e7ab1dfdf45acdc9d049bd80e59de82a60895f562"},
      {63, "29af2686fd53374a36b0846694cc342177e428d1647515f078784d69cdb9e488"},
      {64, "fdeab9acf3710362bd2658cdc9a29e8f9c757fcf9811603a8c447cd1d9151108"},
      {65, "4bfd2c8b6f1eec7a2afeb48b934ee4b2694182027e6d0fc075074f2fabb31781"},
      {119, "da18797ed7c3a777f0847f429724a2d8cd5138e6ed2895c3fa1a6d39d18f7ec6"},
      {120, "f52b23db1fbb6ded89ef42a23ce0c8922c45f25c50b568a93bf1c075420bbb7c"},
      {1024, "785b0751fc2c53dc14a4ce3d800e69ef9ce1009eb327ccf458afe09c242c26c9"}};
  std::string bytes;
  for (int i = 0; i < 1024; ++i) bytes += static_cast<char>(i);
  for (const auto& [size, hex] : expected) CHECK_EQ(HexSha256(bytes.substr(0, size)), hex);
}

void TestPartsGiveTheDigestOfTheWhole() {
  const std::string text(300, 'x');
  for (size_t step : {1, 7, 63, 64, 65, 129}) {
    gmeta::Sha256 hash;
    for (size_t at = 0; at < text.size(); at += step) {
      hash.Update(std::string_view(text).substr(at, step));
    }
    CHECK_EQ(Hex(hash.Finish()), HexSha256(text));
  }
}

// RFC 4231, cases 2, 3 and 6.
void TestProofsAreThoseOfTheStandard() {
  CHECK_EQ(Hex(gmeta::HmacSha256("Jefe", "what do ya want for nothing?")),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(Hex(gmeta::HmacSha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK_EQ(Hex(gmeta::HmacSha256(std::string(131, '\xaa'),
                                 "Test Using Larger Than Block-Size Key - Hash Key First")),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

}  // namespace

int main() {
  TestDigestsAreThoseOfTheStandard();
  TestPartsGiveTheDigestOfTheWhole();
  TestProofsAreThoseOfTheStandard();
}
