// Records on a drive: drawn appends, frees and reads against a map; what collection bounds; damage,
// a full disk, and a kernel without io_uring.

#include "ops/table/disk/record_log.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tests/native/check.h"

using gmeta::disk::DiskError;
using gmeta::disk::RecordLog;

namespace {

struct Model {
  std::map<int64_t, std::string> records;
  std::unordered_map<int64_t, uint32_t> places;
};

std::string Draw(std::mt19937_64* random, size_t bytes) {
  std::string record(bytes, '\0');
  for (char& c : record) c = static_cast<char>((*random)());
  return record;
}

void Append(RecordLog* log, Model* model, int64_t key, const std::string& record) {
  const uint32_t place =
      log->Append(key, record.data(), [&](int64_t moved, uint32_t from, uint32_t to) {
        CHECK_EQ(model->places.at(moved), from);
        model->places[moved] = to;
      });
  model->places[key] = place;
  model->records[key] = record;
}

void Free(RecordLog* log, Model* model, int64_t key) {
  log->Free(model->places.at(key));
  model->places.erase(key);
  model->records.erase(key);
}

void CheckRead(const RecordLog& log, const Model& model, const std::vector<int64_t>& keys,
               size_t bytes) {
  std::vector<std::string> got(keys.size(), std::string(bytes, '?'));
  std::vector<RecordLog::Wish> wishes;
  for (size_t i = 0; i < keys.size(); ++i) {
    wishes.push_back({model.places.at(keys[i]), got[i].data()});
  }
  log.Read(&wishes);
  for (size_t i = 0; i < keys.size(); ++i) CHECK(got[i] == model.records.at(keys[i]));
}

// Any order of appends and frees: every record reads as it was written, a record is written at most
// twice in the mean, and the file has at most twice the live records and two segments.
void TestAgainstAMap(const std::string& folder, size_t bytes, size_t segment, uint64_t seed) {
  std::mt19937_64 random(seed);
  RecordLog log(folder, bytes, uint64_t{1} << 30, segment);
  const size_t slots = std::max<size_t>(1, segment / (bytes + 12));
  Model model;
  uint64_t appends = 0, most_live = 0;
  for (int step = 0; step < 4000; ++step) {
    const int64_t key = static_cast<int64_t>(random() % 700) - 350;
    const bool there = model.records.count(key) != 0;
    if (there && random() % 100 < 45) {
      Free(&log, &model, key);
    } else if (there) {
      const std::string again = Draw(&random, bytes);  // as an owner changes a record
      Free(&log, &model, key);
      Append(&log, &model, key, again);
      ++appends;
    } else {
      Append(&log, &model, key, Draw(&random, bytes));
      ++appends;
    }
    most_live = std::max<uint64_t>(most_live, model.records.size());
    CHECK_EQ(log.size(), model.records.size());
    if (step % 97 == 0) {
      std::vector<int64_t> keys;
      for (const auto& [each, _] : model.records) {
        if (random() % 3 != 0) keys.push_back(each);
      }
      std::shuffle(keys.begin(), keys.end(), random);
      CheckRead(log, model, keys, bytes);
    }
    if (step == 2500) {
      log.Clear();
      model = {};
    }
  }
  CHECK(log.written_records() <= 2 * appends);
  const uint64_t of_segment = gmeta::disk::BlocksUp(slots * (bytes + 12));
  CHECK(log.file_bytes() <= (2 * most_live / slots + 3) * of_segment);
}

// The descriptor of the file, which has no name.
int FileOf(const RecordLog& log) {
  CHECK(log.file_bytes() > 0);
  for (int fd = 3; fd < 64; ++fd) {
    char name[4096] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    if (readlink(link.c_str(), name, sizeof name - 1) < 0) continue;
    if (std::strstr(name, "gmeta-rows-") != nullptr) return fd;
  }
  CHECK(false);
  return -1;
}

std::string Told(const RecordLog& log, uint32_t place, size_t bytes) {
  std::string record(bytes, '\0');
  std::vector<RecordLog::Wish> wishes = {{place, record.data()}};
  try {
    log.Read(&wishes);
  } catch (const DiskError& error) {
    return error.what();
  }
  return "";
}

void TestDamageIsTold(const std::string& folder) {
  RecordLog log(folder, 100, 1 << 20, 4096);
  Model model;
  std::mt19937_64 random(5);
  for (int64_t key = 0; key < 200; ++key) Append(&log, &model, key, Draw(&random, 100));
  CHECK_EQ(Told(log, model.places[3], 100), "");
  const int fd = FileOf(log);
  gmeta::disk::BlockMemory block(4096);
  CHECK_EQ(pread(fd, block.data(), 4096, 0), 4096);
  block.data()[3 * 112 + 50] ^= 1;
  CHECK_EQ(pwrite(fd, block.data(), 4096, 0), 4096);
  const std::string told = Told(log, model.places[3], 100);
  CHECK(told.find("at byte 336: the row isn't what was written") != std::string::npos);
  CHECK_EQ(Told(log, model.places[2], 100), "");
  // A row in the place of another is an error too.
  std::memcpy(block.data() + 3 * 112, block.data() + 2 * 112, 112);
  CHECK_EQ(pwrite(fd, block.data(), 4096, 0), 4096);
  CHECK(Told(log, model.places[3], 100).find("isn't what was written") != std::string::npos);
  CHECK_EQ(ftruncate(fd, 4096), 0);
  CHECK(Told(log, model.places[100], 100).find("can't read") != std::string::npos);
}

// A full disk, as a limit of the file's size: the call fails, nothing is lost, and it goes on
// later.
void TestAFullDiskLosesNothing(const std::string& folder) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  RecordLog log(folder, 100, 1 << 20, 4096);
  Model model;
  std::mt19937_64 random(6);
  const rlimit small = {3 * 4096, before.rlim_max};
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  int64_t key = 0;
  std::string told;
  for (; told.empty(); ++key) {
    CHECK(key < 1000);
    try {
      Append(&log, &model, key, Draw(&random, 100));
    } catch (const DiskError& error) {
      told = error.what();
    }
  }
  CHECK(told.find("can't write " + folder) != std::string::npos);
  CHECK(told.find("the rows are still in memory") != std::string::npos);
  std::vector<int64_t> keys;
  for (const auto& [each, _] : model.records) keys.push_back(each);
  CHECK_EQ(log.size(), keys.size());
  CheckRead(log, model, keys, 100);
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  for (; key < 2000; ++key) {
    Append(&log, &model, key, Draw(&random, 100));
    keys.push_back(key);
  }
  CheckRead(log, model, keys, 100);
}

// A kernel that refuses a ring, here because the process may open no more files.
void TestReadsWithoutARing(const std::string& folder) {
  RecordLog log(folder, 100, 1 << 20, 4096);
  Model model;
  std::mt19937_64 random(7);
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 500; ++key) {
    Append(&log, &model, key, Draw(&random, 100));
    if (key % 3 == 0) keys.push_back(key);
  }
  std::thread([&] {
    rlimit before;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    const rlimit none = {3, before.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    CHECK(gmeta::disk::IoRing::OfThread() == nullptr);
    CheckRead(log, model, keys, 100);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  }).join();
}

void TestAFolderThatIsNotThere() {
  RecordLog log("/nowhere/at/all", 4000, 1 << 20, 4096);
  const std::string record(4000, 'x');
  const auto moved = [](int64_t, uint32_t, uint32_t) {};
  log.Append(1, record.data(), moved);  // in memory
  std::string told;
  try {
    log.Append(2, record.data(), moved);
  } catch (const DiskError& error) {
    told = error.what();
  }
  CHECK(told.find("/nowhere/at/all/gmeta-rows-") == 0);
  CHECK(told.find("name a folder that can be written to") != std::string::npos);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  uint64_t seed = 0;
  for (const size_t bytes : {1, 40, 100, 784, 5000}) {
    for (const size_t segment : {4096, 40960}) TestAgainstAMap(folder, bytes, segment, ++seed);
  }
  TestDamageIsTold(folder);
  TestAFullDiskLosesNothing(folder);
  TestReadsWithoutARing(folder);
  TestAFolderThatIsNotThere();
  std::puts("ok");
}
