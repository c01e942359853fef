// Derivatives. First derivatives, the common case, run the fused kernels forward
// and backward. Double backward, forward mode and function transforms run the
// composite path, which ATen can differentiate.
#include "op/check.h"
#include "op/composite.h"
#include "op/operators.h"
#include "op/states.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>
#include <type_traits>

namespace lltm {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What is differentiated: each operator with its training form, and both again in operations that
// ATen can differentiate.
struct StepOperator {
  using Args = StepArgs;
  static constexpr auto check = check_step;
  static constexpr auto call = op::step;
  static constexpr auto forward = op::step_forward;
  static constexpr auto backward = op::step_backward;
  static constexpr auto composite_forward = composite::step_forward;
  static constexpr auto composite_backward = composite::step_backward_anew;

  // The results that backward takes, and its arguments with them.
  static variable_list kept(const StepResult& results) { return {std::get<2>(results)}; }
  static StepBackwardArgs backward_args(
      const StepArgs& args,
      const Tensor* kept,
      const variable_list& grads,
      const OutputMask& output_mask) {
    return {args, kept[0], grads[0], grads[1], output_mask};
  }
};

struct SequenceOperator {
  using Args = SequenceArgs;
  static constexpr auto check = check_sequence;
  static constexpr auto call = op::sequence;
  static constexpr auto forward = op::sequence_forward;
  static constexpr auto backward = op::sequence_backward;
  static constexpr auto composite_forward = composite::sequence_forward;
  static constexpr auto composite_backward = composite::sequence_backward_anew;

  static variable_list kept(const SequenceResult& results) {
    return {std::get<0>(results), std::get<3>(results)};
  }
  static SequenceBackwardArgs backward_args(
      const SequenceArgs& args,
      const Tensor* kept,
      const variable_list& grads,
      const OutputMask& output_mask) {
    return {args, kept[0], kept[1], grads[0], grads[1], grads[2], output_mask};
  }
};

// ---- the arguments of a call, and what a node keeps of them ---------------------

template <typename Args, typename Visit>
void for_each_member(const Args& args, const Visit& visit) {
  std::apply([&](const auto&... members) { (visit(members), ...); }, args.flat());
}

// The gradients of an operator are those of the first of its tensors.
template <typename Args, typename Visit>
void for_each_tensor(const Args& args, const Visit& visit) {
  for_each_member(args, [&](const auto& member) {
    if constexpr (TensorMember<decltype(member)>) visit(member);
  });
}

// False if a required argument is missing: that is an error, which the checks of the
// backend report.
template <typename Args>
bool requires_grad(const Args& args) {
  if (!at::GradMode::is_enabled()) return false;
  bool any = false;
  bool complete = true;
  for_each_tensor(args, [&](const auto& member) {
    const Tensor& tensor = member;
    any = any || (tensor.defined() && tensor.requires_grad());
    if constexpr (std::is_same_v<decltype(member), const Tensor&>) {
      complete = complete && tensor.defined();
    }
  });
  return any && complete;
}

bool is_dual(const Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Whether a torch.func transform is active: then the thread's dispatch state has its
// key.
bool is_transformed() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// Whether a transform is active or an argument is a dual number of forward mode. A
// torch::autograd::Function supports neither.
template <typename Args>
bool needs_composite(const Args& args) {
  bool any = is_transformed();
  for_each_tensor(args, [&](const Tensor& tensor) { any = any || is_dual(tensor); });
  return any;
}

// The kernels take a recurrent mask for a constant.
bool differentiates_mask(const StepArgs& /*args*/) {
  return false;
}
bool differentiates_mask(const SequenceArgs& args) {
  const Tensor& mask = args.recurrent_mask;
  return mask.defined() && at::GradMode::is_enabled() && mask.requires_grad();
}

// Whether the gradients themselves will be differentiated: backward records a graph,
// or runs in a transform or in forward mode.
bool is_differentiated(const variable_list& grads) {
  return at::GradMode::is_enabled() || is_transformed() ||
         std::any_of(grads.begin(), grads.end(), is_dual);
}

// Of the first tensors. needs_input_grad numbers only the tensors that were given, so an absent
// bias has no number.
template <typename Args>
OutputMask wanted_gradients(const AutogradContext& context, const Args& args) {
  OutputMask wanted = {};
  size_t k = 0;
  size_t given = 0;
  for_each_tensor(args, [&](const Tensor& tensor) {
    if (k < wanted.size()) wanted[k++] = tensor.defined() && context.needs_input_grad(given++);
  });
  return wanted;
}

// Every member has its place: a tensor among the saved variables, another in saved_data, unless it
// is 0.
template <typename Args>
void save(AutogradContext& context, const Args& args, const variable_list& kept) {
  variable_list tensors;
  tensors.reserve(std::tuple_size_v<decltype(args.flat())> + kept.size());
  for_each_member(args, [&](const auto& member) {
    using Member = std::decay_t<decltype(member)>;
    if constexpr (TensorMember<Member>) {
      tensors.push_back(member);
    } else if constexpr (std::is_same_v<Member, CellName>) {
      context.saved_data["cell"] = std::string(member.name());
      tensors.emplace_back();
    } else {
      if (member != Member{}) context.saved_data[std::to_string(tensors.size())] = member;
      tensors.emplace_back();
    }
  });
  tensors.insert(tensors.end(), kept.begin(), kept.end());
  context.save_for_backward(std::move(tensors));
}

// Refers to the saved variables, `tensors`, which end with the kept ones.
template <typename Args>
Args saved_args(AutogradContext& context, const variable_list& tensors) {
  using Members = decltype(std::declval<Args>().flat());
  const auto member = [&]<size_t k>() -> decltype(auto) {
    using Member = std::tuple_element_t<k, Members>;
    if constexpr (TensorMember<Member>) {
      return (tensors[k]);
    } else if constexpr (std::is_same_v<std::decay_t<Member>, CellName>) {
      return CellName(context.saved_data.at("cell").toStringRef());
    } else {
      using Value = std::decay_t<Member>;
      const auto found = context.saved_data.find(std::to_string(k));
      return found == context.saved_data.end() ? Value{} : found->second.template to<Value>();
    }
  };
  return [&]<size_t... k>(std::index_sequence<k...>) {
    return from_flat<Args>(member.template operator()<k>()...);
  }(std::make_index_sequence<std::tuple_size_v<Members>>());
}

// The composite path differentiates forward as it stands.
void check_is_differentiable(const CellInfo& cell) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !cell.own_gradient,
      "lltm: expected first derivatives by autograd alone of the cell ",
      cell.title(),
      ", whose function has a gradient of its own, got a second derivative, forward mode or a"
      " transform of torch.func");
}

// A gradient for every member, where there is none an undefined one.
template <typename Args>
variable_list at_their_places(const Args& args, variable_list gradients) {
  variable_list result;
  result.reserve(std::tuple_size_v<decltype(args.flat())>);
  size_t k = 0;
  for_each_member(args, [&](const auto& member) {
    const bool has_one = TensorMember<decltype(member)> && k < gradients.size();
    result.push_back(has_one ? std::move(gradients[k++]) : Tensor());
  });
  return result;
}

template <typename... Results>
variable_list as_list(std::tuple<Results...> results) {
  return std::apply([](auto&... tensors) { return variable_list{std::move(tensors)...}; }, results);
}

template <typename Op>
struct DifferentiableOperator : torch::autograd::Function<DifferentiableOperator<Op>> {
  // Compiled autograd may trace backward, because backward reads the context only.
  static constexpr bool is_traceable = true;

  template <typename... Flat>
  static variable_list forward(AutogradContext* context, const Flat&... flat) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto args = from_flat<typename Op::Args>(flat...);
    auto results = Op::forward(args);
    context->set_materialize_grads(false);
    save(*context, args, Op::kept(results));
    return as_list(without_saved(std::move(results)));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list tensors = context->get_saved_variables();
    const auto args = saved_args<typename Op::Args>(*context, tensors);
    constexpr size_t count = std::tuple_size_v<decltype(args.flat())>;
    if (is_differentiated(grads)) check_is_differentiable(*args.cell);
    const auto backward_args =
        Op::backward_args(args, tensors.data() + count, grads, wanted_gradients(*context, args));
    return at_their_places(
        args,
        as_list(
            is_differentiated(grads) ? with_grad_of_h(backward_args, Op::composite_backward)
                                     : Op::backward(backward_args)));
  }
};

// ---- the kernels under the Autograd key ------------------------------------------

template <typename Op>
auto autograd(const typename Op::Args& args) {
  if (needs_composite(args) || differentiates_mask(args)) {
    Op::check(args);
    check_is_differentiable(*args.cell);
    return without_saved(with_own_c(args, Op::composite_forward(args)));
  }
  if (!requires_grad(args)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return Op::call(args);
  }
  const variable_list results = std::apply(
      [](const auto&... members) { return DifferentiableOperator<Op>::apply(to_flat(members)...); },
      args.flat());
  using Outputs = decltype(Op::call(args));
  return [&]<size_t... k>(std::index_sequence<k...>) {
    return Outputs(results[k]...);
  }(std::make_index_sequence<std::tuple_size_v<Outputs>>());
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

TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  implement<autograd<StepOperator>>(m, "step");
  implement<autograd<SequenceOperator>>(m, "sequence");
  m.impl("prepack", TORCH_FN(prepack_autograd));
  for (const char* op :
       {"step_forward",
        "step_backward",
        "sequence_forward",
        "sequence_backward",
        "sequence_prepacked"}) {
    m.impl(op, torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace lltm
