// Result shapes and dtypes for fake tensors, torch.compile and the meta device.
#include "common/checkpoints.h"
#include "op/backend.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <vector>

namespace lltm {
namespace {

using at::Tensor;
using c10::SymInt;

Tensor empty(const Tensor& like, std::vector<SymInt> shape) {
  return at::empty_symint(shape, like.options());
}

Tensor contiguous_like(const Tensor& tensor) {
  return empty(tensor, tensor.sym_sizes().vec());
}

SymInt c_columns(const CellInfo& cell, const Tensor& h) {
  return h.sym_size(1) * cell.state_columns();
}
Tensor c_like(const CellInfo& cell, const Tensor& h) {
  return empty(h, {h.sym_size(0), c_columns(cell, h)});
}

Tensor activations(const CellInfo& cell, const SymInt& rows, const Tensor& h) {
  return empty(h, {rows, h.sym_size(1) * cell.saved});
}

Tensor checkpoints(const SequenceArgs& args) {
  const SymInt steps = args.batch_sizes.defined() ? args.batch_sizes->sym_numel()
                       : args.is_step()           ? SymInt(1)
                                                  : args.input->sym_size(0);
  const SymInt count = checkpoint_count(steps, args.checkpoint_steps);
  return empty(args.input, {count, args.h_0->sym_size(0), c_columns(*args.cell, args.h_0)});
}

struct Meta {
  using DeviceGuard = NoDeviceGuard;

  static SequenceResult forward(const SequenceArgs& args) {
    const SymInt hidden = args.h_0->sym_size(1);
    std::vector<SymInt> shape = args.input->sym_sizes().vec();
    const SymInt rows = shape.size() == 2 ? shape[0] : shape[0] * shape[1];
    shape.back() = hidden * args.cell->output_columns();
    return {
        args.is_step() ? Tensor() : empty(args.input, std::move(shape)),
        contiguous_like(args.h_0),
        c_like(*args.cell, args.h_0),
        args.saves_checkpoints()   ? checkpoints(args)
        : args.saves_activations() ? activations(*args.cell, rows, args.h_0)
                                   : Tensor()};
  }

  static Gradients backward(const SequenceBackwardArgs& args) {
    const auto wanted = [&](size_t k, const Tensor& like) {
      return args.output_mask[k] ? contiguous_like(like) : Tensor();
    };
    return {
        wanted(0, args.input),
        wanted(1, args.h_0),
        args.output_mask[2] ? c_like(*args.cell, args.h_0) : Tensor(),
        wanted(3, args.weight_ih),
        wanted(4, args.weight_hh),
        wanted(5, args.bias_ih),
        wanted(6, args.bias_hh)};
  }
  static constexpr auto checkpointed_backward = backward;

  // The size of packed weights depends on the CPU.
  static Tensor prepack(
      const CellInfo&, const Tensor&, const Tensor&, std::optional<at::ScalarType>) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "lltm::prepack: expected weights with data, got a tensor without data; prepack before"
        " tracing a graph, and not on the meta device");
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  register_backend<Meta>(m);
}

}  // namespace lltm
