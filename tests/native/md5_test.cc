#include "ops/hash_text/md5.h"

#include <string>

#include "tests/native/check.h"

namespace {

int64_t Hash(const std::string& text) { return gmeta::HashText(text.data(), text.size()); }

}  // namespace

int main() {
  // int.from_bytes(hashlib.md5(text).digest()[8:], "little", signed=True)
  CHECK_EQ(Hash(""), int64_t{9098107892288553193});
  CHECK_EQ(Hash("abc"), int64_t{8250560606382298838});
  // On both sides of where the length no longer fits the block, and of whole blocks.
  const int64_t expected[] = {8255003799616706777,  5454261216467540578,  -9112578674485668349,
                              6207127878382405497,  -716951539998397251,  5747176137945828815,
                              -5348621290331299802, -3757393272810475929, 7154826388648145252};
  const size_t sizes[] = {55, 56, 63, 64, 65, 119, 120, 128, 1000};
  for (size_t i = 0; i < 9; ++i) CHECK_EQ(Hash(std::string(sizes[i], 'x')), expected[i]);
  return 0;
}
