// The per-step engine (aten/per_step.h) on the CPU: ATen's GEMMs and the element-wise kernels.
// 16-bit h, dz and weights are widened to float32: pre-activations are not rounded, and CPUs
// without float16 arithmetic are faster.
#include "aten/per_step.h"
#include "cpu/bias.h"
#include "cpu/dispatch.h"
#include "cpu/engine/between_stages.h"
#include "cpu/engine/engine.h"
#include "cpu/schedule.h"
#include "cpu/threads/parallel.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <array>
#include <limits>

namespace lltm::cpu {
namespace {

using at::Tensor;

class AtenGemm final : public DeviceGemm {
 public:
  explicit AtenGemm(at::ScalarType dtype) : dtype_(dtype) {}

  void operator()(const GemmOperand& a, const GemmOperand& b, const GemmResult& c, bool accumulate)
      const override {
    if (c.rows == 0 || c.cols == 0 || (a.cols == 0 && accumulate)) return;
    Tensor out = tensor(c.data, c.rows, c.cols, {c.ld, 1});
    if (a.cols == 0) {
      out.zero_();
      return;
    }
    const Tensor left = tensor(a), right = tensor(b);
    if (!accumulate) {
      at::mm_out(out, left, right);
      return;
    }
#if defined(__aarch64__)  // ATen's addmm_ continues the sums in `out`: rounding errors grow
    out.add_(at::mm(left, right));
#else
    out.addmm_(left, right);
#endif
  }

  at::ScalarType dtype() const override { return dtype_; }
  // Some BLAS libraries accumulate all products in one chain, whose length increases rounding
  // errors. Accumulating GEMMs may continue it.
  SumLimits over_rows() const override { return {kGradientChain, 1}; }

 private:
  Tensor tensor(
      const void* data, int64_t rows, int64_t cols, std::array<int64_t, 2> strides) const {
    return at::from_blob(const_cast<void*>(data), {rows, cols}, strides, at::TensorOptions(dtype_));
  }
  Tensor tensor(const GemmOperand& a) const {
    return tensor(
        a.data,
        a.rows,
        a.cols,
        a.transposed ? std::array<int64_t, 2>{1, a.ld} : std::array<int64_t, 2>{a.ld, 1});
  }

  const at::ScalarType dtype_;
};

template <typename Step, typename Args, typename C>
class StepKernels : public StepDevice<Step> {
 public:
  StepKernels(const SequenceInputs& args, const Pass& pass)
      : gemm_(compute_dtype(args.input->scalar_type())),
        parameters_(cell_parameters(*args.cell, args.bias_ih)),
        between_(pass, args.h_0->size(0), args.h_0->size(1), /*readers=*/1) {
    args_.cell = &*args.cell;
    args_.hidden = args_.layer_hidden = args.h_0->size(1);
    args_.parameters = read_row<C>(parameters_);
  }

  const DeviceGemm& gemm() const override { return gemm_; }
  void average(int stage, int64_t rows) const override {
    if (between_.has_means()) between_.average(stage, {0, rows}, 0);
  }

 protected:
  // Means need complete rows.
  template <typename Kernel>
  void run_stage(Args args, int stage, int64_t rows, const Kernel& kernel) const {
    const StageMemory<C> stages = between_.memory(stage, 0);
    if (stages.stage != nullptr) args.stages = &stages;
    const int64_t unit = stages.stage == nullptr ? 1 : std::max<int64_t>(args.hidden, 1);
    const int64_t grain = divide_up(kElementwiseGrain, unit);
    parallel_for(rows * args.hidden / unit, grain, [&](int64_t begin, int64_t end) {
      kernel(args, begin * unit, end * unit);
    });
  }

  Args args_;

 private:
  const AtenGemm gemm_;
  const Tensor parameters_;
  const BetweenStages<C> between_;
};

template <typename T, typename C = compute_t<T>>
class ForwardKernels final : public StepKernels<ForwardStep, ForwardArgs<T, C>, C> {
 public:
  explicit ForwardKernels(const SequenceArgs& args)
      : StepKernels<ForwardStep, ForwardArgs<T, C>, C>(args, args.cell->forward()),
        bias_(slot_bias(args, args.h_0->size(1))) {
    this->args_.z_stride = args.h_0->size(1);
  }

  // A GEMM that continues them costs less than the kernels' sums.
  Tensor bias() const override { return bias_; }

  void run(int stage, const ForwardStep& step) const override {
    ForwardArgs<T, C> args = this->args_;
    std::array<Matrix<C>, CellInfo::kMostSlots> operands;
    for (int p = 0; p < args.cell->operands().count; ++p) {
      operands[p] = step.operands.as<C>().from(0, p * step.operand_stride);
    }
    args.operands = operands.data();
    args.z = step.z.as<const C>();
    args.c = step.c.as<const T>();
    args.c_next = step.c_next.as<T>();
    args.h_next = step.h_next.as<T>();
    args.h_operand = step.h_operand.as<C>();
    args.saved = step.saved.as<T>();
    this->run_stage(args, stage, step.rows, elementwise<T, C>(*args.cell).forward);
  }

 private:
  const Tensor bias_;
};

template <typename T, typename C = compute_t<T>>
class BackwardKernels final : public StepKernels<BackwardStep, BackwardArgs<T, C>, C> {
 public:
  explicit BackwardKernels(const SequenceBackwardArgs& args)
      : StepKernels<BackwardStep, BackwardArgs<T, C>, C>(args, args.cell->backward()) {}

  void run(int stage, const BackwardStep& step) const override {
    BackwardArgs<T, C> args = this->args_;
    args.saved = step.saved.as<const T>();
    args.grad_h = step.grad_h.as<const T>();
    args.grad_h_state = step.grad_h_state.as<const C>();
    args.grad_c = step.grad_c.as<const C>();
    args.grad_c_prev = step.grad_c_prev.as<C>();
    args.dz = step.dz.as<C>();
    args.grad_operands = step.grad_operands.as<const C>();
    this->run_stage(args, stage, step.rows, elementwise<T, C>(*args.cell).backward);
  }
};

}  // namespace

// With few elements, each step is projected as in PyTorch: a GEMM with many rows rounds
// differently, and the errors are not averaged out.
SequenceResult per_step_forward(const SequenceArgs& args) {
  const bool few = has_few_elements(args.h_0->size(0), args.h_0->size(1));
  const int64_t workspace_bytes = few ? 0 : std::numeric_limits<int64_t>::max();
  return visit_dtype(args.input->scalar_type(), [&]<typename T>(T*) {
    return lltm::per_step_forward(args, ForwardKernels<T>(args), workspace_bytes);
  });
}

Gradients per_step_backward(const SequenceBackwardArgs& args) {
  return visit_dtype(args.input->scalar_type(), [&]<typename T>(T*) {
    return lltm::per_step_backward(args, BackwardKernels<T>(args));
  });
}

}  // namespace lltm::cpu
