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

template <typename Result, typename Members>
struct SignatureOf;
template <typename Result, typename... Members>
struct SignatureOf<Result, std::tuple<Members...>> {
  using type = Result(decltype(to_flat(std::declval<Members>()))...);
};
template <typename Result, typename Args>
using Signature = typename SignatureOf<Result, decltype(std::declval<Args>().flat())>::type;

template <auto run, typename Signature>
struct Kernel;
template <auto run, typename Result, typename... Flat>
struct Kernel<run, Result(Flat...)> {
  template <typename Args>
  static Result call(Flat... flat) {
    return run(from_flat<Args>(flat...));
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

// lltm::sequence, sequence_forward and sequence_backward.
SequenceOutputs call(const SequenceArgs& args);
SequenceResult forward(const SequenceArgs& args);
Gradients backward(const SequenceBackwardArgs& args);

at::Tensor prepack(
    std::string_view cell,
    const at::Tensor& weight_ih,
    const std::optional<at::Tensor>& weight_hh,
    std::optional<at::ScalarType> dtype);

}  // namespace op
}  // namespace lltm
