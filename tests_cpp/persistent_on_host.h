// Simulates a GPU for the persistent kernels: lanes are fibers, barriers wait for all lanes, and
// mma loops over a warp's fragments. Thread blocks, warps and (if the code permits divergence)
// lanes run in random order. Blocks exchange words by relaxed atomics, whose ordering the thread
// sanitizer checks with a CPU thread per block.
#pragma once

#include "cuda/kernel/persistent_kernels.h"
#include "fiber.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

namespace lltm_test {

inline int most_polls = 100'000'000;

// Before a grid's last block starts, as if other work occupied the GPU.
inline int late_rounds = 0;

// Words that a thread of a slice publishes never arrive if this returns true.
using Lost = std::function<bool(int slice, int thread)>;
inline Lost lost;

// Blocks run in order, each until it waits. `rounds` counts the last grid's rounds.
inline bool round_robin = false;
inline int rounds = 0;

namespace {

// A lane's operands, in PTX's layout.
struct Fragments {
  float* d;
  lltm::cuda::Words a;
  std::uint32_t b[2];  // both parts of 3xTF32 are made here
};

// Rounded to 11 bits, as cvt.rna.tf32.
inline float nearest_tf32(float x) {
  const auto bits = lltm::math::bit_cast<std::uint32_t>(x);
  return x == x ? lltm::math::bit_cast<float>((bits + 0x1000U) & 0xFFFFE000U) : x;
}

// D (16, 8) += of_a(A (16, kK)) of_b(B (kK, 8)).
template <typename T, int kK, typename OfA, typename OfB>
void emulate_mma(
    const Fragments (&lanes)[lltm::cuda::kWarpLanes], const OfA& of_a, const OfB& of_b) {
  constexpr int kPerWord = 4 / sizeof(T);
  struct Word {
    T values[kPerWord];
  };
  const auto element = [](std::uint32_t word, int n) {
    return lltm::math::bit_cast<Word>(word).values[n];
  };
  float a[16][kK], b[kK][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane / 4, within = lane % 4;
    for (int e = 0; e < kPerWord; ++e) {
      for (int n = 0; n < 4; ++n) {
        const int k = kPerWord * (within + 4 * (n / 2)) + e;
        a[group + 8 * (n % 2)][k] = of_a(element(lanes[lane].a.w[n], e));
      }
      for (int n = 0; n < 2; ++n) {
        b[kPerWord * (within + 4 * n) + e][group] = of_b(element(lanes[lane].b[n], e));
      }
    }
  }
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float& d = lanes[4 * (i % 8) + j / 2].d[2 * (i / 8) + j % 2];
      for (int k = 0; k < kK; ++k) d += a[i][k] * b[k][j];
    }
  }
}

class HostBlock {
 public:
  static constexpr int kThreads = lltm::cuda::kWarps * lltm::cuda::kWarpLanes;
  class Lane;
  using Body = std::function<void(Lane&)>;

  HostBlock(
      int slice, int group, int direction, std::size_t sums, const Body& body, std::uint64_t seed)
      : slice_(slice),
        group_(group),
        direction_(direction),
        body_(body),
        random_(seed),
        stacks_(kThreads),
        shared_(sums) {
    // Makes reads of unwritten shared memory visible.
    std::fill(shared_.begin(), shared_.end(), lltm::cuda::Sums{{1e30F, -1e30F}});
    for (int thread = 0; thread < kThreads; ++thread) {
      Lane& lane = lanes_[thread];
      lane.block_ = this;
      lane.thread_ = thread;
      lane.fiber_.start(stacks_[static_cast<std::size_t>(thread)], Lane::run, &lane);
    }
  }

  bool done() const { return running_ == 0; }

  // Some warps, until they wait: warps may be one step apart. Returns true unless all only polled.
  bool run() {
    bool progress = false;
    std::shuffle(std::begin(warps_), std::end(warps_), random_);
    for (const int warp : warps_) {
      if (!round_robin && random_() % 2 == 0) continue;
      while (run_warp(warp)) progress = true;
    }
    return progress;
  }

  bool run_to_the_end() {
    bool progress = false;
    while (!done() && run()) progress = true;
    return progress;
  }

 private:
  struct Meeting {
    int arrived = 0;
    unsigned generation = 0;
  };

  bool run_warp(int warp) {
    progress_ = false;
    const int first = static_cast<int>(random_() % lltm::cuda::kWarpLanes);
    for (int n = 0; n < lltm::cuda::kWarpLanes; ++n) {
      lanes_[warp * lltm::cuda::kWarpLanes + (first + n) % lltm::cuda::kWarpLanes].resume();
      if (error_ != nullptr) std::rethrow_exception(error_);
    }
    return progress_;
  }

  const int slice_, group_, direction_;
  const Body& body_;
  std::mt19937_64 random_;
  Stacks stacks_;
  std::vector<lltm::cuda::Sums> shared_;
  Meeting block_meeting_, warp_meetings_[lltm::cuda::kWarps];
  Fragments fragments_[lltm::cuda::kWarps][lltm::cuda::kWarpLanes];
  std::uint32_t words_[lltm::cuda::kWarps][lltm::cuda::kWarpLanes];
  int warps_[lltm::cuda::kWarps] = {0, 1, 2, 3, 4, 5, 6, 7};
  int running_ = kThreads;
  bool progress_ = false;
  std::exception_ptr error_;

 public:
  // The `Machine` of persistent_kernels.h.
  class Lane {
   public:
    int slice() const { return block_->slice_; }
    int group() const { return block_->group_; }
    int direction() const { return block_->direction_; }
    int thread() const { return thread_; }
    lltm::cuda::Sums* shared() const { return block_->shared_.data(); }

    void sync_warp() {
      meet(warp_meeting(), lltm::cuda::kWarpLanes, [] {});
    }
    void sync_block() {
      meet(block_->block_meeting_, kThreads, [] {});
    }

    bool any(bool condition) {
      return exchange(condition ? 1 : 0, [](auto& words) {
               std::fill(std::begin(words), std::end(words), *std::max_element(words, words + 32));
             }) != 0;
    }

    std::uint32_t neighbor(std::uint32_t word) {
      return exchange(word, [](auto& words) {
        for (int n = 0; n < lltm::cuda::kWarpLanes; n += 2) std::swap(words[n], words[n + 1]);
      });
    }

    // 16 bytes need not become visible together.
    lltm::cuda::Words read(const void* data) const {
      if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0) {
        throw std::logic_error("16 bytes are read that begin in between");
      }
      lltm::cuda::Words words;
      auto* const from = static_cast<std::uint32_t*>(const_cast<void*>(data));
      for (int n = 0; n < 4; ++n) {
        words.w[n] = std::atomic_ref<std::uint32_t>(from[n]).load(std::memory_order_relaxed);
      }
      return words;
    }

    // Writes each word once, never the "absent" value.
    void publish(void* data, std::uint32_t word) {
      if (lost && lost(slice(), thread_)) return;
      if (reinterpret_cast<std::uintptr_t>(data) % sizeof(word) != 0) {
        throw std::logic_error("a word is written that begins in between");
      }
      if (word == lltm::cuda::kAbsent) throw std::logic_error("an absent word is published");
      std::atomic_ref<std::uint32_t> to(*static_cast<std::uint32_t*>(data));
      if (to.exchange(word, std::memory_order_relaxed) != lltm::cuda::kAbsent) {
        throw std::logic_error("a word is published twice");
      }
      block_->progress_ = true;
    }

    void begin() {
      if (thread_ == 0) std::atomic_ref(*words_.begun).fetch_add(1, std::memory_order_relaxed);
    }
    bool all_have_begun() const {
      return std::atomic_ref(*words_.begun).load(std::memory_order_relaxed) == words_.blocks;
    }

    bool wait(int& polls) {
      if (poll_limit_.wait(*this, polls, most_polls)) {
        fiber_.suspend();
        return true;
      }
      if (words_.failure == nullptr) throw std::runtime_error("a word never comes");
      std::atomic_ref(*words_.failure).store(1, std::memory_order_relaxed);
      return false;
    }

    void use(const lltm::cuda::LaunchWords& words) { words_ = words; }

    template <typename T, bool kTf32>
    static lltm::cuda::Operand operand(std::uint32_t w0, std::uint32_t w1) {
      return {{w0, w1}, {}};
    }

    template <typename T, bool kTf32>
    void mma(float (&d)[4], const lltm::cuda::Words& a, const lltm::cuda::Operand& b) {
      auto& lanes = block_->fragments_[thread_ / lltm::cuda::kWarpLanes];
      lanes[thread_ % lltm::cuda::kWarpLanes] = {d, a, {b.big[0], b.big[1]}};
      meet(warp_meeting(), lltm::cuda::kWarpLanes, [&] {
        if constexpr (sizeof(T) == 2) {
          const auto wide = [](T x) { return static_cast<float>(x); };
          emulate_mma<T, 16>(lanes, wide, wide);
        } else if constexpr (kTf32) {
          emulate_mma<float, 8>(lanes, nearest_tf32, nearest_tf32);
        } else {
          // In the order of persistent_gpu.h.
          const auto small = [](float x) { return nearest_tf32(x - nearest_tf32(x)); };
          emulate_mma<float, 8>(lanes, small, nearest_tf32);
          emulate_mma<float, 8>(lanes, nearest_tf32, small);
          emulate_mma<float, 8>(lanes, nearest_tf32, nearest_tf32);
        }
      });
    }

   private:
    friend HostBlock;

    // Changes the words of a warp when all its lanes have given one.
    template <typename Change>
    std::uint32_t exchange(std::uint32_t word, const Change& change) {
      auto& words = block_->words_[thread_ / lltm::cuda::kWarpLanes];
      std::uint32_t& mine = words[thread_ % lltm::cuda::kWarpLanes];
      mine = word;
      meet(warp_meeting(), lltm::cuda::kWarpLanes, [&] { change(words); });
      return mine;
    }

    Meeting& warp_meeting() { return block_->warp_meetings_[thread_ / lltm::cuda::kWarpLanes]; }

    template <typename Last>
    void meet(Meeting& meeting, int lanes, const Last& last) {
      waits_for_ = &meeting;
      generation_ = meeting.generation;
      block_->progress_ = true;
      if (++meeting.arrived == lanes) {
        last();
        meeting.arrived = 0;
        ++meeting.generation;
      } else {
        fiber_.suspend();
      }
      waits_for_ = nullptr;
    }

    void resume() {
      if (fiber_.done()) return;
      if (waits_for_ != nullptr && waits_for_->generation == generation_) return;
      fiber_.resume();
    }

    static void run(void* self) {
      Lane& lane = *static_cast<Lane*>(self);
      try {
        lane.block_->body_(lane);
      } catch (...) {
        lane.block_->error_ = std::current_exception();
      }
      --lane.block_->running_;
      lane.block_->progress_ = true;
    }

    HostBlock* block_ = nullptr;
    int thread_ = 0;
    lltm::cuda::LaunchWords words_;
    lltm::cuda::PollLimit poll_limit_;
    const Meeting* waits_for_ = nullptr;
    unsigned generation_ = 0;
    Fiber fiber_;
  };

 private:
  Lane lanes_[kThreads];
};

struct HostGrid {
  int slices, groups;
  std::size_t sums;  // shared memory of each block
  int directions = 1;
};

inline std::vector<std::unique_ptr<HostBlock>> make_grid(
    const HostGrid& grid, const HostBlock::Body& body, std::uint64_t seed) {
  std::vector<std::unique_ptr<HostBlock>> blocks;
  for (int n = 0; n < grid.directions * grid.groups * grid.slices; ++n) {
    const int slice = n % grid.slices, group = n / grid.slices % grid.groups;
    const int direction = n / grid.slices / grid.groups;
    blocks.push_back(std::make_unique<HostBlock>(slice, group, direction, grid.sums, body, ++seed));
  }
  return blocks;
}

// On this thread, in random block order.
inline void run_grid(const HostGrid& grid, const HostBlock::Body& body, std::uint64_t seed) {
  const auto blocks = make_grid(grid, body, seed);
  std::mt19937_64 random(seed);
  std::vector<HostBlock*> running;
  for (const auto& block : blocks) running.push_back(block.get());
  rounds = 0;
  for (int idle = 0; !running.empty(); ++rounds) {
    if (!round_robin) std::shuffle(running.begin(), running.end(), random);
    bool progress = false;
    for (HostBlock* const block : running) {
      if (block == blocks.back().get() && rounds < late_rounds) continue;
      progress |= round_robin ? block->run_to_the_end() : block->run();
    }
    std::erase_if(running, [](const HostBlock* block) { return block->done(); });
    idle = progress ? 0 : idle + 1;
    if (idle > 1000) throw std::runtime_error("deadlock");
  }
}

inline void run_grid_on_threads(
    const HostGrid& grid, const HostBlock::Body& body, std::uint64_t seed) {
  const auto blocks = make_grid(grid, body, seed);
  std::vector<std::thread> threads;
  for (const auto& block : blocks) {
    threads.emplace_back([&block] {
      while (!block->done()) {
        if (!block->run()) std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace lltm_test
