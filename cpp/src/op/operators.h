// Kernels and dispatcher calls with a struct of operator_args.h.
#pragma once

#include "common/operator_args.h"

#include <torch/library.h>

#include <concepts>
#include <utility>

namespace lltm {

// Tensor, optional tensor, string, bool or number.
template <typename Flat>
const Flat& to_flat(const TensorArgument<Flat>& tensor) {
  return tensor.flat();
}
inline std::string_view to_flat(const CellName& cell) {
  return cell.name();
}
template <typename Value>
Value to_flat(const Value& value) {
  return value;
}

template <typename Member>
concept TensorMember = std::convertible_to<const Member&, const at::Tensor&>;

// Members are in the order of flat().
template <typename Args, typename... Members>
Args from_flat(Members&&... members) {
// The base class's members have no braces.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-braces"
  return Args{std::forward<Members>(members)...};
#pragma GCC diagnostic pop
}

template <typename Args, typename Change, typename Run>
auto run_changed(const Args& args, const Change& change, const Run& run) {
  return std::apply(
      [&](const auto&... members) { return run(from_flat<Args>(change(members)...)); },
      args.flat());
}

// In the schema of a step, without the output.
template <typename Args, typename Result>
auto to_schema(Result&& result) {
  if constexpr (kIsStep<Args> && !std::is_same_v<std::decay_t<Result>, Gradients>) {
    return std::apply(
        [](auto& /*output*/, auto&... others) { return std::tuple(std::move(others)...); }, result);
  } else {
    return std::forward<Result>(result);
  }
}
template <typename Result, typename Schema>
Result from_schema(Schema&& results) {
  if constexpr (std::tuple_size_v<std::decay_t<Schema>> == std::tuple_size_v<Result>) {
    return std::forward<Schema>(results);
  } else {
    return std::tuple_cat(std::tuple<at::Tensor>(), std::forward<Schema>(results));
  }
}

template <typename Result, typename Members>
struct SignatureOf;
template <typename Result, typename... Members>
struct SignatureOf<Result, std::tuple<Members...>> {
  using type = Result(decltype(to_flat(std::declval<Members>()))...);
};
template <typename Result, typename Args>
using Signature = typename SignatureOf<
    decltype(to_schema<Args>(std::declval<Result>())),
    decltype(std::declval<Args>().flat())>::type;

template <auto run, typename Signature>
struct Kernel;
template <auto run, typename Result, typename... Flat>
struct Kernel<run, Result(Flat...)> {
  template <typename Args>
  static Result call(Flat... flat) {
    return to_schema<Args>(run(from_flat<Args>(flat...)));
  }
};

template <auto run, typename Result, typename Argument>
void implement(torch::Library& m, const char* op, Result (*)(Argument)) {
  using Args = std::remove_cvref_t<Argument>;
  m.impl(op, TORCH_FN((Kernel<run, Signature<Result, Args>>::template call<Args>)));
}
template <auto run>
void implement(torch::Library& m, const char* op) {
  implement<run>(m, op, run);
}

inline SequenceOutputs without_saved(SequenceResult&& result) {
  auto& [output, h_n, c_n, saved] = result;
  return {std::move(output), std::move(h_n), std::move(c_n)};
}

namespace op {

// lltm::sequence and its training operators or, for StepArgs, lltm::step and its own.
template <typename Args>
SequenceOutputs call(const Args& args);
template <typename Args>
SequenceResult forward(const Args& args);
template <typename BackwardArgs>
Gradients backward(const BackwardArgs& args);

at::Tensor prepack(
    std::string_view cell,
    const at::Tensor& weight_ih,
    const std::optional<at::Tensor>& weight_hh,
    std::optional<at::ScalarType> dtype);

}  // namespace op
}  // namespace lltm
