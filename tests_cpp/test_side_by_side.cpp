// The threads of two concurrent calls, and of calls next to other work. test_properties.py compares
// results and derivatives of two directions.
#include "cpu/threads/idle_team.h"
#include "cpu/threads/openmp.h"
#include "cpu/threads/parallel.h"
#include "testing.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace lltm_test {
namespace {

// Two calls with three threads each, or fewer.
TEST(Crews, RunTheRegionsOfTheirCalls) {
  for (const int threads : {1, 2, 5, 6}) {
    const ThreadCount count(threads);
    for (const bool fails : {false, true}) {
      std::array<std::atomic<int>, 2> sums = {};
      const auto call = [&](int64_t k) {
        EXPECT_EQ(lltm::cpu::available_threads(), 3);
        for (int region = 0; region < 50; ++region) {
          lltm::cpu::parallel_region(3, [&](lltm::cpu::Team& team) {
            team.for_each_worker([&](int64_t worker) {
              sums[k] += static_cast<int>(worker);
              return true;
            });
          });
          if (fails && k == 1 && region == 20) throw std::runtime_error("the test asked for it");
        }
      };
      if (fails) {
        EXPECT_THROW(lltm::cpu::run_crews(2, 3, call), std::runtime_error);
        EXPECT_EQ(sums[1], 21 * 3);
      } else {
        lltm::cpu::run_crews(2, 3, call);
        EXPECT_EQ(sums[1], 50 * 3);
      }
      EXPECT_EQ(sums[0], 50 * 3);
    }
  }
}

// A clock in milliseconds, and how long the thread has waited for a CPU.
TEST(OtherProcesses, AreFoundFromTheTimeThatAThreadWaits) {
  static std::chrono::milliseconds waited;
  lltm::cpu::OtherProcesses others;
  const auto found_at = [&](int64_t now, int64_t waits) {
    waited = std::chrono::milliseconds(waits);
    const auto time = lltm::cpu::OtherProcesses::Clock::time_point(std::chrono::milliseconds(now));
    return others.found(time, [] { return std::chrono::nanoseconds(waited); });
  };
  EXPECT_FALSE(found_at(10'000, 500));  // reads only
  EXPECT_FALSE(found_at(10'100, 520));  // a fifth
  EXPECT_FALSE(found_at(10'200, 600));  // all, but once
  EXPECT_TRUE(found_at(10'300, 700));
  EXPECT_TRUE(found_at(10'310, 700)) << "read too early";
  EXPECT_FALSE(found_at(10'400, 700)) << "all threads are tried again";
  EXPECT_TRUE(found_at(10'500, 750)) << "found earlier now";
  EXPECT_FALSE(found_at(20'000, 750));
  EXPECT_FALSE(found_at(20'100, 850)) << "after a long pause, twice again";
}

#if defined(__linux__)
TEST(UsableCpus, FollowTheAffinityOfTheThread) {
  const int64_t before = lltm::cpu::usable_cpus();
  cpu_set_t all, one;
  ASSERT_EQ(pthread_getaffinity_np(pthread_self(), sizeof(all), &all), 0);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  for (const auto& [affinity, cpus] : {std::pair(one, int64_t{1}), {all, before}}) {
    ASSERT_EQ(pthread_setaffinity_np(pthread_self(), sizeof(affinity), &affinity), 0);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (lltm::cpu::usable_cpus() != cpus && std::chrono::steady_clock::now() < end) {
    }
    EXPECT_EQ(lltm::cpu::usable_cpus(), cpus);
  }
}
#endif

// While others need all CPUs, a region of few threads runs on one, later again on all.
TEST(BusyCpus, RegionsRunOnOneThread) {
  if (lltm::cpu::usable_cpus() < 2) GTEST_SKIP() << "a single CPU";
  using Clock = std::chrono::steady_clock;
  const ThreadCount two(2);
  const auto threads_until = [](int64_t expected) {
    const auto end = Clock::now() + std::chrono::seconds(30);
    int64_t threads = 0;
    while (threads != expected && Clock::now() < end) {
      lltm::cpu::parallel_region(2, [&](lltm::cpu::Team& team) {
        if (team.thread() == 0) threads = team.threads();
      });
    }
    return threads;
  };
  std::atomic<bool> stop = false;
  std::vector<std::thread> others;
  for (int64_t k = 0; k < 2 * lltm::cpu::usable_cpus(); ++k) {
    others.emplace_back([&] {
      while (!stop) {
      }
    });
  }
  EXPECT_EQ(threads_until(1), 1);
  stop = true;
  for (std::thread& thread : others) thread.join();
  EXPECT_EQ(threads_until(2), 2);
}

#if defined(__linux__)
// After a region, libgomp's threads use no CPU while the team exists. Otherwise, tests.cmake lets
// them spin for longer than the pause.
TEST(IdleTeam, MakesIdleThreadsSleep) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kPause(100);
  const ThreadCount two(2);
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  const auto waits_for = [&](const auto& condition) {
    for (const auto end = Clock::now() + std::chrono::seconds(30); Clock::now() < end;) {
      if (condition()) return true;
      std::this_thread::sleep_for(kPause);
    }
    return false;
  };
  const auto run = [] { at::parallel_for(0, 2, 1, [](int64_t, int64_t) {}); };
  const auto sleeps_after_region = [&] {
    lltm::cpu::keep_idle_team(Clock::now() + std::chrono::seconds(2));
    run();
    const std::clock_t start = std::clock();  // the process's CPU time
    std::this_thread::sleep_for(kPause);
    return std::clock() - start < CLOCKS_PER_SEC / 50;
  };
  run();
  const auto before = threads();
  if (omp_get_num_procs() > 16) GTEST_SKIP() << "too many CPUs for the team";
  EXPECT_TRUE(waits_for(sleeps_after_region));
  EXPECT_TRUE(waits_for([&] { return threads() == before; })) << "the team does not end";
}
#endif

// Only the thread that calls fork() exists in the new process. libgomp supports one thread there,
// and several in a new thread.
TEST(ForkedProcess, RunsTheLayer) {
  const auto threads = static_cast<int>(lltm::cpu::usable_cpus() + 1);
  const ThreadCount thread_count(threads);
  const Arguments a = sequence_problem({4, 9, 5, 40}, at::kFloat, /*seed=*/1);
  const Tensors expected = sequence(a);
  std::atomic<bool> entered = false, forked = false;
  std::thread other_caller([&] {
    lltm::cpu::parallel_region(threads, [&](lltm::cpu::Team&) {
      for (entered = true; !forked;) std::this_thread::yield();
    });
  });
  while (!entered) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    std::atomic<int64_t> count = 0;
    std::thread([&] {
      if (!close(sequence(a), expected)) return;
      lltm::cpu::parallel_region(threads, [&](lltm::cpu::Team& team) { count = team.threads(); });
    }).join();
    at::set_num_threads(1);
    _exit(count == threads && close(sequence(a), expected) ? 0 : 1);
  }
  forked = true;
  other_caller.join();
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace lltm_test
