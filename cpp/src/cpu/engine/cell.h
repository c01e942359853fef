// What the two halves of a step, cell_forward.cpp and cell_backward.cpp, share.
#pragma once

#include "cpu/dispatch.h"
#include "cpu/machine.h"
#include "cpu/parallel.h"

#include <ATen/core/Tensor.h>

#include <type_traits>

namespace lltm::cpu {

// The dtypes of storage but float64 have GEMM kernels that read weights as they lie.
template <typename T>
constexpr bool kHasGemm = !std::is_same_v<T, double>;

inline CellSchedule schedule_of(
    const at::Tensor& input, const at::Tensor& h, const at::Tensor& weights) {
  const bool rows = weights.stride(1) == 1 && weights.stride(0) >= weights.size(1);
  const CellShape shape = {
      h.size(0),
      input.size(1),
      h.size(1),
      storage_of(input.scalar_type()),
      rows ? weights.stride(0) : 0};
  return schedule_cell(current_machine(), shape);
}

// Calls body(block), with the blocks shared out among `threads`.
template <typename Body>
void for_each_block(const Blocks& blocks, int64_t threads, const Body& body) {
  const int64_t grain = (blocks.count + threads - 1) / threads;
  parallel_for(blocks.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) body(block);
  });
}

}  // namespace lltm::cpu
