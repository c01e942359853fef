// The per-step engine (aten/per_step.h) on a GPU: cuBLAS, and an element-wise kernel per stage. A
// cell without products and means has one stage.
#include "aten/per_step.h"
#include "common/tensor_views.h"
#include "cuda/engine/engine.h"
#include "cuda/kernel/compiled.h"
#include "cuda/kernel/elementwise_kernels.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace lltm::cuda {
namespace {

using at::Tensor;

// From here on, every multiprocessor gets several warps in the wide form. Below, more threads with
// one unit each are faster.
constexpr std::int64_t kWideElements = 1 << 17;

template <typename T, typename Step>
class StepKernels : public StepDevice<Step> {
 public:
  StepKernels(const SequenceInputs& args, const Pass& pass)
      : cell_(*args.cell),
        hidden_(args.h_0->size(1)),
        stream_(current_stream()),  // before the cuBLAS handle: PyTorch warns without a context
        gemm_(args.input->scalar_type()),
        bias_ih_(read_row<T>(args.bias_ih)),
        pass_(pass) {
    if (pass.count == 1) return;
    const auto wide = compute_options(args.input);
    const int64_t batch = args.h_0->size(0);
    kept_ = at::empty({batch, pass.kept * hidden_}, wide);
    terms_ = at::empty({batch, pass.means * hidden_}, wide);
    means_ = at::empty({batch, pass.means}, wide);
  }

  const DeviceGemm& gemm() const override { return gemm_; }
  void average(int stage, std::int64_t rows) const override {
    const auto [begin, end] = pass_.stages[stage].means;
    const int64_t count = end - begin;
    if (count == 0) return;
    Tensor to = means_.narrow(0, 0, rows).narrow(1, begin, count);
    const Tensor from = terms_.narrow(0, 0, rows).narrow(1, begin * hidden_, count * hidden_);
    at::mean_out(to, from.view({rows, count, hidden_}), {-1});
  }

 protected:
  static constexpr bool kBackward = std::is_same_v<Step, BackwardStep>;

  // Values in blocks of H columns.
  template <typename Element>
  StageMatrix<Element> in_blocks(const Matrix<Element>& matrix) const {
    return stage_matrix(matrix, hidden_ * matrix.col_stride);
  }

  template <typename D>
  void launch(int s, std::int64_t rows, StageArgs<T, D, kBackward>& args) const {
    using V = compute_t<T>;
    if (rows == 0 || hidden_ == 0) return;
    const Stage& stage = pass_.stages[s];
    args.hidden = hidden_;
    args.bias_ih = in_blocks(bias_ih_);
    args.kept = in_blocks(view(kept_).as<V>());
    args.terms = in_blocks(view(terms_).as<V>());
    args.means = stage_matrix(view(means_).as<V>(), 1);
    const bool is_wide = fits_wide<T>(stage.program, hidden_) && rows * hidden_ >= kWideElements;
    const int width = is_wide ? kWide<T> : 1;
    std::int64_t count = rows * (hidden_ / width);
    void* parameters[] = {&args, &count};
    const KernelForm form = {&cell_, kBackward, kKernelType<T>, kKernelType<D>, width, &stage};
    const Grid grid = {blocks_for(count), 1, 1, kThreads, 0, /*cooperative=*/false};
    launch_compiled(form, grid, parameters, stream_);
  }

  const CellInfo& cell_;
  const int64_t hidden_;
  const Stream stream_;
  const Gemm gemm_;
  const Matrix<const T> bias_ih_;  // then parameters

 private:
  const Pass& pass_;
  Tensor kept_, terms_, means_;  // between stages (program.h), in the compute dtype
};

template <typename T>
class ForwardKernels final : public StepKernels<T, ForwardStep> {
  using Base = StepKernels<T, ForwardStep>;

 public:
  explicit ForwardKernels(const SequenceArgs& args)
      : Base(args, args.cell->forward()), bias_hh_(read_row<T>(args.bias_hh)) {}

  void run(int stage, const ForwardStep& step) const override {
    using V = compute_t<T>;
    StageArgs<T, V, false> args;
    args.gates = Base::in_blocks(step.z.as<V>());
    args.bias_hh = Base::in_blocks(bias_hh_);
    args.states = Base::in_blocks(step.c.as<T>());
    args.next_states = Base::in_blocks(step.c_next.as<T>());
    args.h = Base::in_blocks(step.h_next.as<T>());
    args.h_of_gemm = Base::in_blocks(step.h_operand.as<T>());
    args.saved = Base::in_blocks(step.saved.as<T>());
    args.operands = stage_matrix(step.operands.as<T>(), step.operand_stride);
    Base::launch(stage, step.rows, args);
  }

 private:
  const Matrix<const T> bias_hh_;
};

template <typename T>
class BackwardKernels final : public StepKernels<T, BackwardStep> {
  using Base = StepKernels<T, BackwardStep>;

 public:
  explicit BackwardKernels(const SequenceBackwardArgs& args)
      : Base(args, args.cell->backward()), in_place_(is_in_place(args)) {}

  void run(int stage, const BackwardStep& step) const override {
    in_place_ ? run_with<T>(stage, step) : run_with<compute_t<T>>(stage, step);
  }

 private:
  // D: dtype of the gradients of states.
  template <typename D>
  void run_with(int stage, const BackwardStep& step) const {
    StageArgs<T, D, true> args;
    args.gates = Base::in_blocks(step.dz.as<T>());
    args.states = Base::in_blocks(step.grad_c.as<D>());
    args.next_states = Base::in_blocks(step.grad_c_prev.as<D>());
    args.h = Base::in_blocks(step.grad_h.as<T>());
    args.h_of_gemm = Base::in_blocks(step.grad_h_state.as<D>());
    args.saved = Base::in_blocks(step.saved.as<T>());
    args.operands = stage_matrix(step.grad_operands.as<compute_t<T>>(), step.operand_stride);
    Base::launch(stage, step.rows, args);
  }

  const bool in_place_;
};

}  // namespace

SequenceResult per_step_forward(const SequenceArgs& args, int64_t workspace_bytes) {
  return visit_dtype<c10::Half, c10::BFloat16>(args.input->scalar_type(), [&]<typename T>(T*) {
    return lltm::per_step_forward(args, ForwardKernels<T>(args), workspace_bytes);
  });
}

Gradients per_step_backward(const SequenceBackwardArgs& args) {
  return visit_dtype<c10::Half, c10::BFloat16>(args.input->scalar_type(), [&]<typename T>(T*) {
    return lltm::per_step_backward(args, BackwardKernels<T>(args));
  });
}

}  // namespace lltm::cuda
