#pragma once

#include "common/operator_args.h"
#include "common/step_io.h"
#include "cpu/dispatch.h"
#include "cpu/machine.h"
#include "cpu/threads/parallel.h"

#include <ATen/core/Tensor.h>

#include <type_traits>

namespace lltm::cpu {

// float64 has no GEMM kernel for weights in place.
template <typename T>
constexpr bool kHasGemm = !std::is_same_v<T, double>;

// 0 if rows are not contiguous.
inline int64_t row_stride(const at::Tensor& w) {
  return w.stride(-1) == 1 && w.stride(0) >= w.size(-1) ? w.stride(0) : 0;
}

inline StepSchedule schedule_of(const SequenceInputs& args) {
  const int64_t stride_ih = row_stride(args.weight_ih);
  const bool concatenated = !args.weight_hh.defined();
  const StepShape shape = {
      args.h_0->size(0),
      args.input->size(-1),
      args.h_0->size(1),
      storage_of(args.input->scalar_type()),
      weights_stride(stride_ih, concatenated ? stride_ih : row_stride(args.weight_hh)),
      slots_of(*args.cell)};
  return schedule_step(current_machine(), shape);
}

inline StepIO io_of_only_step(const SequenceInputs& args) {
  return {args, {0, args.h_0->size(0)}};
}
// With input (B, I) and the states after mask and reset.
inline SequenceInputs entered(const SequenceInputs& args, const StepIO& io) {
  return {
      args.cell,
      flat_rows(args.input),
      io.enter_h(args.h_0),
      io.enter_c(args.c_0),
      args.weight_ih,
      args.weight_hh,
      args.bias_ih,
      args.bias_hh};
}

template <typename Body>
void for_each_block(const Partition& blocks, int64_t threads, const Body& body) {
  const int64_t grain = (blocks.count + threads - 1) / threads;
  parallel_for(blocks.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) body(block);
  });
}

}  // namespace lltm::cpu
