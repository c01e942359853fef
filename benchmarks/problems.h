#pragma once

#include "cell/lltm.h"
#include "cpu/kernel/table.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace lltm_bench {

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
    args.gates = {compute.data(), 3 * hidden};
    args.gates_step = hidden;
    args.activations = {storage.data(), 4 * hidden};
    args.layer_hidden = hidden;
    args.c = {part(storage, 4), hidden};
    args.h_next = {part(storage, 5), hidden};
    args.c_next = {part(storage, 6), hidden};
    lltm::cpu::elementwise_of<T, C>(cell(kernels)).forward(args, 0, rows * hidden);
  }

  void backward(const lltm::cpu::Kernels& kernels) {
    lltm::cpu::BackwardArgs<T, C> args;
    args.hidden = hidden;
    args.activations = {storage.data(), 4 * hidden};
    args.layer_hidden = hidden;
    args.grad_h = {part(storage, 7), hidden};
    args.grad_gates = {compute.data(), 3 * hidden};
    args.grad_h_state = {part(compute, 3), hidden};
    args.grad_c = {part(compute, 4), hidden};
    args.grad_c_prev = {part(compute, 5), hidden};
    lltm::cpu::elementwise_of<T, C>(cell(kernels)).backward(args, 0, rows * hidden);
  }

  double forward_bytes() const { return rows * hidden * (3.0 * sizeof(C) + 7.0 * sizeof(T)); }
  double backward_bytes() const { return rows * hidden * (6.0 * sizeof(C) + 5.0 * sizeof(T)); }

  int64_t rows, hidden;
  std::vector<T> storage;  // activations (4H), c, h', c', gradient of h
  std::vector<C> compute;  // gates (3H), carried gradients of h and c, gradient of the previous c

 private:
  static const lltm::cpu::CellKernels& cell(const lltm::cpu::Kernels& kernels) {
    return kernels.cells[lltm::Lltm::kCell.id];
  }
  template <typename E>
  E* part(std::vector<E>& memory, int64_t index) const {
    return memory.data() + index * rows * hidden;
  }
};

}  // namespace lltm_bench
