#include "cpu/threads/other_processes.h"

#include "cpu/threads/barrier.h"
#include "cpu/threads/idle_team.h"

#include <algorithm>
#include <cstdint>
#include <fstream>

namespace lltm::cpu {
namespace {

constexpr std::chrono::milliseconds kShort(20), kLong(2000), kKept(5000);

// 0 if the system does not say.
std::chrono::nanoseconds waited_for_cpu() {
  int64_t running = 0, waited = 0;
  std::ifstream("/proc/thread-self/schedstat") >> running >> waited;
  return std::chrono::nanoseconds(waited);
}

}  // namespace

bool OtherProcesses::found(Clock::time_point now, Waited waited_for_cpu) {
  if (now < until_) return found_;
  const auto waited = waited_for_cpu();
  if (found_) {
    found_ = false;  // try all threads again
    if (now > until_ + kLong) pause_ = kShort;
  } else if ((waited - waited_) * 4 > now - since_) {
    // The first time may be due to the scheduler, which sometimes runs two threads of a team on one
    // CPU although another is idle.
    found_ = pause_ > kShort;
    pause_ = std::min<Clock::duration>(2 * pause_, kLong);
  } else {
    pause_ = kShort;
  }
  until_ = now + (found_ ? pause_ : kShort);
  since_ = now;
  waited_ = waited;
  return found_;
}

bool other_processes_run() {
  thread_local OtherProcesses of_thread;
  static const bool may_change_spins = !spins_are_requested();
  const auto now = OtherProcesses::Clock::now();
  const bool found = of_thread.found(now, waited_for_cpu);
  if (found && may_change_spins) keep_idle_team(now + kKept);
  return found;
}

}  // namespace lltm::cpu
