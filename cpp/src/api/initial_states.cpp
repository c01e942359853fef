#include "api/initial_states.h"

#include "common/tensor_views.h"
#include "op/argument_checks.h"
#include "op/interceptors.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string>
#include <utility>

namespace lltm {

using at::Tensor;
using c10::SymInt;

namespace {

// h or a name from the cell; in a layer h_0, ...
std::string state_name(const CellInfo& cell, size_t k, const char* suffix) {
  return std::string(k == 0 ? "h" : cell.modules.state_names[k - 1]) + suffix;
}

void check_state_count(
    const CellInfo& cell, const char* where, at::TensorList states, const char* suffix) {
  const auto count = static_cast<size_t>(1 + cell.states);
  if (states.size() == count) return;
  std::vector<std::string> names;
  for (size_t k = 0; k < count; ++k) names.push_back(state_name(cell, k, suffix));
  TORCH_CHECK_TYPE(
      false,
      expected(
          where,
          c10::str(
              "state to be ",
              count,
              count == 1 ? " tensor (" : " tensors (",
              c10::Join(", ", names),
              ")"),
          states.size()));
}

}  // namespace

void check_states(
    const CellInfo& cell,
    const char* where,
    const Tensor& input,
    at::TensorList states,
    const char* suffix,
    StateShape rows,
    int64_t size_of_h,
    int64_t hidden) {
  check_state_count(cell, where, states, suffix);
  const bool concatenated = cell.states > 1 || size_of_h != hidden;
  rows.emplace_back(size_of_h);
  for (size_t k = 0; k < states.size(); ++k) {
    if (k == 1) rows.back() = hidden;
    const std::string name = state_name(cell, k, suffix);
    check_tensor(where, name.c_str(), states[k]);
    check_shape(where, name.c_str(), states[k], rows);
    if (concatenated) check_kind_of_concatenated(where, name.c_str(), states[k], input);
  }
}

ConcatenatedState concatenate_checked(
    const CellInfo& cell,
    const char* where,
    const Tensor& input,
    at::TensorList states,
    const char* suffix) {
  check_state_count(cell, where, states, suffix);
  if (cell.states <= 1) return concatenate(cell, states);
  check_tensor(where, "input", input);
  for (size_t k = 0; k < states.size(); ++k) {
    const std::string name = state_name(cell, k, suffix);
    check_tensor(where, name.c_str(), states[k]);
    check_kind_of_concatenated(where, name.c_str(), states[k], input);
  }
  // If only h differs, its shape is the wrong one.
  const bool others_agree = states[1].sym_sizes() == states[2].sym_sizes();
  const c10::SymIntArrayRef shape = states[others_agree ? 1 : 0].sym_sizes();
  for (size_t k = 0; k < states.size(); ++k) {
    check_shape(where, state_name(cell, k, suffix).c_str(), states[k], shape);
  }
  return concatenate(cell, states);
}

Tensor cat_without_autocast(at::TensorList tensors, int64_t dim) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  return at::cat(tensors, dim);
}

ConcatenatedState concatenate(const CellInfo& cell, at::TensorList states) {
  if (cell.states <= 1) return {states[0], cell.has_c() ? states[1] : Tensor()};
  return {states[0], cat_without_autocast(states.slice(1), -1)};
}

std::vector<Tensor> split(const CellInfo& cell, Tensor h, Tensor c) {
  std::vector<Tensor> states;
  states.reserve(1 + cell.states);
  states.push_back(std::move(h));
  if (cell.states == 1) states.push_back(std::move(c));
  if (cell.states > 1) {
    // Copies, because autograd forbids in-place changes of chunks.
    for (const Tensor& state : c.chunk(cell.states, -1)) states.push_back(state.clone());
  }
  return states;
}

ConcatenatedState first_state(
    const CellInfo& cell, const Tensor& input, StateShape rows, int64_t hidden) {
  rows.emplace_back(hidden);
  Interceptors interceptors;
  interceptors.add(input);
  // Noticeable in streaming.
  const bool direct = input.is_cpu() && interceptors.none();
  const Tensor zeros = direct ? new_tensor(C10_AS_INTARRAYREF_SLOW(rows), input.options())
                              : input.new_zeros_symint(rows);
  if (direct) std::fill_n(static_cast<char*>(zeros.mutable_data_ptr()), zeros.nbytes(), '\0');
  if (!cell.has_c()) return {zeros, Tensor()};
  if (cell.states == 1 && cell.programs->initial_states[0] == 0) return {zeros, zeros};
  std::vector<Tensor> states;
  for (int k = 0; k < cell.states; ++k) {
    const double value = cell.programs->initial_states[k];
    states.push_back(value == 0 ? zeros : at::full_like(zeros, value));
  }
  return {zeros, cat_without_autocast(states, -1)};
}

Tensor select_state(const Tensor& states, int64_t k, bool unobserved) {
  if (!unobserved) return states.select(0, k);
  Tensor state = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(states.storage()), states.key_set(), states.dtype());
  state.unsafeGetTensorImpl()->set_sizes_and_strides(
      states.sizes().slice(1),
      states.strides().slice(1),
      states.storage_offset() + k * states.stride(0));
  return state;
}

// On a device without kernels, the state has the strides of the initial state.
Tensor unsqueeze_state(Tensor state, bool unobserved) {
  if (!unobserved || !state.is_contiguous()) return state.unsqueeze(0);
  state.unsafeGetTensorImpl()->set_sizes_contiguous({1, state.size(0), state.size(1)});
  return state;
}

}  // namespace lltm
