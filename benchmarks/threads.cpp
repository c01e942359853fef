// Compares the cost model of schedule.cpp with the LLTM's time on this CPU, by threads, or prints
// the model's predictions for other CPUs:
//
//     lltm_threads
//     lltm_threads simulate
#include "cpu/parallel.h"
#include "cpu/schedule.h"
#include "problems.h"

#include <lltm/ops.h>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

namespace lltm_bench {
namespace {

using lltm::cpu::Grid;
using lltm::cpu::LayerShape;
using lltm::cpu::Machine;

const std::vector<Sizes> kSizes = {
    {100, 1, 128, 256},
    {500, 1, 64, 128},
    {200, 1, 512, 1024},
    {100, 4, 64, 128},
    {50, 8, 256, 512},
    {100, 16, 32, 128},
    {100, 16, 128, 256},
    {30, 20, 300, 300},
    {100, 24, 80, 320},
    {100, 32, 128, 256},
    {50, 32, 512, 512},
    {100, 64, 128, 256},
    {10, 128, 128, 128},
    {50, 128, 512, 512},
    {25, 256, 256, 640},
    {20, 512, 128, 256},
    {500, 32, 16, 64},
    {100, 100, 20, 20},
    {5, 64, 128, 256}};

struct Prediction {
  Grid grid;
  double time;
};

Prediction predict(const Machine& machine, const Sizes& sizes, bool backward) {
  const LayerShape shape = {
      sizes.B,
      sizes.I,
      sizes.H,
      sizes.T * sizes.B,
      /*bf16=*/false,
      lltm::cpu::slots_of(lltm::Lltm::kCell)};
  const Grid grid =
      backward ? schedule_backward(machine, shape).grid : schedule_forward(machine, shape).grid;
  return {grid, predicted_time(machine, shape, backward, grid)};
}

// Of the LLTM's inference, in seconds: the shortest of 15.
double measure(const Sizes& sizes) {
  const at::NoGradGuard no_grad;
  const Problem p(sizes, at::kFloat, /*step=*/false);
  double shortest = INFINITY;
  for (int run = 0; run < 15; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    lltm::sequence("lltm", p.input, {p.h, p.c}, p.weights, {}, p.bias);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    shortest = std::min(shortest, took.count());
  }
  return shortest;
}

void compare() {
  std::printf("| T×B×I×H | threads | grid | speedup | predicted |\n|---|---|---|---|---|\n");
  Machine machine = lltm::cpu::current_machine();
  for (const Sizes& sizes : kSizes) {
    double first = 0, first_predicted = 0;
    for (int64_t threads = 1; threads <= lltm::cpu::usable_cpus(); threads *= 2) {
      at::set_num_threads(static_cast<int>(threads));
      machine.threads = threads;
      const double time = measure(sizes);
      const auto [grid, predicted] = predict(machine, sizes, /*backward=*/false);
      if (threads == 1) std::tie(first, first_predicted) = std::pair{time, predicted};
      std::printf(
          "| %ld×%ld×%ld×%ld | %ld | %ldx%ld | %.2f | %.2f |\n",
          sizes.T,
          sizes.B,
          sizes.I,
          sizes.H,
          threads,
          grid.rows,
          grid.columns,
          first / time,
          first_predicted / predicted);
    }
  }
}

void simulate() {
  std::printf(
      "| L3 | threads | speedup over one thread | smallest | slower than half the threads |\n"
      "|---|---|---|---|---|\n");
  for (const auto& [name, l3, cores] :
       {std::tuple{"32 MiB per 8 cores", 32 << 20, 8}, {"64 MiB per 32 cores", 64 << 20, 32}}) {
    for (const int64_t threads : {2, 4, 8, 16, 32, 64}) {
      Machine machine = {.l2 = 1 << 20, .f32 = true, .l3 = l3, .l3_cores = cores};
      double logarithms = 0, smallest = INFINITY;
      int slower = 0;
      for (const Sizes& sizes : kSizes) {
        const auto steps = [&](int64_t count) {
          machine.threads = count;
          return predict(machine, sizes, false).time + predict(machine, sizes, true).time;
        };
        const double all = steps(threads), speedup = steps(1) / all;
        logarithms += std::log(speedup);
        smallest = std::min(smallest, speedup);
        slower += all > 1.02 * steps(threads / 2);
      }
      const double mean = std::exp(logarithms / static_cast<double>(kSizes.size()));
      std::printf(
          "| %s | %ld | %.1f | %.1f | %d of %zu |\n",
          name,
          threads,
          mean,
          smallest,
          slower,
          kSizes.size());
    }
  }
}

}  // namespace
}  // namespace lltm_bench

int main(int argc, char** argv) {
  const bool simulated = argc > 1 && std::string_view(argv[1]) == "simulate";
  simulated ? lltm_bench::simulate() : lltm_bench::compare();
}
