// The small-layer engine: a call of a kernel computes all steps (kernel/small_layer.h). For
// inference with weights that stay in the cache as float32, and few sequences, where the other
// engines take longer to set up a step than to compute it.
#include "common/tensor_steps.h"
#include "common/tensor_views.h"
#include "cpu/bias.h"
#include "cpu/engine/engine.h"
#include "cpu/engine/step_io.h"
#include "cpu/prepack.h"

#include <algorithm>
#include <vector>

namespace lltm::cpu {

using at::Tensor;

SequenceResult small_layer_forward(const SequenceArgs& args) {
  const CellInfo& cell = *args.cell;
  const int64_t batch = args.h_0->size(0), hidden = args.h_0->size(1);
  const auto packed =
      args.prepacked() ? read_packed<F32Format>(cell, bytes_of(args.weight_ih))
                       : *pack_weights<F32Format>(
                             cell,
                             WeightTensors(cell, args.weight_ih, args.weight_hh, at::kFloat).views,
                             Partition(hidden, kLayerUnits));
  std::vector<int64_t> begins;
  for (int64_t block = 0; block < packed.blocks.count; ++block) {
    begins.push_back(packed.blocks.begin(block));
  }
  begins.push_back(hidden);
  const at::TensorOptions options = args.input->options();
  const Tensor input = args.input->contiguous();
  const Tensor output = new_tensor(output_sizes(input, hidden), options);
  const Tensor h_n = new_tensor({batch, hidden}, options);
  copy_rows(read<float>(args.h_0), write<float>(h_n), batch, hidden);

  const int64_t padded = round_up(hidden, kLayerUnits);
  const Workspace<float> memory((cell.slots + batch) * padded);
  std::fill_n(memory.data(), (cell.slots + batch) * padded, 0.0f);
  const Matrix<float> bias = {memory.data(), padded}, c = bias.from(cell.slots);
  if (const Tensor sums = slot_bias(args, hidden); sums.defined()) {
    copy_rows(Matrix<const float>{sums.const_data_ptr<float>(), hidden}, bias, cell.slots, hidden);
  }
  copy_rows(read<float>(args.c_0), c, batch, hidden);

  const int64_t steps = args.is_step() ? 1 : input.size(0), direction = args.reverse ? -1 : 1;
  const int64_t first = args.reverse ? steps - 1 : 0;
  const int64_t x_step = batch * input.size(-1), y_step = batch * hidden;
  const SmallLayer layer = {
      .input = input.size(-1),
      .hidden = hidden,
      .padded = padded,
      .batch = batch,
      .x_step = direction * x_step,
      .y_step = direction * y_step,
      .weights = packed.data,
      .blocks = packed.blocks.count,
      .begins = begins.data(),
      .bias = bias.data,
      .h = h_n.mutable_data_ptr<float>(),
      .c = c.data};
  kernels().cells[cell.native].small_layer(
      layer,
      input.const_data_ptr<float>() + first * x_step,
      output.mutable_data_ptr<float>() + first * y_step,
      steps);
  // The caller discards the c of a cell without c (backend_call.h), unless int8 falls back.
  if (!cell.has_c() && args.prepacked()) return {output, h_n, Tensor(), Tensor()};
  const Tensor c_n = new_tensor({batch, hidden}, options);
  copy_rows(as_const(c), write<float>(c_n), batch, hidden);
  return {output, h_n, c_n, Tensor()};
}

}  // namespace lltm::cpu
