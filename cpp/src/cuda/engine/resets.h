// Like cpu/engine/resets.h, but the mask stays on the GPU: reading its rows would wait for the GPU.
#pragma once

#include "cell/cell.h"
#include "common/operator_args.h"
#include "common/steps.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/masked_fill.h>

namespace lltm::cuda {

class Resets {
 public:
  // (T, B) or (N), bool, or undefined.
  explicit Resets(const at::Tensor& reset) {
    if (reset.defined()) flat_ = reset.reshape(-1);
  }

  bool any() const { return flat_.defined(); }
  // (rows, 1)
  at::Tensor of(const Step& step) const {
    return flat_.narrow(0, step.offset, step.rows).unsqueeze(1);
  }

 private:
  at::Tensor flat_;
};

// Where `mask`, h (the first `hidden` columns) is zero and c initial.
inline void restart(
    const CellInfo& cell,
    const at::Tensor& h,
    const at::Tensor& c,
    int64_t hidden,
    const at::Tensor& mask) {
  const at::Tensor rows = c.narrow(0, 0, mask.size(0));
  h.narrow(0, 0, mask.size(0)).masked_fill_(mask, 0);
  for (int k = 0; k < cell.state_columns(); ++k) {
    rows.narrow(1, k * hidden, hidden).masked_fill_(mask, first_value(cell, k));
  }
}

inline void clear_gradients(const at::Tensor& dh, const at::Tensor& dc, const at::Tensor& mask) {
  dh.narrow(0, 0, mask.size(0)).masked_fill_(mask, 0);
  dc.narrow(0, 0, mask.size(0)).masked_fill_(mask, 0);
}

}  // namespace lltm::cuda
