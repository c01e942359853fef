// First derivatives run the fused kernels. Double backward, forward mode and function transforms
// differentiate the ATen fallback.
#include "op/autograd.h"

#include "aten/fallback.h"
#include "common/backend_call.h"
#include "op/aten_backend.h"
#include "op/bidirectional.h"
#include "op/check.h"
#include "op/interceptors.h"
#include "op/operators.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <span>
#include <string>
#include <type_traits>

namespace lltm {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The output, which backward reads, and the activations or checkpoints.
auto kept_of(const SequenceResult& result) {
  const auto& [output, h_n, c_n, saved] = result;
  return std::tie(output, saved);
}

template <typename Visit>
void for_each_member(const SequenceArgs& args, const Visit& visit) {
  std::apply([&](const auto&... members) { (visit(members), ...); }, args.flat());
}

// Backward returns gradients for the first seven tensors.
template <typename Visit>
void for_each_tensor(const SequenceArgs& args, const Visit& visit) {
  for_each_member(args, [&](const auto& member) {
    if constexpr (TensorMember<decltype(member)>) visit(member);
  });
}

constexpr size_t kMembers = std::tuple_size_v<decltype(std::declval<SequenceArgs>().flat())>;

template <size_t calls>
auto passed_tensors(const std::array<SequenceArgs, calls>& args) {
  c10::SmallVector<Tensor, calls * kMembers> passed;
  for (const SequenceArgs& call : args) {
    for_each_tensor(call, [&](const Tensor& tensor) {
      if (tensor.defined()) passed.push_back(tensor);
    });
  }
  return passed;
}

Interceptors interceptors_of(const SequenceArgs& args) {
  Interceptors interceptors;
  for_each_tensor(args, [&](const Tensor& tensor) { interceptors.add(tensor); });
  return interceptors;
}

// The backend's checks report a missing required argument.
bool is_complete(const SequenceArgs& args) {
  bool complete = true;
  for_each_tensor(args, [&](const auto& member) {
    if constexpr (std::is_same_v<decltype(member), const RequiredTensor&>) {
      complete = complete && member.defined();
    }
  });
  return complete;
}

// The kernels treat the recurrent mask as a constant.
bool differentiates_mask(const SequenceInputs& args) {
  const Tensor& mask = args.recurrent_mask;
  return mask.defined() && at::GradMode::is_enabled() && mask.requires_grad();
}

// needs_input_grad counts only passed tensors: an omitted bias has no index. `passed` precede this
// call.
OutputMask wanted_gradients(
    const AutogradContext& context, const SequenceArgs& args, size_t& passed) {
  OutputMask wanted = {};
  size_t k = 0;
  for_each_tensor(args, [&](const Tensor& tensor) {
    const bool needed = tensor.defined() && context.needs_input_grad(passed++);
    if (k < wanted.size()) wanted[k++] = needed;
  });
  return wanted;
}

// Tensors as saved variables, others in saved_data unless 0.
void save(AutogradContext& context, const SequenceArgs& args, variable_list& tensors) {
  for_each_member(args, [&](const auto& member) {
    using Member = std::decay_t<decltype(member)>;
    if constexpr (TensorMember<Member>) {
      tensors.push_back(member);
    } else {
      const auto value = [&] {
        if constexpr (std::is_same_v<Member, CellName>) {
          return std::string(member.name());
        } else {
          return member;
        }
      }();
      if (value != decltype(value){}) context.saved_data[std::to_string(tensors.size())] = value;
      tensors.emplace_back();
    }
  });
}

SequenceArgs saved_args(
    const AutogradContext& context, const variable_list& tensors, size_t first) {
  using Members = decltype(std::declval<SequenceArgs>().flat());
  const auto member = [&]<size_t k>() -> decltype(auto) {
    using Member = std::decay_t<std::tuple_element_t<k, Members>>;
    if constexpr (TensorMember<Member>) {
      return (tensors[first + k]);
    } else {
      const auto found = context.saved_data.find(std::to_string(first + k));
      if constexpr (std::is_same_v<Member, CellName>) {
        return CellName(found->second.toStringRef());
      } else {
        return found == context.saved_data.end() ? Member{} : found->second.template to<Member>();
      }
    }
  };
  return [&]<size_t... k>(std::index_sequence<k...>) {
    return from_flat<SequenceArgs>(member.template operator()<k>()...);
  }(std::make_index_sequence<kMembers>());
}

// The ATen fallback differentiates forward, without the cell's custom gradient.
void check_is_differentiable(const CellInfo& cell) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !cell.custom_gradient,
      "lltm: cell ",
      cell.title(),
      " defines its own gradient: expected first derivatives by autograd, got a second derivative,"
      " forward mode or a torch.func transform");
}

void append_gradients(const SequenceArgs& args, const Gradients& gradients, variable_list& all) {
  const auto of_first =
      std::apply([](const auto&... gradient) { return std::array{&gradient...}; }, gradients);
  size_t k = 0;
  for_each_tensor(args, [&](const Tensor& tensor) {
    if (tensor.defined()) all.push_back(k < of_first.size() ? *of_first[k] : Tensor());
    ++k;
  });
}

template <size_t count>
auto tie(std::span<const Tensor, count> tensors) {
  return [&]<size_t... k>(std::index_sequence<k...>) {
    return std::tie(tensors[k]...);
  }(std::make_index_sequence<count>());
}

template <typename Tensors>
void append(Tensors&& results, variable_list& all) {
  std::apply(
      [&]<typename... Each>(Each&&... tensors) {
        (all.push_back(std::forward<Each>(tensors)), ...);
      },
      std::forward<Tensors>(results));
}

template <size_t calls>
struct DifferentiableOperator : torch::autograd::Function<DifferentiableOperator<calls>> {
  static constexpr size_t kKept = 2, kOutputs = 3;
  static constexpr size_t kSaved = kMembers + kKept;

  // Compiled autograd may trace backward, which reads only the context.
  static constexpr bool is_traceable = true;

  template <typename Run>
  static void for_each_call(
      const std::array<SequenceArgs, calls>& args, bool side_by_side, const Run& run) {
    if constexpr (calls == 2) {
      if (side_by_side) return run_side_by_side(args[0].input, run);
    }
    for (size_t k = 0; k < calls; ++k) run(k);
  }

  static variable_list forward(
      AutogradContext* context,
      at::TensorList /*passed*/,
      const std::array<SequenceArgs, calls>& args) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::array<SequenceResult, calls> results;
    for_each_call(args, true, [&](size_t k) { results[k] = op::forward(args[k]); });
    variable_list saved;
    variable_list outputs;
    saved.reserve(calls * kSaved);
    outputs.reserve(calls * kOutputs);
    for (size_t k = 0; k < calls; ++k) {
      save(*context, args[k], saved);
      append(kept_of(results[k]), saved);
      append(without_saved(std::move(results[k])), outputs);
    }
    context->set_materialize_grads(false);
    context->save_for_backward(std::move(saved));
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const auto args = [&]<size_t... k>(std::index_sequence<k...>) {
      return std::array{saved_args(*context, saved, k * kSaved)...};
    }(std::make_index_sequence<calls>());
    // Backward records a graph, or runs in a transform or in forward mode.
    Interceptors interceptors(grads);
    const bool differentiated = at::GradMode::is_enabled() || interceptors.transform();
    interceptors.add(saved);
    std::array<OutputMask, calls> wanted;
    size_t passed = 0;
    for (size_t k = 0; k < calls; ++k) wanted[k] = wanted_gradients(*context, args[k], passed);
    const auto backward_args = [&](size_t k) {
      const auto kept = std::span(saved).subspan(k * kSaved + kMembers).template first<kKept>();
      const auto of_outputs = std::span(grads).subspan(k * kOutputs).template first<kOutputs>();
      return std::apply(
          [](const auto&... members) { return from_flat<SequenceBackwardArgs>(members...); },
          std::tuple_cat(args[k].flat(), tie(kept), tie(of_outputs), std::tie(wanted[k])));
    };
    const bool side_by_side = !differentiated && interceptors.at_most_autograd();
    std::array<Gradients, calls> gradients;
    for_each_call(args, side_by_side, [&](size_t k) {
      const auto call = backward_args(k);
      if (!differentiated) {
        gradients[k] = op::backward(call);
        return;
      }
      check_is_differentiable(*call.cell);
      check(call);
      gradients[k] = call_backward(call, aten_fallback::sequence_backward_recomputed);
    });
    variable_list all;
    all.reserve(passed + 1);
    for (size_t k = 0; k < calls; ++k) append_gradients(args[k], gradients[k], all);
    all.emplace_back();  // for the argument structs
    return all;
  }
};

template <size_t calls>
std::array<SequenceOutputs, calls> record(const std::array<SequenceArgs, calls>& args) {
  using Operator = DifferentiableOperator<calls>;
  const variable_list results = Operator::apply(at::TensorList(passed_tensors(args)), args);
  std::array<SequenceOutputs, calls> outputs;
  for (size_t call = 0; call < calls; ++call) {
    const auto of_call = std::span(results).subspan(call * Operator::kOutputs);
    outputs[call] = tie(of_call.template first<Operator::kOutputs>());
  }
  return outputs;
}

// Backward through prepacked results raises an error instead of stopping silently.
struct WithoutDerivative : torch::autograd::Function<WithoutDerivative> {
  static variable_list forward(
      AutogradContext* /*context*/, at::TensorList /*passed*/, const SequenceArgs& args) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    variable_list outputs;
    append(op::call(args), outputs);
    return outputs;
  }
  static variable_list backward(AutogradContext* /*context*/, const variable_list& /*grads*/) {
    refuse();
    return {};
  }
  static void refuse() {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "lltm::sequence: expected unpacked weight_ih to compute derivatives, got prepacked weights;"
        " differentiate the layer that they were packed from");
  }
};

SequenceOutputs sequence_autograd(const SequenceArgs& args) {
  const Interceptors interceptors = interceptors_of(args);
  const auto below_autograd = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return op::call(args);
  };
  if (!args.prepacked()) {
    if (interceptors.transform() || differentiates_mask(args)) {
      check(args);
      check_is_differentiable(*args.cell);
      return without_saved(call_forward(args, aten_fallback::sequence_forward));
    }
    if (!interceptors.autograd() || !is_complete(args)) return below_autograd();
    return record<1>({args})[0];
  }
  bool dual = false;
  for_each_tensor(args, [&](const Tensor& tensor) {
    dual = dual || (tensor.defined() && tensor._fw_grad(/*level=*/0).defined());
  });
  if (dual || (interceptors.autograd() && interceptors.transform())) WithoutDerivative::refuse();
  if (!interceptors.autograd() || !is_complete(args)) return below_autograd();
  const variable_list results =
      WithoutDerivative::apply(at::TensorList(passed_tensors(std::array{args})), args);
  return {results[0], results[1], results[2]};
}

// Packed weights have no derivative.
Tensor prepack_autograd(
    std::string_view cell,
    const Tensor& weight_ih,
    const std::optional<Tensor>& weight_hh,
    std::optional<at::ScalarType> dtype) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op::prepack(cell, weight_ih, weight_hh, dtype);
}

}  // namespace

bool records_gradients(const SequenceArgs& args) {
  return interceptors_of(args).autograd();
}

std::array<SequenceOutputs, 2> sequences_with_autograd(const std::array<SequenceArgs, 2>& calls) {
  return record(calls);
}

TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  implement<sequence_autograd>(m, "sequence");
  m.impl("prepack", TORCH_FN(prepack_autograd));
  for (const char* op : {"sequence_forward", "sequence_backward"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace lltm
