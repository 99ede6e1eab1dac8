// Records that a thread reads ahead while others are written, freed and collected: a copy whose
// version is still that of the record has the record's bytes.

#include "ops/table/disk/ahead_reader.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "tests/native/check.h"

using gmeta::disk::AheadReader;
using gmeta::disk::NumberedRecords;

namespace {

constexpr size_t kBytes = 1000;
constexpr uint32_t kNumbers = 3000;

std::string RecordOf(uint32_t number, uint32_t version) {
  std::string record(kBytes, static_cast<char>(number * 31 + version));
  std::memcpy(record.data(), &number, sizeof number);
  std::memcpy(record.data() + sizeof number, &version, sizeof version);
  return record;
}

struct Asked {
  AheadReader::Request request;
  std::string bytes;
};

void TestCopiesAreGoodOrOutOfDate() {
  NumberedRecords records("/tmp", kBytes);
  std::mutex mutex;
  AheadReader reader(&records, &mutex);
  std::mt19937 random(7);
  const auto put = [&](uint32_t number) {
    const std::lock_guard<std::mutex> lock(mutex);
    const uint32_t version = records.Has(number) ? records.version(number) + 1 : 1;
    records.Put(number, RecordOf(number, version).data());
  };
  for (uint32_t number = 0; number < kNumbers; ++number) put(number);
  size_t good = 0, stale = 0;
  for (int round = 0; round < 30; ++round) {
    std::vector<std::unique_ptr<Asked>> all;
    for (int i = 0; i < 3; ++i) {
      auto asked = std::make_unique<Asked>();
      const uint32_t count = random() % 6000;
      asked->bytes.resize(count * kBytes);
      for (uint32_t j = 0; j < count; ++j) {
        asked->request.wishes.push_back(
            {static_cast<uint32_t>(random() % kNumbers), asked->bytes.data() + j * kBytes});
      }
      reader.Ask(&asked->request);
      all.push_back(std::move(asked));
      for (int j = 0; j < 40; ++j) put(random() % kNumbers);
    }
    for (const auto& asked : all) {
      reader.Await(asked->request);
      CHECK(reader.IsDone(asked->request));
      const std::vector<uint32_t>& versions = asked->request.versions;
      CHECK_EQ(versions.size(), asked->request.wishes.size());
      const std::lock_guard<std::mutex> lock(mutex);
      for (size_t i = 0; i < versions.size(); ++i) {
        const uint32_t number = asked->request.wishes[i].number;
        CHECK(std::memcmp(asked->request.wishes[i].to, RecordOf(number, versions[i]).data(),
                          kBytes) == 0);
        ++(versions[i] == records.version(number) ? good : stale);
      }
    }
  }
  CHECK(good > stale && stale > 0);
}

void TestARecordThatIsGoneEndsARequest() {
  NumberedRecords records("/tmp", kBytes);
  std::mutex mutex;
  AheadReader reader(&records, &mutex);
  for (uint32_t number = 0; number < 9; ++number) records.Put(number, RecordOf(number, 1).data());
  records.Free(4);
  CHECK(!records.Has(4));
  CHECK_EQ(records.size(), uint64_t{8});
  std::string bytes(2 * kBytes, '\0');
  AheadReader::Request request;
  request.wishes = {{3, bytes.data()}, {4, bytes.data() + kBytes}};
  reader.Ask(&request);
  reader.Await(request);
  CHECK(request.versions.empty());
  records.Put(4, RecordOf(4, 2).data());
  CHECK_EQ(records.version(4), uint32_t{2});
  reader.Ask(&request);
  reader.Await(request);
  CHECK_EQ(request.versions.size(), size_t{2});
  CHECK(bytes == RecordOf(3, 1) + RecordOf(4, 2));
}

}  // namespace

int main() {
  TestCopiesAreGoodOrOutOfDate();
  TestARecordThatIsGoneEndsARequest();
}
