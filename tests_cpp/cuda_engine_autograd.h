// The CUDA engine on the CPU, with cuda_on_host.cpp, as functions that autograd can go
// through: what autograd.cpp does for the operators, for the engine alone.
#pragma once

#include "cell/lltm.h"
#include "cell_arguments.h"
#include "common/states.h"
#include "cuda/engine/engine.h"
#include "op/checkpointed.h"
#include "testing.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lltm_test {

// Of the LLTM.
inline lltm::SequenceArgs sequence_args(
    const Arguments& a, bool save, int64_t checkpoint_steps = 0) {
  const at::Tensor none;
  return {
      {lltm::Lltm::kCell,
       a.input,
       a.h,
       a.c,
       a.weights,
       none,
       a.bias,
       none,
       a.batch_sizes,
       a.reverse,
       a.reset,
       checkpoint_steps,
       a.recurrent_mask},
      save};
}
inline CellArguments lltm_arguments(const Arguments& a, int64_t checkpoint_steps = 0) {
  return {
      lltm::Lltm::kCell.name,
      a.input,
      a.h,
      a.c,
      a.weights,
      std::nullopt,
      a.bias,
      std::nullopt,
      a.batch_sizes,
      a.reverse,
      checkpoint_steps,
      a.reset,
      a.recurrent_mask};
}

// Saves what backward needs: the arguments and some results of forward.
inline void save(
    torch::autograd::AutogradContext* context, const CellArguments& a, const Tensors& results) {
  Tensors tensors = results;
  for (const OptionalTensor& x : a.differentiable()) tensors.push_back(lltm::or_undefined(x));
  tensors.push_back(lltm::or_undefined(a.batch_sizes));
  tensors.push_back(lltm::or_undefined(a.reset));
  tensors.push_back(lltm::or_undefined(a.recurrent_mask));
  context->set_materialize_grads(false);
  context->save_for_backward(tensors);
  context->saved_data["cell"] = a.cell;
  context->saved_data["reverse"] = a.reverse;
  context->saved_data["checkpoint_steps"] = a.checkpoint_steps;
}

// From what was saved, less the `results` tensors before it.
inline CellArguments saved_arguments(
    torch::autograd::AutogradContext* context, const Tensors& saved, size_t results) {
  const auto optional = [&](size_t k) { return lltm::or_nullopt(saved[results + k]); };
  return {
      context->saved_data["cell"].toStringRef(),
      saved[results],
      saved[results + 1],
      optional(2),
      saved[results + 3],
      optional(4),
      optional(5),
      optional(6),
      optional(7),
      context->saved_data["reverse"].toBool(),
      context->saved_data["checkpoint_steps"].toInt(),
      optional(8),
      optional(9)};
}

// As in autograd.cpp, an undefined gradient is one that nobody asked for or gave. Autograd counts
// the tensors that are there.
inline lltm::OutputMask output_mask(
    const torch::autograd::AutogradContext& context, const CellArguments& a) {
  lltm::OutputMask mask = {};
  const auto tensors = a.differentiable();
  for (size_t k = 0, edge = 0; k < mask.size(); ++k) {
    if (tensors[k].has_value()) mask[k] = context.needs_input_grad(edge++);
  }
  return mask;
}

inline Tensors as_list(const lltm::Gradients& gradients) {
  const auto& [input, h, c, weight_ih, weight_hh, bias_ih, bias_hh] = gradients;
  return {input, h, c, weight_ih, weight_hh, bias_ih, bias_hh};
}

// A c' or c_n that is empty is no result.
inline Tensors without_empty_c(Tensors results) {
  if (results.back().dim() == 1) results.pop_back();
  return results;
}

inline at::Tensor gradient(const Tensors& gradients, size_t k) {
  return k < gradients.size() ? gradients[k] : at::Tensor();
}

// The persistent engine, for one call.
inline std::optional<lltm::SequenceResult> persistent_forward(
    const lltm::SequenceArgs& args,
    int64_t workspace_bytes = lltm::cuda::kWorkspaceBytes,
    std::optional<lltm::cuda::Tuning> tuning = std::nullopt) {
  auto results = lltm::cuda::persistent_forward({&args, 1}, workspace_bytes, tuning);
  return results ? std::optional(std::move(results->front())) : std::nullopt;
}
inline std::optional<lltm::Gradients> persistent_backward(
    const lltm::SequenceBackwardArgs& args,
    std::optional<lltm::cuda::Tuning> tuning = std::nullopt) {
  auto results = lltm::cuda::persistent_backward({&args, 1}, tuning);
  return results ? std::optional(std::move(results->front())) : std::nullopt;
}

struct EngineStep : torch::autograd::Function<EngineStep> {
  static Tensors forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& input,
      const at::Tensor& h,
      const OptionalTensor& c,
      const at::Tensor& weight_ih,
      const OptionalTensor& weight_hh,
      const OptionalTensor& bias_ih,
      const OptionalTensor& bias_hh,
      const std::string& cell) {
    const CellArguments a = {cell, input, h, c, weight_ih, weight_hh, bias_ih, bias_hh};
    const lltm::StepArgs args = {step_inputs(a), /*save=*/true};
    const auto [h_next, c_next, activations] =
        lltm::with_own_c(args, lltm::cuda::step_forward(args));
    save(context, a, {activations});
    return without_empty_c({h_next, c_next});
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& grads) {
    const Tensors saved = context->get_saved_variables();
    const CellArguments a = saved_arguments(context, saved, 1);
    const lltm::StepBackwardArgs args = {
        step_inputs(a), saved[0], grads[0], gradient(grads, 1), output_mask(*context, a)};
    Tensors gradients = as_list(lltm::with_grad_of_h(args, lltm::cuda::step_backward));
    gradients.resize(8);
    return gradients;
  }
};

struct EngineSequence : torch::autograd::Function<EngineSequence> {
  static Tensors forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& input,
      const at::Tensor& h_0,
      const OptionalTensor& c_0,
      const at::Tensor& weight_ih,
      const OptionalTensor& weight_hh,
      const OptionalTensor& bias_ih,
      const OptionalTensor& bias_hh,
      const OptionalTensor& batch_sizes,
      const OptionalTensor& reset,
      const OptionalTensor& recurrent_mask,
      const std::string& cell,
      bool reverse,
      int64_t checkpoint_steps) {
    const CellArguments a = {
        cell,
        input,
        h_0,
        c_0,
        weight_ih,
        weight_hh,
        bias_ih,
        bias_hh,
        batch_sizes,
        reverse,
        checkpoint_steps,
        reset,
        recurrent_mask};
    const lltm::SequenceArgs args = {sequence_inputs(a), /*save=*/true};
    const auto [output, h_n, c_n, for_backward] =
        lltm::with_own_c(args, lltm::cuda::sequence_forward(args));
    save(context, a, {output, for_backward});
    return without_empty_c({output, h_n, c_n});
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& grads) {
    const Tensors saved = context->get_saved_variables();
    const CellArguments a = saved_arguments(context, saved, 2);
    const lltm::SequenceBackwardArgs args = {
        sequence_inputs(a),
        saved[0],
        saved[1],
        grads[0],
        grads[1],
        gradient(grads, 2),
        output_mask(*context, a)};
    const auto run = [](const lltm::SequenceBackwardArgs& args) {
      return args.checkpoint_steps == 0
                 ? lltm::cuda::sequence_backward(args)
                 : lltm::checkpointed_backward(
                       args, lltm::cuda::sequence_forward, lltm::cuda::sequence_backward);
    };
    Tensors gradients = as_list(lltm::with_grad_of_h(args, run));
    gradients.resize(13);
    return gradients;
  }
};

inline Tensors run_step(const CellArguments& a) {
  return EngineStep::apply(
      a.input, a.h, a.c, a.weight_ih, a.weight_hh, a.bias_ih, a.bias_hh, a.cell);
}

inline Tensors run_sequence(const CellArguments& a) {
  return EngineSequence::apply(
      a.input,
      a.h,
      a.c,
      a.weight_ih,
      a.weight_hh,
      a.bias_ih,
      a.bias_hh,
      a.batch_sizes,
      a.reset,
      a.recurrent_mask,
      a.cell,
      a.reverse,
      a.checkpoint_steps);
}

// The LLTM.
inline Tensors engine_cell(const Arguments& a) {
  return run_step(lltm_arguments(a));
}

inline Function engine_checkpointed(int64_t checkpoint_steps) {
  return [checkpoint_steps](const Arguments& a) {
    return run_sequence(lltm_arguments(a, checkpoint_steps));
  };
}

inline Tensors engine_sequence(const Arguments& a) {
  return engine_checkpointed(0)(a);
}

// Every output and gradient of `ours` against `theirs` in float64, by the statement of accuracy
// (testing.h), with `theirs`, or `in_dtype`, in the dtype in the place of eager. Seeds 1, 2, ...
// until the smallest result that is not empty has had some hundred elements.
inline void check_against(
    const Function& ours,
    const Function& theirs,
    const Problem& problem,
    const Function& in_dtype = nullptr) {
  const Function& eager = in_dtype ? in_dtype : theirs;
  const auto matrix = [](const at::Tensor& tensor) {
    const at::Tensor values = tensor.detach().to(at::kDouble).contiguous();
    reference::Matrix<> matrix(1, values.numel());
    std::copy_n(values.const_data_ptr<double>(), values.numel(), matrix.data.begin());
    return matrix;
  };
  const auto in_float64 = [](Tensors tensors) {
    for (at::Tensor& tensor : tensors) tensor = tensor.to(at::kDouble);
    return tensors;
  };
  const auto results = [](Evaluation evaluation) {
    Tensors all = std::move(evaluation.outputs);
    all.insert(all.end(), evaluation.gradients.begin(), evaluation.gradients.end());
    return all;
  };
  std::vector<Comparison> comparisons;
  int64_t elements = 0;
  for (uint64_t seed = 1; seed <= 3 || elements < 200; ++seed) {
    const Arguments a = problem(seed);
    const Tensors grads = random_like(theirs(a), seed + 1000);
    Arguments a64 = with(a, in_float64(differentiable(a)));
    if (a.recurrent_mask) a64.recurrent_mask = a.recurrent_mask->to(at::kDouble);
    const Tensors mine = results(evaluate(ours, a, grads));
    const Tensors baseline = results(evaluate(eager, a, grads));
    const Tensors exact = results(evaluate(theirs, a64, in_float64(grads)));
    ASSERT_EQ(mine.size(), exact.size());
    comparisons.resize(exact.size());
    int64_t fewest = std::numeric_limits<int64_t>::max();
    for (size_t k = 0; k < exact.size(); ++k) {
      comparisons[k].add(mine[k], baseline[k], matrix(exact[k]));
      if (exact[k].numel() > 0) fewest = std::min(fewest, exact[k].numel());
    }
    elements += fewest;
  }
  const std::vector<const char*> names = argument_names(problem(1));
  const size_t outputs = comparisons.size() - names.size();
  for (size_t k = 0; k < comparisons.size(); ++k) {
    EXPECT_TRUE(comparisons[k].result())
        << (k < outputs ? "output " + std::to_string(k)
                        : std::string("gradient of ") + names[k - outputs]);
  }
}

}  // namespace lltm_test
