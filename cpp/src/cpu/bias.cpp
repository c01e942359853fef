#include "cpu/bias.h"

#include "common/tensor_views.h"
#include "common/weights.h"
#include "cpu/dispatch.h"
#include "cpu/gemm/gemm.h"
#include "cpu/kernel/elementwise.h"

namespace lltm::cpu {

using at::Tensor;

Tensor slot_bias(
    const CellInfo& cell, const Tensor& bias_ih, const Tensor& bias_hh, int64_t hidden) {
  if (!bias_ih.defined() && !bias_hh.defined()) return {};
  const Tensor& any = bias_ih.defined() ? bias_ih : bias_hh;
  const at::ScalarType dtype = compute_dtype(any.scalar_type());
  const auto contiguous = [&](const Tensor& bias) {
    return bias.defined() ? converted(bias, dtype).contiguous() : bias;
  };
  if (!bias_hh.defined() && cell.x.count() == cell.slots) {
    return contiguous(x_slots(biases_of(bias_ih, cell), cell));
  }
  const Tensor sum = new_tensor({cell.slots * hidden}, any.options().dtype(dtype));
  const Tensor ih = contiguous(bias_ih), hh = contiguous(bias_hh);
  visit_dtype(any.scalar_type(), [&]<typename T>(T*) {
    using C = compute_t<T>;
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
