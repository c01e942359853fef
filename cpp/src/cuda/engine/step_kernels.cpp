// The per-step engine (aten/per_step.h) on a GPU: cuBLAS, and an element-wise kernel per step or,
// in cells with several, per stage.
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

namespace lltm::cuda {
namespace {

using at::Tensor;

// From here on, every multiprocessor gets several warps in the wide form. Below, more threads with
// one unit each are faster.
constexpr std::int64_t kWideElements = 1 << 17;

// D: dtype of the gradients of states.
template <typename T, typename D, typename Args>
void launch_step(const CellInfo& cell, bool backward, const Args& args, Stream stream) {
  if (args.rows == 0 || args.hidden == 0) return;
  const bool is_wide = fits_wide<T>(cell, args.hidden) && args.rows * args.hidden >= kWideElements;
  const int width = is_wide ? kWide<T> : 1;
  std::int64_t count = args.rows * (args.hidden / width);
  auto access = access_of(args);
  void* parameters[] = {const_cast<Args*>(&args), &access, &count};
  const KernelForm form = {&cell, backward, kKernelType<T>, kKernelType<D>, width};
  const Grid grid = {blocks_for(count), 1, 1, kThreads, 0, /*cooperative=*/false};
  launch_compiled(form, grid, parameters, stream);
}

template <typename Element>
StagePort port(const View& view, std::int64_t column = 0) {
  if (view.data == nullptr) return {};
  auto* const data = static_cast<Element*>(view.data) + column * view.col_stride;
  return {data, view.row_stride, view.col_stride};
}

// Values between stages (program.h), in the compute dtype.
template <typename T>
class BetweenStages {
 public:
  using C = compute_t<T>;

  BetweenStages(const Pass& pass, const SequenceInputs& args)
      : pass_(pass), hidden_(args.h_0->size(1)) {
    if (!any()) return;
    const auto wide = compute_options(args.input);
    const int64_t batch = args.h_0->size(0);
    kept_ = at::empty({batch, pass.kept * hidden_}, wide);
    terms_ = at::empty({batch, pass.means * hidden_}, wide);
    means_ = at::empty({batch, pass.means}, wide);
  }

  bool any() const { return pass_.count > 1; }
  const Stage& stage(int s) const { return pass_.stages[s]; }

  StagePort kept(int k) const { return column(kept_, k * hidden_); }
  StagePort terms(int mean) const { return column(terms_, mean * hidden_); }
  StagePort mean(int k) const {
    return {means_.mutable_data_ptr<C>() + k, means_.stride(0), /*col_stride=*/0};
  }

  void average(int s, int64_t rows) const {
    if (stage(s).means.count() == 0) return;
    const auto [begin, end] = stage(s).means;
    const int64_t count = end - begin;
    Tensor to = means_.narrow(0, 0, rows).narrow(1, begin, count);
    const Tensor from = terms_.narrow(0, 0, rows).narrow(1, begin * hidden_, count * hidden_);
    at::mean_out(to, from.view({rows, count, hidden_}), {-1});
  }

 private:
  static StagePort column(const Tensor& values, int64_t first) {
    return {values.mutable_data_ptr<C>() + first, values.stride(0), 1};
  }

  const Pass& pass_;
  int64_t hidden_;
  Tensor kept_, terms_, means_;
};

template <typename T, typename Step>
class StepKernels : public StepDevice<Step> {
 public:
  using C = compute_t<T>;

  StepKernels(const SequenceInputs& args, const Pass& pass)
      : cell_(*args.cell),
        hidden_(args.h_0->size(1)),
        stream_(current_stream()),  // before the cuBLAS handle: PyTorch warns without a context
        gemm_(args.input->scalar_type()),
        bias_ih_(read_row<T>(args.bias_ih)),
        parameters_(bias_ih_.from(0, cell_.x.count() * hidden_)),
        between_(pass, args) {}

  const DeviceGemm& gemm() const override { return gemm_; }
  void average(int stage, std::int64_t rows) const override { between_.average(stage, rows); }

 protected:
  // Sets the ports of `args`. port_of(port, is_output) returns where a value of the stage is. D: as
  // in launch_step.
  template <typename D, typename PortOf>
  void launch_stage(
      int s, bool backward, std::int64_t rows, StageArgs<>& args, const PortOf& port_of) const {
    std::int64_t count = rows * hidden_;
    if (count == 0) return;
    const Stage& stage = between_.stage(s);
    const int inputs = stage.program.inputs;
    args.hidden = hidden_;
    for (int k = 0; k < inputs + stage.program.outputs; ++k) {
      const Port& of = stage.ports[k];
      args.ports[k] = of.place == Place::kKept ? between_.kept(of.index)
                      : of.place == Place::kMean
                          ? (k < inputs ? between_.mean(of.index) : between_.terms(of.index))
                          : port_of(of, /*is_output=*/k >= inputs);
    }
    const KernelForm form = {&cell_, backward, kKernelType<T>, kKernelType<D>, /*width=*/1, &stage};
    const Grid grid = {blocks_for(count), 1, 1, kThreads, 0, /*cooperative=*/false};
    char of_types[8] = {};  // the kernel's second argument, unused
    void* parameters[] = {&args, of_types, &count};
    launch_compiled(form, grid, parameters, stream_);
  }

  StagePort parameter(int k) const {
    const Matrix<const T> p = parameters_.from(0, k * hidden_);
    return {const_cast<T*>(p.data), 0, p.col_stride};
  }

  const CellInfo& cell_;
  const int64_t hidden_;
  const Stream stream_;
  const Gemm gemm_;
  const Matrix<const T> bias_ih_, parameters_;
  const BetweenStages<T> between_;
};

template <typename T>
class ForwardKernels final : public StepKernels<T, ForwardStep> {
  using Base = StepKernels<T, ForwardStep>;
  using Base::bias_ih_, Base::cell_, Base::hidden_, Base::stream_;
  using C = compute_t<T>;

 public:
  explicit ForwardKernels(const SequenceArgs& args)
      : Base(args, args.cell->forward()), bias_hh_(read_row<T>(args.bias_hh)) {}

  void run(int stage, const ForwardStep& step) const override {
    if (Base::between_.any()) return run_stage(stage, step);
    ForwardArgs<T> args;
    args.rows = step.rows;
    args.hidden = hidden_;
    args.gates = step.z.as<const C>();
    args.bias_ih = bias_ih_;
    args.bias_hh = bias_hh_;
    args.parameters = Base::parameters_;
    args.c = step.c.as<const T>();
    args.h_next = step.h_next.as<T>();
    args.h_operand = step.h_operand.as<T>();
    args.c_next = step.c_next.as<T>();
    args.activations = step.saved.as<T>();
    launch_step<T, C>(cell_, /*backward=*/false, args, stream_);
  }

 private:
  void run_stage(int stage, const ForwardStep& step) const {
    StageArgs<> args = {};
    args.bias_ih = bias_port(bias_ih_);
    args.bias_hh = bias_port(bias_hh_);
    args.h_of_gemm = port<T>(step.h_operand);
    args.h_of_state = port<T>(step.c_next);
    const auto port_of = [&](const Port& of, bool is_output) -> StagePort {
      const int64_t column = of.index * hidden_;
      switch (of.place) {
        case Place::kGate:
          return port<C>(step.z, column);
        case Place::kState:
          return port<T>(is_output ? step.c_next : step.c, column);
        case Place::kParameter:
          return Base::parameter(of.index);
        case Place::kH:
          return port<T>(step.h_next);
        case Place::kSaved:
          return port<T>(step.saved, column);
        default:
          return port<T>(step.operands, of.index * step.operand_stride);
      }
    };
    Base::template launch_stage<C>(stage, /*backward=*/false, step.rows, args, port_of);
  }

  static StagePort bias_port(const Matrix<const T>& bias) {
    return {const_cast<T*>(bias.data), 0, bias.col_stride};
  }

  const Matrix<const T> bias_hh_;
};

template <typename T>
class BackwardKernels final : public StepKernels<T, BackwardStep> {
  using Base = StepKernels<T, BackwardStep>;
  using Base::cell_, Base::hidden_, Base::stream_;
  using C = compute_t<T>;

 public:
  explicit BackwardKernels(const SequenceBackwardArgs& args)
      : Base(args, args.cell->backward()), in_place_(is_in_place(args)) {}

  void run(int stage, const BackwardStep& step) const override {
    in_place_ ? run_with<T>(stage, step) : run_with<C>(stage, step);
  }

 private:
  template <typename D>
  void run_with(int stage, const BackwardStep& step) const {
    if (Base::between_.any()) return run_stage<D>(stage, step);
    BackwardArgs<T, D> args;
    args.rows = step.rows;
    args.hidden = hidden_;
    args.activations = step.saved.as<const T>();
    args.parameters = Base::parameters_;
    args.grad_h = step.grad_h.as<const T>();
    args.grad_h_state = step.grad_h_state.as<const D>();
    args.grad_c = step.grad_c.as<const D>();
    args.grad_gates = step.dz.as<T>();
    args.grad_c_prev = step.grad_c_prev.as<D>();
    launch_step<T, D>(cell_, /*backward=*/true, args, stream_);
  }

  template <typename D>
  void run_stage(int stage, const BackwardStep& step) const {
    StageArgs<> args = {};
    args.h_of_gemm = port<D>(step.grad_h_state);
    args.h_of_state = port<D>(step.grad_c);
    const auto port_of = [&](const Port& of, bool is_output) -> StagePort {
      const int64_t column = of.index * hidden_;
      switch (of.place) {
        case Place::kGate:
          return port<T>(step.dz, column);
        case Place::kParameter:
          return is_output ? port<T>(step.dz, cell_.slots * hidden_ + column)
                           : Base::parameter(of.index);
        case Place::kState:
          return port<D>(is_output ? step.grad_c_prev : step.grad_c, column);
        case Place::kH:
          return port<T>(step.grad_h);
        case Place::kSaved: {
          StagePort saved = port<T>(step.saved, column);
          if ((cell_.programs->per_row >> of.index & 1) != 0) saved.col_stride = 0;
          return saved;
        }
        default:
          return port<C>(step.grad_operands, of.index * step.operand_stride);
      }
    };
    Base::template launch_stage<D>(stage, /*backward=*/true, step.rows, args, port_of);
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
