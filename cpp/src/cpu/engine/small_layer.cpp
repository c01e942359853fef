// The small-layer engine: a call of a kernel computes all steps (kernel/small_layer.h). For
// inference with weights that stay in the cache as float32, and few sequences, where the other
// engines take longer to set up a step than to compute it.
#include "common/memory.h"
#include "cpu/engine/forward_call.h"
#include "cpu/engine/step_io.h"
#include "cpu/kernels.h"
#include "cpu/packed_weights.h"

#include <algorithm>
#include <vector>

namespace lltm::cpu {

void run_small_layer(const ForwardCall& call, int64_t steps) {
  const CellInfo& cell = call.cell;
  const int64_t batch = call.batch, hidden = call.hidden;
  const auto packed = call.packed.empty() ? *pack_weights<F32Format>(
                                                cell, call.weights, Partition(hidden, kLayerUnits))
                                          : read_packed<F32Format>(cell, call.packed);
  std::vector<int64_t> begins;
  for (int64_t block = 0; block < packed.blocks.count; ++block) {
    begins.push_back(packed.blocks.begin(block));
  }
  begins.push_back(hidden);
  const Matrix<float> h = {static_cast<float*>(call.h_n), hidden};
  copy_rows(call.h_0.as<const float>(), h, batch, hidden);

  const int64_t padded = round_up(hidden, kLayerUnits);
  const Workspace<float> memory((cell.slots + batch) * padded);
  std::fill_n(memory.data(), (cell.slots + batch) * padded, 0.0f);
  const Matrix<float> bias = {memory.data(), padded}, c = bias.from(cell.slots);
  if (call.bias != nullptr) {
    copy_rows(Matrix<const float>{call.bias, hidden}, bias, cell.slots, hidden);
  }
  copy_rows(call.c_0.as<const float>(), c, batch, hidden);

  const int64_t direction = call.reverse ? -1 : 1, first = call.reverse ? steps - 1 : 0;
  const int64_t x_step = batch * call.input_size, y_step = batch * hidden;
  const SmallLayer layer = {
      .input = call.input_size,
      .hidden = hidden,
      .padded = padded,
      .batch = batch,
      .x_step = direction * x_step,
      .y_step = direction * y_step,
      .weights = packed.data,
      .blocks = packed.blocks.count,
      .begins = begins.data(),
      .bias = bias.data,
      .h = h.data,
      .c = c.data};
  kernels().cells[cell.native].small_layer(
      layer,
      static_cast<const float*>(call.input.first.data) + first * x_step,
      static_cast<float*>(call.output) + first * y_step,
      steps);
  if (call.c_n == nullptr) return;
  copy_rows(as_const(c), Matrix<float>{static_cast<float*>(call.c_n), hidden}, batch, hidden);
}

}  // namespace lltm::cpu
