// The rows of a sequence whose state starts anew before a step, and what the engine does with them;
// cpu/engine/resets.h is the same on the CPU. The mask stays where it is: to find its rows, the GPU
// would have to be waited for.
#pragma once

#include "cell/cell.h"
#include "common/operator_args.h"
#include "common/steps.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/masked_fill.h>

namespace lltm::cuda {

class Resets {
 public:
  // `reset` is (T, B) or (N), bool; none where undefined.
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

// h, of the first columns, and c where `anew` says so.
inline void restart(
    const CellInfo& cell,
    const at::Tensor& h,
    const at::Tensor& c,
    int64_t hidden,
    const at::Tensor& anew) {
  const at::Tensor rows = c.narrow(0, 0, anew.size(0));
  h.narrow(0, 0, anew.size(0)).masked_fill_(anew, 0);
  for (int k = 0; k < cell.state_columns(); ++k) {
    rows.narrow(1, k * hidden, hidden).masked_fill_(anew, first_value(cell, k));
  }
}

// The state before a reset has no part in what follows.
inline void clear_gradients(const at::Tensor& dh, const at::Tensor& dc, const at::Tensor& anew) {
  dh.narrow(0, 0, anew.size(0)).masked_fill_(anew, 0);
  dc.narrow(0, 0, anew.size(0)).masked_fill_(anew, 0);
}

}  // namespace lltm::cuda
