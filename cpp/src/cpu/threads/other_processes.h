#pragma once

#include <chrono>

namespace lltm::cpu {

// Whether a thread recently waited for a CPU for a quarter of the time, because other processes use
// it. Then a call on a single thread is faster: with several, each barrier waits for the thread
// that has no CPU. From time to time false, to try all threads again.
class OtherProcesses {
 public:
  using Clock = std::chrono::steady_clock;
  // `waited` returns how long the thread has waited for a CPU in its life. Called at most every 20
  // milliseconds: reading it takes 4 microseconds.
  using Waited = std::chrono::nanoseconds (*)();

  bool found(Clock::time_point now, Waited waited);

 private:
  bool found_ = true;  // so that the first call only reads how long the thread has waited
  Clock::duration pause_ = std::chrono::milliseconds(20);
  Clock::time_point since_, until_;
  std::chrono::nanoseconds waited_ = {};
};

// For the calling thread. While they run, the process's idle OpenMP threads sleep instead of
// spinning, also after PyTorch's operations.
bool other_processes_run();

}  // namespace lltm::cpu
