// Drives a target where libFuzzer is not to be had, with options of its kind:
//
//     PROGRAM [-seed=N] [-runs=N] [-max_total_time=SECONDS] [-artifact_prefix=PATH]
//     PROGRAM FILE...     runs inputs that were saved
//
// Without -seed or with 0, the seed is a new one. An input depends on the seed and
// its number alone. The inputs run in a child process, which may die in any way:
// its last input lies in memory that both processes see, and is saved.
#include "fuzz.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

using lltm_fuzz::kSkipped;
using lltm_fuzz::Random;

constexpr size_t kMaxSize = 1 << 16;
constexpr unsigned kMaxSeconds = 60;  // for one input
constexpr int kOneSided = 3;          // exit status: no input is at fault

struct Options {
  uint64_t seed = 0;
  uint64_t runs = UINT64_MAX;
  double seconds = 1e9;
  std::string prefix = "./";
  std::vector<std::string> files;
};

Options options_of(int argc, char** argv) {
  Options options;
  for (int k = 1; k < argc; ++k) {
    const std::string argument = argv[k];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    if (name == "-seed") {
      options.seed = std::stoull(value);
    } else if (name == "-runs") {
      options.runs = std::stoull(value);
    } else if (name == "-max_total_time") {
      options.seconds = std::stod(value);
    } else if (name == "-artifact_prefix") {
      options.prefix = value;
    } else if (name.starts_with("-")) {
      std::cerr << "unknown option " << argument << '\n';
      std::exit(2);
    } else {
      options.files.push_back(argument);
    }
  }
  while (options.seed == 0) {
    options.seed = std::random_device{}();
  }
  return options;
}

// What both processes see.
struct Shared {
  uint64_t run;
  size_t size;
  uint8_t input[kMaxSize];
};

Shared* share() {
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(2);
  }
  return static_cast<Shared*>(memory);
}

uint64_t seed_of_mutate = 0;

void run(Shared& shared) {
  alarm(kMaxSeconds);
  // A copy of its own, for the sanitizer to know where it ends.
  const std::vector<uint8_t> input(shared.input, shared.input + shared.size);
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

// The input of a run: a first one, and changes to it.
void make_input(Shared& shared, uint64_t seed, uint64_t run) {
  Random random(Random(seed).next() + run);
  seed_of_mutate = random.next();
  const auto change = [&](size_t size) {
    return LLVMFuzzerCustomMutator(
        shared.input, size, kMaxSize, static_cast<unsigned>(random.next()));
  };
  shared.run = run;
  shared.size = change(0);
  for (size_t changes = random.below(4); changes > 0; --changes) {
    shared.size = change(shared.size);
  }
}

int run_all(const Options& options, Shared& shared) {
  LLVMFuzzerInitialize(nullptr, nullptr);
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto report = [&](const char* what, uint64_t runs) {
    std::cerr << what << ' ' << runs << " runs in " << seconds() << " s, "
              << static_cast<uint64_t>(runs / seconds()) << " per second; taken "
              << lltm_fuzz::taken << ", refused " << lltm_fuzz::refused << std::endl;
  };
  uint64_t runs = 0;
  for (uint64_t next_report = 1 << 16; runs < options.runs; ++runs) {
    if (runs % 64 == 0 && seconds() > options.seconds) break;
    if (runs == next_report) {
      report("so far", runs);
      next_report *= 2;
    }
    make_input(shared, options.seed, runs);
    run(shared);
  }
  report("done:", runs);
  // Inputs of one kind only say nothing.
  constexpr uint64_t kEnough = 1000;
  const uint64_t rarer = std::min(lltm_fuzz::taken, lltm_fuzz::refused);
  if (runs >= kEnough && rarer < runs / 100) {
    std::cerr << "FAILED: of the inputs, nearly all were taken or nearly all refused\n";
    return kOneSided;
  }
  return 0;
}

int run_files(const Options& options) {
  LLVMFuzzerInitialize(nullptr, nullptr);
  for (const std::string& name : options.files) {
    std::ifstream file(name, std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    if (!file) {
      std::cerr << "cannot read " << name << '\n';
      return 2;
    }
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    std::cerr << name << ": passed\n";
  }
  return 0;
}

std::string save(const Options& options, const Shared& shared) {
  std::ostringstream name;
  name << options.prefix << "crash-" << options.seed << '-' << shared.run;
  std::ofstream(name.str(), std::ios::binary)
      .write(
          reinterpret_cast<const char*>(shared.input), static_cast<std::streamsize>(shared.size));
  return name.str();
}

}  // namespace

size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size) {
  Random random(seed_of_mutate);
  seed_of_mutate = random.next();
  std::string bytes(reinterpret_cast<const char*>(data), size);
  const size_t at = random.below(size + 1);
  const size_t count = 1 + random.below(random.one_in(4) ? 64 : 4);
  switch (random.below(6)) {
    case 0:
      bytes.insert(at, count, static_cast<char>(random.next()));
      break;
    case 1:
      bytes.erase(at, count);
      break;
    case 2:
      bytes.insert(at, bytes.substr(random.below(size + 1), count));
      break;
    case 3:
      if (random.one_in(4)) bytes.resize(at);
      break;
    case 4:
      if (at < size) bytes[at] = static_cast<char>(random.next());
      break;
    default:
      if (at < size) bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.below(8)));
      break;
  }
  bytes.resize(std::min(bytes.size(), max_size));
  std::memcpy(data, bytes.data(), bytes.size());
  return bytes.size();
}

int main(int argc, char** argv) {
  const Options options = options_of(argc, argv);
  if (!options.files.empty()) return run_files(options);
  std::cerr << argv[0] << " -seed=" << options.seed << std::endl;
  Shared& shared = *share();
  const pid_t child = fork();
  if (child == 0) return run_all(options, shared);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) {
    std::perror("fork");
    return 2;
  }
  if (status == 0) return 0;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped) return kSkipped;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kOneSided) return kOneSided;
  const char* const death = WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "an error";
  std::cerr << "FAILED in run " << shared.run << " of seed " << options.seed << ", by " << death
            << "; to run the input again:\n  " << argv[0] << ' ' << save(options, shared)
            << std::endl;
  return 1;
}
