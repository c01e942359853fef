#include "cpu/bias.h"

#include "common/tensor_views.h"
#include "common/weights.h"
#include "cpu/dispatch.h"
#include "cpu/kernel/elementwise.h"

#include <ATen/ops/empty.h>

namespace lltm::cpu {

using at::Tensor;

Tensor slot_bias(
    const CellInfo& cell, const Tensor& bias_ih, const Tensor& bias_hh, int64_t hidden) {
  if (!bias_ih.defined() && !bias_hh.defined()) return {};
  const Tensor& any = bias_ih.defined() ? bias_ih : bias_hh;
  const at::ScalarType dtype = compute_dtype(any.scalar_type());
  if (!bias_hh.defined() && cell.x.count() == cell.slots) {
    const Tensor bias = x_slots(biases_of(bias_ih, cell), cell);
    return bias.scalar_type() == dtype && bias.is_contiguous() ? bias : bias.to(dtype).contiguous();
  }
  const Tensor sum = at::empty({cell.slots * hidden}, any.options().dtype(dtype));
  visit_dtype(any.scalar_type(), [&]<typename T>(T*) {
    using C = compute_t<T>;
    const Tensor ih = bias_ih.defined() ? bias_ih.to(dtype).contiguous() : Tensor();
    const Tensor hh = bias_hh.defined() ? bias_hh.to(dtype).contiguous() : Tensor();
    const C* const b_x = ih.defined() ? ih.const_data_ptr<C>() : nullptr;
    const C* const b_h = hh.defined() ? hh.const_data_ptr<C>() : nullptr;
    C* const to = sum.mutable_data_ptr<C>();
    for (int slot = 0; slot < cell.slots; ++slot) {
      const bool x = b_x != nullptr && cell.x.contains(slot);
      const bool h = b_h != nullptr && cell.h.contains(slot);
      const C* const from_x = x ? b_x + cell.x_blocks[slot] * hidden : nullptr;
      const C* const from_h = h ? b_h + cell.h_blocks[slot] * hidden : nullptr;
      C* const out = to + slot * hidden;
      for (int64_t j = 0; j < hidden; ++j) out[j] = (x ? from_x[j] : 0) + (h ? from_h[j] : 0);
    }
  });
  return sum;
}

Tensor cell_parameters(const CellInfo& cell, const Tensor& bias_ih) {
  if (cell.parameters == 0) return {};
  return parameters_of(bias_ih, cell).to(compute_dtype(bias_ih.scalar_type())).contiguous();
}

}  // namespace lltm::cpu
