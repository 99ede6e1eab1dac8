// A fuzzer that needs no compiler but gcc: it keeps inputs that came through code in a new way, and
// makes more inputs of them.
//
//     fuzz [--minutes M] [--executions N] [--seed S] [--target NAME] [--out FOLDER]
//     fuzz --replay FILE
//
// A child runs the inputs. Its parent sees it end, or stand still, whatever the reason: a
// sanitizer, a property that doesn't hold, a signal, too little memory. The input of that moment
// lies in memory that both share; the parent writes it to a file and says how to run it again.

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "tests/native/fuzz/coverage.h"
#include "tests/native/fuzz/mutator.h"
#include "tests/native/fuzz/target.h"

// A file claims a length and gets that much memory: that is a defect, whoever finds it. No record
// may take more than 256 MiB, and hardly one of these inputs' may come near it (RunOne).
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=272:allocator_may_return_null=0:handle_abort=1:"
         "detect_stack_use_after_return=0:quarantine_size_mb=16";
}
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1"; }

namespace gmeta::fuzz {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kShared = 1 << 20;
constexpr size_t kMutants = 64;    // of a parent, in one go
constexpr int kHangSeconds = 30;   // that an execution may take
constexpr size_t kMostMemory = 8;  // MiB, beyond a multiple of the input

struct Options {
  double minutes = 10;
  uint64_t executions = UINT64_MAX;
  uint64_t seed = 0;
  std::string target;
  std::string out = ".";
  std::string replay;
};

// What the child says and the parent sees.
struct Shared {
  volatile uint64_t executions;
  volatile bool passed;
  volatile uint64_t size;
  char input[kShared];
};

void RunOne(Target* target, const Input& input) {
  Memory::ResetPeak();
  target->Run(input);
  if (Memory::peak() > (kMostMemory << 20) + target->growth() * Size(input)) {
    std::fprintf(stderr, "fuzz: %zu bytes of memory for an input of %zu\n", Memory::peak(),
                 Size(input));
    std::abort();
  }
}

struct Field {
  std::unique_ptr<Target> target;
  std::vector<Input> corpus;
  uint64_t executions = 0;
};

class Fuzzer {
 public:
  Fuzzer(const Options& options, std::vector<std::unique_ptr<Target>> targets, Shared* shared)
      : options_(options), mutator_(options.seed), shared_(shared), began_(Clock::now()) {
    for (auto& target : targets) fields_.push_back({std::move(target), {}, 0});
  }

  void Run() {
    for (Field& field : fields_) {
      for (const Input& seed : field.target->Seeds()) {
        Execute(&field, seed);
        field.corpus.push_back(seed);
      }
    }
    double said = 0;
    while (!Over()) {
      for (Field& field : fields_) {
        if (Over()) break;
        Breed(&field);
        if (Seconds() - said >= 30) {
          said = Seconds();
          Say("fuzz: ");
        }
      }
    }
    for (const Field& field : fields_) {
      std::printf("fuzz: %-16s %9llu executions, %4zu inputs kept\n", field.target->name().c_str(),
                  static_cast<unsigned long long>(field.executions), field.corpus.size());
    }
    Say("fuzz: passed: ");
  }

 private:
  double Seconds() const { return std::chrono::duration<double>(Clock::now() - began_).count(); }
  bool Over() const {
    return Seconds() >= 60 * options_.minutes || shared_->executions >= options_.executions;
  }

  void Say(const char* what) const {
    size_t kept = 0;
    for (const Field& field : fields_) kept += field.corpus.size();
    const auto executions = static_cast<double>(shared_->executions);
    std::printf(
        "%s%.0f executions of %zu targets in %.0f s, %.0f/s; %zu blocks covered, %zu inputs "
        "kept\n",
        what, executions, fields_.size(), Seconds(), executions / Seconds(), Coverage::blocks(),
        kept);
    std::fflush(stdout);
  }

  // Whether the input was news.
  bool Execute(Field* field, const Input& input) {
    const std::string packed = Pack(field->target->name(), input);
    shared_->size = 0;
    std::memcpy(shared_->input, packed.data(), std::min(packed.size(), kShared));
    shared_->size = packed.size();
    Coverage::Start();
    RunOne(field->target.get(), input);
    const bool news = Coverage::Stop();
    ++field->executions;
    shared_->executions = shared_->executions + 1;
    return news;
  }

  void Breed(Field* field) {
    // Half of the time one of the latest, which have been tried least.
    const size_t count = field->corpus.size(), latest = count / 4 + 1;
    const Input parent = field->corpus[mutator_.OneIn(2) ? count - 1 - mutator_.Below(latest)
                                                         : mutator_.Below(count)];
    Execute(field, parent);
    const std::vector<Comparison> comparisons = Coverage::Comparisons();
    for (size_t i = 0; i < kMutants && !Over(); ++i) {
      const Input& other = field->corpus[mutator_.Below(field->corpus.size())];
      const Input child = mutator_.Mutate(parent, other, field->target->indexed(), comparisons);
      if (Execute(field, child)) field->corpus.push_back(child);
    }
  }

  const Options options_;
  Mutator mutator_;
  Shared* const shared_;
  const Clock::time_point began_;
  std::vector<Field> fields_;
};

// Waits for the child to end; kills one that stands still. Whether all is well.
bool Watch(pid_t child, const Shared& shared) {
  uint64_t executions = 0;
  auto moved = Clock::now();
  for (int status;;) {
    if (waitpid(child, &status, WNOHANG) == child) {
      return WIFEXITED(status) && WEXITSTATUS(status) == 0 && shared.passed;
    }
    if (shared.executions != executions) {
      executions = shared.executions;
      moved = Clock::now();
    } else if (Clock::now() - moved > std::chrono::seconds(kHangSeconds)) {
      std::printf("fuzz: an execution takes more than %d s\n", kHangSeconds);
      kill(child, SIGKILL);
    }
    usleep(20'000);
  }
}

int Fuzz(const char* program, const Options& options) {
  std::vector<std::unique_ptr<Target>> targets;
  for (auto& target : AllTargets()) {
    const bool named = target->name() == options.target;
    if (named || (options.target.empty() && target->name() != "planted")) {
      targets.push_back(std::move(target));
    }
  }
  if (targets.empty()) {
    std::printf("fuzz: there is no target %s; there are", options.target.c_str());
    for (auto& target : AllTargets()) std::printf(" %s", target->name().c_str());
    std::printf("\n");
    return 2;
  }
  auto* shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (shared == MAP_FAILED) return 2;
  const pid_t child = fork();
  if (child == 0) {
    Memory::Watch();
    {
      Fuzzer fuzzer(options, std::move(targets), shared);
      fuzzer.Run();
    }
    shared->passed = true;
    std::exit(0);  // leaks are looked for
  }
  if (Watch(child, *shared)) return 0;
  const std::string path = options.out + "/failure-" + std::to_string(getpid()) + ".input";
  std::ofstream(path, std::ios::binary)
      .write(shared->input, static_cast<std::streamsize>(shared->size));
  std::printf("fuzz: FAILED after %llu executions; once more: %s --replay %s\n",
              static_cast<unsigned long long>(shared->executions), program, path.c_str());
  return 1;
}

int Replay(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::string name;
  Input input;
  if (!Unpack(bytes, &name, &input)) {
    std::printf("fuzz: %s isn't an input that was kept\n", path.c_str());
    return 2;
  }
  Memory::Watch();
  for (auto& target : AllTargets()) {
    if (target->name() != name) continue;
    std::printf("fuzz: %s, %zu files, %zu bytes\n", name.c_str(), input.size(), Size(input));
    std::fflush(stdout);
    RunOne(target.get(), input);
    std::printf("fuzz: passed\n");
    return 0;
  }
  std::printf("fuzz: %s is for a target %s, which there isn't\n", path.c_str(), name.c_str());
  return 2;
}

}  // namespace
}  // namespace gmeta::fuzz

int main(int count, char** words) {
  gmeta::fuzz::Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (i + 1 == count) {
      std::printf("fuzz: %s needs a value, or isn't known\n", word.c_str());
      return 2;
    }
    const char* value = words[++i];
    if (word == "--minutes") {
      options.minutes = std::atof(value);
    } else if (word == "--executions") {
      options.executions = std::strtoull(value, nullptr, 10);
    } else if (word == "--seed") {
      options.seed = std::strtoull(value, nullptr, 10);
    } else if (word == "--target") {
      options.target = value;
    } else if (word == "--out") {
      options.out = value;
    } else if (word == "--replay") {
      options.replay = value;
    } else {
      std::printf("fuzz: %s isn't known\n", word.c_str());
      return 2;
    }
  }
  if (!options.replay.empty()) return gmeta::fuzz::Replay(options.replay);
  return gmeta::fuzz::Fuzz(words[0], options);
}
