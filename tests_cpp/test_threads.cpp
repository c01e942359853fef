// Parallel regions and barriers (cpu/threads/parallel.h, cpu/threads/barrier.h).
#include "cell_program.h"
#include "cpu/threads/barrier.h"
#include "testing.h"

#include <lltm/nn.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace lltm_test {
namespace {

std::mutex mutex;
// Requested by GOMP_parallel, by lltm and by PyTorch's libraries.
std::set<unsigned> region_sizes, region_sizes_of_torch;

std::set<std::string> threads_of_process() {
  std::set<std::string> threads;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    threads.insert(entry.path().filename());
  }
  return threads;
}

class Threads : public testing::TestWithParam<int> {
  const ThreadCount threads_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Counts, Threads, testing::Values(4, 16));

void call_operators(const Sizes& sizes, at::ScalarType dtype) {
  for (const char* const cell : kCells) {
    Arguments arguments = sequence_problem(sizes, dtype, /*seed=*/1, true, cell);
    prepacked()(arguments);
    if (dtype != at::kDouble && info_of(cell).bounded) prepacked(at::kQInt8)(arguments);
    const Tensors grad_outputs = random_gradients(arguments);
    evaluate(sequence, arguments, grad_outputs);
    arguments.reset = random_reset(arguments, 2);
    evaluate(checkpointed(2), arguments, grad_outputs);
  }
}

template <typename Layer>
void call_layer(lltm::LayerOptions options, const Sizes& s, at::ScalarType dtype) {
  const at::Tensor input = at::randn({s.T, s.B, s.I}, dtype);
  const at::Tensor reset = at::rand({s.T, s.B}) < 0.2;
  for (const auto& [both, steps] : {std::pair{false, 0}, {false, 2}, {true, 0}, {true, 2}}) {
    Layer layer(options.bidirectional(both).checkpoint_steps(steps));
    layer->to(dtype);
    std::get<0>(layer->forward(input, std::nullopt, reset)).sum().backward();
    layer->prepack().forward(input);
    if (dtype != at::kDouble) layer->prepack(at::kQInt8).forward(input);
  }
}

// libgomp ends and creates threads if regions differ in size.
TEST_P(Threads, AreCreatedOnce) {
  const auto call_all = [duo = lltm::Cell::parse(kDuoText)] {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
      for (const Sizes& sizes :
           {Sizes{20, 1, 40, 130}, {6, 24, 70, 160}, {1, 40, 70, 160}, {3, 5, 9, 20}}) {
        call_operators(sizes, dtype);
        call_layer<lltm::LSTM>({sizes.I, sizes.H}, sizes, dtype);
        call_layer<lltm::CustomLayer>({duo, sizes.I, sizes.H}, sizes, dtype);
      }
    }
  };
  call_all();
  region_sizes.clear();
  region_sizes_of_torch.clear();
  const std::set<std::string> before = threads_of_process();
  call_all();
  const std::set<unsigned> all{static_cast<unsigned>(GetParam())};
  EXPECT_EQ(region_sizes, all);
  // Some of PyTorch's GEMMs have fewer threads, such as those of MKL on some CPUs.
  if (region_sizes_of_torch == all) {
    EXPECT_EQ(threads_of_process(), before);
  }
}

// A position whose group is complete sees everything that the group wrote before. More threads than
// CPUs, so that threads also sleep.
TEST(Barriers, WaitForTheirGroup) {
  for (const auto& [groups, sharing] : {std::pair{1, 2}, {3, 3}, {1, 8}, {2, 9}, {1, 20}}) {
    for (const int spins : {0, 1000}) {
      constexpr uint32_t kRounds = 300;
      lltm::cpu::Barriers barriers(groups * sharing, sharing, spins);
      std::vector<uint32_t> written(static_cast<size_t>(groups * sharing));
      std::atomic<int> wrong = 0;
      const auto run = [&, sharing = sharing](int slot) {
        for (uint32_t round = 1; round <= kRounds; ++round) {
          written[slot] = round;
          barriers.arrive(slot, 2 * round - 1);
          barriers.wait(slot, 2 * round - 1);
          const int first = slot / sharing * sharing;
          for (int k = first; k < first + sharing; ++k) wrong += written[k] != round;
          barriers.arrive(slot, 2 * round);
          barriers.wait(slot, 2 * round);
        }
      };
      std::vector<std::thread> threads;
      for (int slot = 0; slot < groups * sharing; ++slot) threads.emplace_back(run, slot);
      for (std::thread& thread : threads) thread.join();
      EXPECT_EQ(wrong, 0) << groups << " groups of " << sharing;
    }
  }
}

}  // namespace
}  // namespace lltm_test

// Replaces libgomp's for all libraries of the process. Weak: tsan_openmp.cpp has another.
extern "C" __attribute__((weak, visibility("default"))) void GOMP_parallel(
    void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  using Parallel = void(void (*)(void*), void*, unsigned, unsigned);
  static auto* const parallel = reinterpret_cast<Parallel*>(dlsym(RTLD_NEXT, "GOMP_parallel"));
  if (!at::in_parallel_region()) {  // a nested region has one thread
    Dl_info caller = {};
    const bool known = dladdr(__builtin_return_address(0), &caller) != 0;
    const bool of_torch =
        known && std::string_view(caller.dli_fname).find("libtorch") != std::string_view::npos;
    const std::lock_guard<std::mutex> lock(lltm_test::mutex);
    (of_torch ? lltm_test::region_sizes_of_torch : lltm_test::region_sizes)
        .insert(threads == 0 ? at::get_num_threads() : threads);
  }
  parallel(body, data, threads, flags);
}
