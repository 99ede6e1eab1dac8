// SHA-256 (FIPS 180-4), and HMAC (RFC 2104) with it.
//
// Two uses: the digest of a file that a manifest names, and the proof that two ranks know the same
// secret. A message is cut into blocks of 64 bytes, the last one filled up with a 1 bit, zeros, and
// the length in bits. Eight words of 32 bits go through 64 steps a block. Each step depends on the
// previous one, so a core hashes some 250 MB/s: enough for indexes, which are a hundredth of a
// store's size, and for the few hundred bytes of a greeting.

#ifndef GMETA_OPS_COMMON_SHA256_H_
#define GMETA_OPS_COMMON_SHA256_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace gmeta {

using Sha256Digest = std::array<unsigned char, 32>;

class Sha256 {
 public:
  static constexpr size_t kBlock = 64;

  void Update(std::string_view data) {
    size_ += data.size();
    if (held_ > 0) {
      const size_t taken = std::min(data.size(), kBlock - held_);
      std::memcpy(block_.data() + held_, data.data(), taken);
      data.remove_prefix(taken);
      if ((held_ += taken) < kBlock) return;
      Take(block_.data());
    }
    for (; data.size() >= kBlock; data.remove_prefix(kBlock)) {
      Take(reinterpret_cast<const unsigned char*>(data.data()));
    }
    held_ = data.size();
    if (held_ > 0) std::memcpy(block_.data(), data.data(), held_);
  }

  // Returns the digest of all bytes added; no more may follow.
  Sha256Digest Finish() {
    const uint64_t bits = uint64_t{size_} * 8;
    block_[held_++] = 0x80;
    if (held_ > kBlock - 8) {
      std::memset(block_.data() + held_, 0, kBlock - held_);
      Take(block_.data());
      held_ = 0;
    }
    std::memset(block_.data() + held_, 0, kBlock - 8 - held_);
    for (size_t i = 0; i < 8; ++i) {
      block_[kBlock - 8 + i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
    }
    Take(block_.data());
    Sha256Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<unsigned char>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
  static constexpr uint32_t kRoots[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
      0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
      0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
      0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
      0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
      0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
      0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
      0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
      0xc67178f2};

  static uint32_t Turn(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

  void Take(const unsigned char* block) {
    uint32_t words[64];
    for (size_t i = 0; i < 16; ++i) {
      words[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 |
                 uint32_t{block[4 * i + 2]} << 8 | uint32_t{block[4 * i + 3]};
    }
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t a = words[i - 15], b = words[i - 2];
      words[i] = words[i - 16] + (Turn(a, 7) ^ Turn(a, 18) ^ a >> 3) + words[i - 7] +
                 (Turn(b, 17) ^ Turn(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t one = h + (Turn(e, 6) ^ Turn(e, 11) ^ Turn(e, 25)) + ((e & f) ^ (~e & g)) +
                           kRoots[i] + words[i];
      const uint32_t two = (Turn(a, 2) ^ Turn(a, 13) ^ Turn(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + one;
      d = c;
      c = b;
      b = a;
      a = one + two;
    }
    const uint32_t after[8] = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state_[i] += after[i];
  }

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, kBlock> block_{};
  size_t held_ = 0, size_ = 0;
};

// Returns the digest in hexadecimal, as in manifests.
inline std::string HexSha256(std::string_view data) {
  Sha256 hash;
  hash.Update(data);
  std::string hex;
  for (const unsigned char byte : hash.Finish()) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

inline Sha256Digest HmacSha256(std::string_view key, std::string_view message) {
  const auto bytes = [](const Sha256Digest& digest) {
    return std::string_view(reinterpret_cast<const char*>(digest.data()), digest.size());
  };
  std::string block(key);
  if (key.size() > Sha256::kBlock) {
    Sha256 hash;
    hash.Update(key);
    block = bytes(hash.Finish());
  }
  block.resize(Sha256::kBlock);
  Sha256 inner, outer;
  for (char& byte : block) byte ^= 0x36;
  inner.Update(block);
  inner.Update(message);
  for (char& byte : block) byte ^= 0x36 ^ 0x5c;
  outer.Update(block);
  outer.Update(bytes(inner.Finish()));
  return outer.Finish();
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_SHA256_H_
