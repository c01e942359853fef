#pragma once

#include "common/operator_args.h"
#include "cpu/dispatch.h"
#include "cpu/machine.h"
#include "cpu/parallel.h"

#include <ATen/core/Tensor.h>

#include <type_traits>

namespace lltm::cpu {

// float64 has no GEMM kernel for weights in place.
template <typename T>
constexpr bool kHasGemm = !std::is_same_v<T, double>;

inline StepSchedule schedule_of(const StepInputs& args) {
  const auto has_rows = [](const at::Tensor& w) {
    return w.stride(1) == 1 && w.stride(0) >= w.size(1);
  };
  const at::Tensor& ih = *args.weight_ih;
  const at::Tensor& hh = args.weight_hh.defined() ? *args.weight_hh : ih;
  // An odd stride, if any: the bfloat16 kernel requires even strides (VNNI pairs).
  const int64_t stride = ih.stride(0) % 2 != 0 ? ih.stride(0) : hh.stride(0);
  const StepShape shape = {
      args.h->size(0),
      args.input->size(1),
      args.h->size(1),
      storage_of(args.input->scalar_type()),
      has_rows(ih) && has_rows(hh) ? stride : 0,
      slots_of(*args.cell)};
  return schedule_step(current_machine(), shape);
}

template <typename Body>
void for_each_block(const Blocks& blocks, int64_t threads, const Body& body) {
  const int64_t grain = (blocks.count + threads - 1) / threads;
  parallel_for(blocks.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) body(block);
  });
}

}  // namespace lltm::cpu
