// Native benchmarks: the micro-kernel's peak rate and the copy bandwidth of this CPU, and the
// element-wise kernels of each instruction set compared with a copy.
//
//     lltm_bench --benchmark_out=kernels.json
//
// Repetitions of all benchmarks are interleaved at random, so that a change in the CPU's speed
// affects all of them. Flags of Google Benchmark override the defaults. OMP_NUM_THREADS sets the
// threads.
#include "cpu/gemm/formats.h"
#include "cpu/kernel/table.h"
#include "problems.h"

#include <lltm/version.h>

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace lltm_bench {
namespace {

using lltm::cpu::BFloat16;
using lltm::cpu::Half;

using Body = std::function<void()>;

// Times the body that `prepare` returns in each repetition. `amount` is a call's work, for the
// rate.
void add(
    const std::string& name,
    const char* rate,
    double amount,
    const std::function<Body()>& prepare) {
  const auto run = [=](benchmark::State& state) {
    const Body body = prepare();
    body();  // compiles micro-kernels, touches memory
    for ([[maybe_unused]] auto _ : state) body();
    using benchmark::Counter;
    state.counters[rate] = Counter(amount, Counter::kIsIterationInvariantRate);
  };
  benchmark::RegisterBenchmark(name.c_str(), run)->UseRealTime()->Unit(benchmark::kMicrosecond);
}

std::string threads_text(int threads) {
  return "threads:" + std::to_string(threads);
}

// 1 and, if it differs, the number of all threads.
std::vector<int> thread_counts() {
  const int all = at::get_num_threads();
  return all == 1 ? std::vector<int>{1} : std::vector<int>{1, all};
}

template <typename F>
void on_threads(int count, const F& body) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) body(k);
  });
}

// Operands stay in each core's cache, as in the sequence engine: a range of rows times the gates of
// a block of hidden units.
template <typename Format>
void add_micro_kernel(const std::string& dtype) {
  if (!Format::available()) {
    std::cerr << "no micro-kernel for " << dtype << ": shares of its peak are left out\n";
    return;
  }
  using Element = typename Format::Element;
  constexpr int64_t kCalls = 64;  // per thread
  const int64_t rows = lltm::cpu::kMaxRows;
  for (const int64_t columns : {64, 192}) {
    for (const int64_t depth : {128, 512}) {
      for (const int threads : thread_counts()) {
        const std::string name = "micro_kernel/" + dtype + '/' + std::to_string(rows) + 'x' +
                                 std::to_string(depth) + 'x' + std::to_string(columns) + '/' +
                                 threads_text(threads);
        const double flops = 2.0 * threads * kCalls * rows * columns * depth;
        add(name, "FLOP/s", flops, [=]() -> Body {
          const size_t operands = rows * depth + depth * columns;
          const auto ab = std::make_shared<std::vector<Element>>(threads * operands);
          // 0.01 in either format.
          std::memset(ab->data(), 0x3C, ab->size() * sizeof(Element));
          const auto c = std::make_shared<std::vector<float>>(threads * rows * columns);
          return [=] {
            on_threads(threads, [&](int64_t thread) {
              const Element* const a = ab->data() + thread * operands;
              float* const product = c->data() + thread * rows * columns;
              for (int64_t call = 0; call < kCalls; ++call) {
                Format::gemm(
                    rows,
                    {a, depth, 1},
                    {a + rows * depth, depth, columns, columns},
                    {product, columns},
                    /*accumulate=*/false);
              }
            });
          };
        });
      }
    }
  }
}

// Moves `bytes`: half is read and half is written.
Body copy(int64_t bytes, int threads) {
  const int64_t share = bytes / 2 / threads;
  const auto memory = std::make_shared<std::vector<char>>(2 * share * threads, 1);
  return [=] {
    on_threads(threads, [&](int64_t thread) {
      char* const to = memory->data() + 2 * share * thread;
      std::memcpy(to, to + share, share);
      benchmark::DoNotOptimize(*to);
    });
  };
}

void add_copy() {
  constexpr int64_t kLarge = int64_t{1} << 29;  // larger than any cache
  for (const int threads : thread_counts()) {
    add("copy/512MiB/" + threads_text(threads), "B/s", kLarge, [=] {
      return copy(kLarge, threads);
    });
  }
}

// The best first. ATEN_CPU_CAPABILITY can limit them.
std::vector<const lltm::cpu::Kernels*> runnable_kernels() {
  const std::string capability = at::get_cpu_capability();
  std::vector<const lltm::cpu::Kernels*> kernels;
  if (capability == "AVX512") kernels.push_back(lltm::cpu::kernels_avx512());
  if (capability == "AVX512" || capability == "AVX2") kernels.push_back(lltm::cpu::kernels_avx2());
  kernels.push_back(lltm::cpu::kernels_default());
  std::erase(kernels, nullptr);
  return kernels;
}

template <typename T>
void add_elementwise(const std::string& dtype, int64_t rows, int64_t hidden) {
  const std::string sizes =
      '/' + dtype + "/B:" + std::to_string(rows) + ",H:" + std::to_string(hidden) + '/';
  const double forward_bytes = Step<T>(1, 1).forward_bytes() * rows * hidden;
  const double backward_bytes = Step<T>(1, 1).backward_bytes() * rows * hidden;
  const auto add_direction =
      [&](const std::string& work, double bytes, void (Step<T>::*run)(const lltm::cpu::Kernels&)) {
        for (const lltm::cpu::Kernels* const kernels : runnable_kernels()) {
          add(work + sizes + kernels->name, "B/s", bytes, [=]() -> Body {
            const auto step = std::make_shared<Step<T>>(rows, hidden);
            return [=] { (*step.*run)(*kernels); };
          });
        }
        add(work + sizes + "copy", "B/s", bytes, [=] {
          return copy(static_cast<int64_t>(bytes), /*threads=*/1);
        });
      };
  add_direction("elementwise_forward", forward_bytes, &Step<T>::forward);
  add_direction("elementwise_backward", backward_bytes, &Step<T>::backward);
}

void add_all() {
  add_micro_kernel<lltm::cpu::F32Format>("f32");
  add_micro_kernel<lltm::cpu::Bf16Format>("bf16");
  add_copy();
  for (const int64_t rows : {16, 8192}) {  // within a cache, and larger
    add_elementwise<float>("f32", rows, 512);
    add_elementwise<BFloat16>("bf16", rows, 512);
    add_elementwise<Half>("f16", rows, 512);
    add_elementwise<double>("f64", rows, 512);
  }
}

}  // namespace
}  // namespace lltm_bench

int main(int argc, char** argv) {
  // Defaults precede the arguments, which override them.
  std::string defaults[] = {
      "--benchmark_enable_random_interleaving=true",
      "--benchmark_repetitions=11",
      "--benchmark_display_aggregates_only=true",
      "--benchmark_min_time=0.05"};
  std::vector<char*> arguments = {argv[0]};
  for (std::string& flag : defaults) arguments.push_back(flag.data());
  arguments.insert(arguments.end(), argv + 1, argv + argc);
  int count = static_cast<int>(arguments.size());

  benchmark::AddCustomContext("threads", std::to_string(at::get_num_threads()));
  benchmark::AddCustomContext("lltm", lltm::build_info());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;
  lltm_bench::add_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
