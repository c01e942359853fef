// Calls the library once per case, after a warm-up call, for `make bench-check`.
// benchmarks/instructions.py runs:
//
//     valgrind --tool=callgrind --instr-atstart=no lltm_count
//
// callgrind writes a file per case, with the case's name as its trigger. The program prints the
// properties that change the counts, a "name: value" pair per line.
#include "cell/lltm.h"
#include "cpu/kernel/table.h"

#include <lltm/ops.h>
#include <lltm/serialize.h>
#include <lltm/version.h>

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <gnu/libc-version.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

struct Sizes {
  int64_t T, B, I, H;  // one step: T = 1

  std::string text(bool step) const {
    return (step ? "" : "T:" + std::to_string(T) + ',') + "B:" + std::to_string(B) +
           ",I:" + std::to_string(I) + ",H:" + std::to_string(H);
  }
};

// Arguments with the values of a network before training.
struct Problem {
  Problem(const Sizes& sizes, at::ScalarType dtype, bool step) {
    const auto [T, B, I, H] = sizes;
    const auto parameter = [&, H = H](at::IntArrayRef shape) {
      return ((at::rand(shape, at::kFloat) * 2 - 1) / std::sqrt(static_cast<double>(H))).to(dtype);
    };
    input = step ? at::randn({B, I}, at::kFloat) : at::randn({T, B, I}, at::kFloat);
    input = input.to(dtype);
    h = at::randn({B, H}, at::kFloat).to(dtype);
    c = at::randn({B, H}, at::kFloat).to(dtype);
    weights = parameter({3 * H, H + I});
    bias = parameter({3 * H});
    grad_h = at::randn(step ? std::vector{B, H} : std::vector{T, B, H}, at::kFloat).to(dtype);
  }

  Tensor input, h, c, weights, bias;
  Tensor grad_h;  // gradient of h' or of the output
};

// The element-wise part of an LLTM step with `rows` rows, on one thread. T is the storage type.
// GEMM operands have the compute type.
template <typename T>
struct Step {
  using C = lltm::compute_t<T>;

  Step(int64_t rows_, int64_t hidden_)
      : rows(rows_), hidden(hidden_), storage(rows * hidden * 8), compute(rows * hidden * 6) {}

  void forward(const lltm::cpu::Kernels& kernels) {
    lltm::cpu::ForwardArgs<T, C> args;
    args.hidden = hidden;
    args.z = {compute.data(), 3 * hidden};
    args.z_stride = hidden;
    args.saved = {storage.data(), 4 * hidden};
    args.layer_hidden = hidden;
    args.c = {part(storage, 4), hidden};
    args.h_next = {part(storage, 5), hidden};
    args.c_next = {part(storage, 6), hidden};
    lltm::cpu::elementwise_of<T, C>(cell(kernels)).forward(args, 0, rows * hidden);
  }

  void backward(const lltm::cpu::Kernels& kernels) {
    lltm::cpu::BackwardArgs<T, C> args;
    args.hidden = hidden;
    args.saved = {storage.data(), 4 * hidden};
    args.layer_hidden = hidden;
    args.grad_h = {part(storage, 7), hidden};
    args.dz = {compute.data(), 3 * hidden};
    args.grad_h_state = {part(compute, 3), hidden};
    args.grad_c = {part(compute, 4), hidden};
    args.grad_c_prev = {part(compute, 5), hidden};
    lltm::cpu::elementwise_of<T, C>(cell(kernels)).backward(args, 0, rows * hidden);
  }

  int64_t rows, hidden;
  std::vector<T> storage;  // activations (4H), c, h', c', gradient of h
  std::vector<C> compute;  // gates (3H), carried gradients of h and c, gradient of the previous c

 private:
  static const lltm::cpu::CellKernels& cell(const lltm::cpu::Kernels& kernels) {
    return kernels.cells[lltm::Cells::native<lltm::Lltm>()];
  }
  template <typename E>
  E* part(std::vector<E>& memory, int64_t index) const {
    return memory.data() + index * rows * hidden;
  }
};

struct Case {
  std::string name;
  std::function<void()> run;
};
using Cases = std::vector<Case>;

void add_cell(Cases& cases, const Sizes& sizes) {
  const auto problem = std::make_shared<Problem>(sizes, at::kFloat, /*step=*/true);
  const auto forward = [=] {
    const Problem& p = *problem;
    return lltm::step("lltm", p.input, {p.h, p.c}, p.weights, {}, p.bias)[0];
  };
  cases.push_back({"cell, inference, " + sizes.text(true), [=] {
                     const at::NoGradGuard no_grad;
                     forward();
                   }});
  const Tensors leaves = {problem->weights, problem->bias};
  for (const Tensor& leaf : leaves) leaf.requires_grad_();
  cases.push_back({"cell, training, " + sizes.text(true), [=] {
                     torch::autograd::grad({forward()}, leaves, {problem->grad_h});
                   }});
}

void add_sequence(
    Cases& cases, const Sizes& sizes, const std::string& dtype_name, at::ScalarType dtype) {
  const auto problem = std::make_shared<Problem>(sizes, dtype, /*step=*/false);
  const auto forward = [=] {
    const Problem& p = *problem;
    return std::get<0>(lltm::sequence("lltm", p.input, {p.h, p.c}, p.weights, {}, p.bias));
  };
  const std::string suffix = dtype_name + ", " + sizes.text(false);
  cases.push_back({"sequence, inference, " + suffix, [=] {
                     const at::NoGradGuard no_grad;
                     forward();
                   }});
  const Tensors leaves = {problem->input, problem->weights, problem->bias};
  for (const Tensor& leaf : leaves) leaf.requires_grad_();
  cases.push_back({"sequence, training, " + suffix, [=] {
                     torch::autograd::grad({forward()}, leaves, {problem->grad_h});
                   }});
}

// Packed sequences of different lengths, in the reverse direction.
void add_packed(Cases& cases) {
  const auto problem = std::make_shared<Problem>(Sizes{26, 12, 64, 96}, at::kFloat, false);
  const Tensor batch_sizes = at::tensor({12, 12, 9, 7, 7, 4, 1}, at::kLong);
  const Tensor input = problem->input.flatten(0, 1).slice(0, 0, batch_sizes.sum().item<int64_t>());
  cases.push_back({"sequence, inference, f32, packed, reverse, B:12,I:64,H:96", [=] {
                     const at::NoGradGuard no_grad;
                     const Problem& p = *problem;
                     lltm::sequence(
                         "lltm", input, {p.h, p.c}, p.weights, {}, p.bias, {}, batch_sizes, true);
                   }});
}

void add_prepacked(Cases& cases, const Sizes& sizes) {
  const auto problem = std::make_shared<Problem>(sizes, at::kFloat, /*step=*/false);
  const Tensor packed = lltm::prepack("lltm", problem->weights);
  cases.push_back({"prepacked sequence, inference, f32, " + sizes.text(false), [=] {
                     const at::NoGradGuard no_grad;
                     const Problem& p = *problem;
                     lltm::sequence("lltm", p.input, {p.h, p.c}, packed, {}, p.bias);
                   }});
}

void add_prepack(Cases& cases, const std::string& dtype_name, at::ScalarType dtype) {
  const Sizes sizes = {1, 1, 128, 256};
  const auto problem = std::make_shared<Problem>(sizes, dtype, /*step=*/true);
  cases.push_back({"prepack, " + dtype_name + ", I:128,H:256", [=] {
                     lltm::prepack("lltm", problem->weights);
                   }});
}

void add_checkpoint(Cases& cases) {
  const Problem problem({1, 1, 128, 256}, at::kFloat, /*step=*/true);
  const std::string path = "layer.safetensors";
  lltm::save_safetensors({{"weights_l0", problem.weights}, {"bias_l0", problem.bias}}, path);
  cases.push_back({"load_safetensors, f32, I:128,H:256", [=] { lltm::load_safetensors(path); }});
}

template <typename T>
void add_elementwise(Cases& cases, const std::string& dtype_name) {
  constexpr int64_t kRows = 16, kHidden = 512;
  for (const lltm::cpu::Kernels* const kernels :
       {lltm::cpu::kernels_avx2(), lltm::cpu::kernels_default()}) {
    if (kernels == nullptr) continue;
    const auto step = std::make_shared<Step<T>>(kRows, kHidden);
    const std::string suffix = dtype_name + ", B:16,H:512, " + kernels->name;
    cases.push_back({"element-wise forward, " + suffix, [=] { step->forward(*kernels); }});
    cases.push_back({"element-wise backward, " + suffix, [=] { step->backward(*kernels); }});
  }
}

Cases all_cases() {
  Cases cases;
  add_cell(cases, {1, 16, 32, 128});
  add_cell(cases, {1, 1, 32, 128});
  // valgrind runs GEMMs slowly, and a few steps show the cost per step.
  add_sequence(cases, {10, 16, 32, 128}, "f32", at::kFloat);
  add_sequence(cases, {2, 64, 64, 128}, "f32", at::kFloat);
  add_sequence(cases, {2, 33, 60, 100}, "f32", at::kFloat);
  // The small-batch engine: weights in place; packed with A in float32, and in float64.
  add_sequence(cases, {10, 1, 128, 256}, "f32", at::kFloat);
  add_sequence(cases, {33, 1, 128, 256}, "f32", at::kFloat);
  add_sequence(cases, {33, 3, 50, 75}, "f32", at::kFloat);
  add_sequence(cases, {3, 16, 32, 128}, "bf16", at::kBFloat16);
  add_sequence(cases, {3, 16, 32, 128}, "f16", at::kHalf);
  add_sequence(cases, {3, 16, 32, 128}, "f64", at::kDouble);  // the per-step engine
  add_packed(cases);
  add_prepacked(cases, {1, 1, 128, 256});
  add_prepacked(cases, {4, 4, 128, 256});
  add_prepack(cases, "f32", at::kFloat);
  add_prepack(cases, "bf16", at::kBFloat16);
  add_checkpoint(cases);
  add_elementwise<float>(cases, "f32");
  add_elementwise<lltm::cpu::BFloat16>(cases, "bf16");
  add_elementwise<lltm::cpu::Half>(cases, "f16");
  add_elementwise<double>(cases, "f64");
  return cases;
}

// valgrind emulates a CPU; schedules depend on its caches.
void print_environment() {
  std::cout << lltm::build_info() << "build: " << LLTM_BUILD << '\n'
            << "C library: " << gnu_get_libc_version() << '\n'
            << "caches: " << sysconf(_SC_LEVEL1_DCACHE_SIZE) << ", "
            << sysconf(_SC_LEVEL2_CACHE_SIZE) << ", " << sysconf(_SC_LEVEL3_CACHE_SIZE)
            << " bytes\n";
}

void count() {
  at::manual_seed(0);
  const Cases cases = all_cases();
  // Compiles micro-kernels, makes one-time registrations, fills memory caches.
  for (const Case& one : cases) one.run();
  CALLGRIND_START_INSTRUMENTATION;
  for (const Case& one : cases) {
    one.run();  // reads the usable CPUs again if their time is over
    CALLGRIND_ZERO_STATS;
    one.run();
    CALLGRIND_DUMP_STATS_AT(one.name.c_str());
  }
  CALLGRIND_STOP_INSTRUMENTATION;
}

}  // namespace

int main() {
  print_environment();
  count();
}
