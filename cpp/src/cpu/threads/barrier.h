// Barriers for threads that share batch rows. No torch header.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lltm::cpu {

// Iterations that a thread waits for another before it sleeps: about a millisecond. Few if there
// are more threads than CPUs, or if GOMP_SPINCOUNT or OMP_WAIT_POLICY request it.
constexpr int kFewSpins = 100;
int spins_of(int64_t threads);
bool spins_are_requested();

// Grid positions [k * sharing, (k + 1) * sharing) wait for each other. libgomp's barrier waits for
// all threads and makes a system call each time.
class Barriers {
 public:
  // Waits sleep after `spins` iterations. If one did, then for some rounds after few: the thread
  // that it waited for probably has no CPU because of other processes, and spinning keeps it from
  // this one's.
  Barriers(int64_t workers, int64_t sharing, int spins)
      : sharing_(sharing),
        spins_(spins),
        gates_of_group_((sharing + kFan - 1) / kFan),
        gates_(
            sharing > 1 ? static_cast<size_t>((workers + sharing - 1) / sharing * gates_of_group_)
                        : 0) {}

  bool any() const { return !gates_.empty(); }

  // A grid position arrives for the `round`th time, from 1 on.
  void arrive(int64_t worker, uint32_t round) {
    const int64_t first = worker % sharing_ / kFan * kFan;
    const auto members = static_cast<uint32_t>(std::min(kFan, sharing_ - first));
    if (!is_last(gate_of(worker).arrived, members, round)) return;
    Gate* const gates = &gate_of(worker / sharing_ * sharing_);
    const auto count = static_cast<uint32_t>(gates_of_group_);
    if (count > 1 && !is_last(gates->gates_arrived, count, round)) return;
    for (Gate* gate = gates; gate != gates + count; ++gate) {
      gate->opened.store(round, std::memory_order_seq_cst);  // before it reads the sleepers
      if (gate->sleepers.load(std::memory_order_seq_cst) > 0) wake(gate->opened);
    }
  }

  // Returns after the arrival of the entire group.
  void wait(int64_t worker, uint32_t round) {
    Gate& gate = gate_of(worker);
    const bool patient = round >= patient_from_.load(std::memory_order_relaxed);
    const int limit = patient ? spins_ : std::min(spins_, kFewSpins);
    for (int spin = 0; spin < limit; ++spin) {
      if (gate.opened.load(std::memory_order_acquire) == round) return;
      relax();
    }
    if (patient) patient_from_.store(round + kImpatientRounds, std::memory_order_relaxed);
    gate.sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (gate.opened.load(std::memory_order_seq_cst) != round) sleep(gate.opened, round - 1);
    gate.sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  // Arrivals change a cache line one after another, so that a line counts only a few.
  static constexpr int64_t kFan = 8;
  static constexpr uint32_t kImpatientRounds = 64;

  // A single cache line: the last to arrive has it when it opens the gate. 128: the hardware
  // prefetches lines in pairs.
  struct alignas(128) Gate {
    std::atomic<uint32_t> arrived{0}, opened{0}, sleepers{0};
    std::atomic<uint32_t> gates_arrived{0};  // of the group, in its first gate
  };

  Gate& gate_of(int64_t worker) {
    return gates_[worker / sharing_ * gates_of_group_ + worker % sharing_ / kFan];
  }

  static bool is_last(std::atomic<uint32_t>& arrived, uint32_t expected, uint32_t round) {
    return arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == expected * round;
  }

  // std::atomic::wait first yields, which costs a time slice if other processes are busy.
#if defined(__linux__)
  static void sleep(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  static void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
#else
  static void sleep(std::atomic<uint32_t>& word, uint32_t value) { word.wait(value); }
  static void wake(std::atomic<uint32_t>& word) { word.notify_all(); }
#endif

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  const int64_t sharing_;
  const int spins_;
  const int64_t gates_of_group_;
  std::atomic<uint32_t> patient_from_{0};
  std::vector<Gate> gates_;
};

}  // namespace lltm::cpu
