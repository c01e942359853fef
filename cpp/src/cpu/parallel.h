// Parts of a parallel region: who does what, and what happens to exceptions.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace lltm::cpu {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Part `part` of `parts` nearly equal parts of [0, total).
inline Range share(int64_t total, int64_t parts, int64_t part) {
  return {total * part / parts, total * (part + 1) / parts};
}

inline Range intersect(Range a, Range b) {
  return {std::max(a.begin, b.begin), std::max(std::max(a.begin, b.begin), std::min(a.end, b.end))};
}

// An exception must not leave a parallel region. The first one is kept and
// thrown after it; work after that is left out, but every thread still comes
// to every barrier.
class Failure {
 public:
  template <typename Work>
  void guard(Work&& work) {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      work();
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

// Threads that a region of our own may have: one inside another region.
inline int64_t available_threads() {
  return at::in_parallel_region() ? 1 : at::get_num_threads();
}

}  // namespace lltm::cpu
