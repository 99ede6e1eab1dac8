// What is fuzzed: targets, their inputs, and the files that inputs are kept in.

#ifndef GMETA_TESTS_NATIVE_FUZZ_TARGET_H_
#define GMETA_TESTS_NATIVE_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gmeta::fuzz {

// The files that a reader is given: TFRecord files, shards, each with its index behind it, or
// what a store of histories has.
using Input = std::vector<std::string>;

inline constexpr size_t kPlain = 256;
inline constexpr size_t kCompressed = kPlain + (32 << 10);  // of zstd, at the most

class Target {
 public:
  virtual ~Target() = default;
  virtual std::string name() const = 0;
  // Whether the files are shards with indices.
  virtual bool indexed() const { return false; }
  // How many bytes of memory a byte of the input may take.
  virtual size_t growth() const { return kPlain; }
  virtual std::vector<Input> Seeds() const = 0;
  // Reads the input and checks what must hold of any; a property that doesn't ends the process.
  virtual void Run(const Input& input) = 0;
};

std::vector<std::unique_ptr<Target>> RecordTargets();
std::vector<std::unique_ptr<Target>> RangeTargets();
std::vector<std::unique_ptr<Target>> StripeTargets();
// One with a defect that is well hidden, to see the fuzzer find it.
std::vector<std::unique_ptr<Target>> PlantedTargets();

inline std::vector<std::unique_ptr<Target>> AllTargets() {
  std::vector<std::unique_ptr<Target>> all;
  for (auto* make : {RecordTargets, RangeTargets, StripeTargets, PlantedTargets}) {
    for (auto& target : make()) all.push_back(std::move(target));
  }
  return all;
}

inline size_t Size(const Input& input) {
  size_t size = 0;
  for (const std::string& part : input) size += part.size();
  return size;
}

// An input with the name of its target: name, number of parts, and the parts, each with its size.
inline std::string Pack(std::string_view target, const Input& input) {
  std::string bytes;
  const auto add = [&](std::string_view part) {
    const uint64_t size = part.size();
    bytes.append(reinterpret_cast<const char*>(&size), sizeof(size));
    bytes.append(part);
  };
  add(target);
  for (const std::string& part : input) add(part);
  return bytes;
}

// The inverse. False: the bytes aren't what Pack() made.
inline bool Unpack(std::string_view bytes, std::string* target, Input* input) {
  input->clear();
  for (bool first = true; !bytes.empty(); first = false) {
    uint64_t size;
    if (bytes.size() < sizeof(size)) return false;
    std::memcpy(&size, bytes.data(), sizeof(size));
    bytes.remove_prefix(sizeof(size));
    if (size > bytes.size()) return false;
    const std::string part(bytes.substr(0, size));
    bytes.remove_prefix(size);
    first ? void(*target = part) : input->push_back(part);
  }
  return !target->empty();
}

}  // namespace gmeta::fuzz

#endif  // GMETA_TESTS_NATIVE_FUZZ_TARGET_H_
