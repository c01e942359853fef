#include "cpu/threads/idle_team.h"

#include "cpu/threads/openmp.h"

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <pthread.h>

namespace lltm::cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostCpus = 16;

std::atomic<bool> exists{false};
std::atomic<Clock::time_point> needed_until{};

// libgomp ends the process if it cannot create a thread.
bool can_create(int count) {
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  bool created = true;
  try {
    while (static_cast<int>(threads.size()) < count) {
      threads.emplace_back([&done] { done.wait(false); });
    }
  } catch (const std::system_error&) {
    created = false;
  }
  done = true;
  done.notify_all();
  for (std::thread& thread : threads) thread.join();
  return created;
}

void lead_team() {
  const int cpus = omp_get_num_procs();
  if (cpus > kMostCpus || !can_create(cpus)) return;
  GOMP_parallel([](void*) {}, nullptr, static_cast<unsigned>(cpus + 1), /*flags=*/0);
  for (Clock::time_point end; Clock::now() < (end = needed_until.load());) {
    std::this_thread::sleep_until(end);
  }
  exists = false;  // libgomp ends the team with this thread
}

// A forked process has no other threads.
[[maybe_unused]] const int kIdleTeamAtFork =
    pthread_atfork(nullptr, nullptr, [] { exists = false; });

}  // namespace

void keep_idle_team(Clock::time_point until) {
  needed_until = until;
  if (exists || exists.exchange(true)) return;
  // The code stays in memory even if the library is closed.
  Dl_info library;
  if (dladdr(&exists, &library) != 0) {
    dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  }
  try {
    std::thread(lead_team).detach();
  } catch (const std::system_error&) {  // `exists` stays: no second attempt
  }
}

}  // namespace lltm::cpu
