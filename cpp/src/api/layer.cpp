// Sizes may be symbolic, because torch.compile and torch.export trace this code.
#include "api/layer.h"

#include "api/layer_checks.h"
#include "api/parameters.h"
#include "api/projection.h"
#include "common/format.h"
#include "common/steps.h"
#include "op/bidirectional.h"
#include "op/check.h"
#include "op/interceptors.h"
#include "op/operators.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm {
namespace {

using at::Tensor;
using c10::SymInt;

// ---- interceptors -------------------------------------------------------------

Interceptors interceptors_of(
    const Tensor& input,
    at::TensorList states,
    at::TensorList parameters,
    const Tensor& reset = {}) {
  Interceptors interceptors(states);
  interceptors.add(parameters);
  interceptors.add(input);
  interceptors.add(reset);
  return interceptors;
}

// Skips the Autograd key if nothing intercepts the call. In streaming, dispatching a few views
// costs as much as a step.
class WithoutAutograd {
 public:
  explicit WithoutAutograd(const Interceptors& interceptors) {
    if (interceptors.none()) guard_.emplace();
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard_;
};

// Prepacked layers ignore autocast.
class WithoutAutocast {
 public:
  explicit WithoutAutocast(bool prepacked) {
    if (prepacked) guard_.emplace(c10::autocast_dispatch_keyset);
  }

 private:
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard_;
};

}  // namespace

// ---- one step -----------------------------------------------------------------

std::vector<Tensor> StepModule::forward(const Tensor& input, at::TensorList states) const {
  const char* const where = cell.step_class;
  check_tensor(where, "input", input);
  TORCH_CHECK_VALUE(
      (input.dim() == 1 || input.dim() == 2) && input.sym_size(-1) == input_size,
      "lltm::",
      where,
      ": expected input of shape (B, ",
      input_size,
      ") or (",
      input_size,
      ",), got ",
      shape_text(input.sym_sizes()));
  const auto given = static_cast<int64_t>(parameters.size());
  const auto count = [&](bool bias) { return count_parameters(cell, bias, /*prepacked=*/false); };
  const bool has_bias = given == count(/*bias=*/true);
  TORCH_CHECK_VALUE(
      has_bias || given == count(/*bias=*/false),
      "lltm::",
      where,
      ": expected weights with or without biases, got ",
      given,
      " parameters");
  check_kind(where, input, parameters[0]);
  check_custom_parameters(cell, where, input, has_bias, hidden_size, parameters);
  const WithoutAutograd guard(interceptors_of(input, states, parameters));
  const bool batched = input.dim() == 2;
  if (!states.empty()) {
    std::vector<SymInt> rows;
    rows.reserve(2);  // check_states appends one
    if (batched) rows.push_back(input.sym_size(0));
    check_states(cell, where, input, states, "", std::move(rows), hidden_size, hidden_size);
  }
  if (!batched) {
    const auto next = forward(
        input.unsqueeze(0), map_states(states, [](const Tensor& s) { return s.unsqueeze(0); }));
    return map_states(next, [](const Tensor& s) { return s.squeeze(0); });
  }
  ConcatenatedState initial = states.empty()
                                  ? first_state(cell, input, {input.sym_size(0)}, hidden_size)
                                  : concatenate(cell, states);
  StepArgs args = {{{cell, input, initial.h, std::move(initial.c), parameters[0]}}};
  set_parameters(args, has_bias, /*prepacked=*/false, hidden_size, parameters);
  auto [output, h, c] = op::call(args);
  return split(cell, std::move(h), std::move(c));
}

// ---- a layer ------------------------------------------------------------------

int64_t LayerModule::parameters_each() const {
  return static_cast<int64_t>(parameters.size()) / directions();
}

int64_t LayerModule::columns_of_input(int64_t k) const {
  return k < directions_each() ? input_size : directions_each() * size_of_h();
}

int64_t LayerModule::size_of_h() const {
  const int64_t projected = proj_size();
  return projected > 0 ? projected : hidden_size;
}

int64_t LayerModule::proj_size() const {
  const bool projects = parameters_each() > count_parameters(cell, has_bias, prepacked);
  return projects ? parameters.back().sym_size(0).guard_int(__FILE__, __LINE__) : 0;
}

at::TensorList LayerModule::parameters_of(int64_t k) const {
  const int64_t each = parameters_each();
  return parameters.slice(k * each, each);
}

void LayerModule::check(const Tensor& input) const {
  check_tensor(cell.layer_class, "input", input);
  check_size(cell.layer_class, "num_layers", num_layers, kMostLayers);
  const auto given = static_cast<int64_t>(parameters.size());
  const int64_t expected = directions() * count_parameters(cell, has_bias, prepacked);
  const int64_t projected = expected + directions();
  TORCH_CHECK_VALUE(
      given == expected || (can_project(cell) && given == projected),
      "lltm::",
      cell.layer_class,
      ": expected ",
      has_bias ? "weights and biases of " : "weights of ",
      num_layers,
      bidirectional ? " layers in two directions" : " layers",
      ", got ",
      given,
      " parameters");
  if (given == projected) {  // proj_size() is a size of weight_hr
    check_tensor(cell.layer_class, "weight_hr", parameters.back());
    TORCH_CHECK_VALUE(
        parameters.back().dim() == 2,
        "lltm::",
        cell.layer_class,
        ": expected weight_hr of shape (proj_size, hidden_size), got ",
        shape_text(parameters.back().sym_sizes()));
  }
  check_size(cell.layer_class, "hidden_size", hidden_size, kLargestSize);
  check_probability(cell.layer_class, "dropout", dropout);
  check_probability(cell.layer_class, "recurrent_dropout", recurrent_dropout);
  if (!prepacked) {
    check_kind(cell.layer_class, input, parameters.front());
  } else if (has_bias) {  // prepacked weights are bytes
    check_kind(cell.layer_class, "input", input, parameters[1], "prepacked layer", /*casts=*/false);
  }
  const bool custom = cell.parameters > 0 || cell.without_bias != 0;
  for (int64_t k = 0; custom && k < directions(); ++k) {
    check_custom_parameters(cell, cell.layer_class, input, has_bias, hidden_size, parameters_of(k));
  }
  if (proj_size() > 0) check_projection(input);
}

// The operators see neither weight_hr and h_0 nor, in a short call, any argument.
void LayerModule::check_projection(const Tensor& input) const {
  lltm::check_projection(cell, proj_size(), hidden_size, recurrent_dropout);
  const int64_t rows = cell.slots * hidden_size;
  for (int64_t k = 0; k < directions(); ++k) {
    const at::TensorList p = parameters_of(k);
    const auto check =
        [&](const char* name, const Tensor& tensor, const std::vector<SymInt>& shape) {
          check_shape(cell.layer_class, name, tensor, shape);
          check_kind_of_concatenated(cell.layer_class, name, tensor, input);
        };
    check("weight_hr", p.back(), {proj_size(), hidden_size});
    if (has_bias) {
      check("bias_ih", p[p.size() - 3], {rows});
      check("bias_hh", p[p.size() - 2], {rows});
    }
    if (prepacked) continue;  // the operator checks the packed weights
    check("weight_ih", p[0], {rows, columns_of_input(k)});
    check("weight_hh", p[1], {rows, proj_size()});
  }
}

LayerModule::Result LayerModule::forward(
    const Tensor& input, at::TensorList states, const Tensor& reset) const {
  const WithoutAutocast without_autocast(prepacked);
  check(input);
  TORCH_CHECK_VALUE(
      (input.dim() == 2 || input.dim() == 3) && input.sym_size(-1) == input_size,
      "lltm::",
      cell.layer_class,
      ": expected input of shape ",
      batch_first ? "(B, T, " : "(T, B, ",
      input_size,
      ") or (T, ",
      input_size,
      "), got ",
      shape_text(input.sym_sizes()));
  if (reset.defined()) check_reset(c10::str("lltm::", cell.layer_class), input, reset);
  const Interceptors interceptors = interceptors_of(input, states, parameters, reset);
  const WithoutAutograd guard(interceptors);
  const auto of_batch = [&](const auto& change) { return reset.defined() ? change() : reset; };
  if (input.dim() == 2) {
    const ConcatenatedState initial = initial_state(input, states, 1, /*batched=*/false);
    const Tensor column = of_batch([&] { return reset.unsqueeze(1); });
    const Result result = run({input.unsqueeze(1), std::nullopt, column}, initial, interceptors);
    const auto squeeze = [](const Tensor& tensor) { return tensor.squeeze(1); };
    return {
        squeeze(result.output),
        map_states(result.states, squeeze),
        map_states(result.more, squeeze)};
  }
  const Tensor steps = batch_first ? input.transpose(0, 1) : input;
  const ConcatenatedState initial =
      initial_state(input, states, steps.sym_size(1), /*batched=*/true);
  const Tensor by_step = batch_first ? of_batch([&] { return reset.transpose(0, 1); }) : reset;
  Result result = run({steps, std::nullopt, by_step}, initial, interceptors);
  if (batch_first) {
    result.output = result.output.transpose(0, 1);
    for (Tensor& output : result.more) output = output.transpose(0, 1);
  }
  return result;
}

LayerModule::Result LayerModule::forward(
    const PackedRows& input, at::TensorList states, const Tensor& reset) const {
  const auto& [rows, batch_sizes, sorted_indices, unsorted_indices] = input;
  const WithoutAutocast without_autocast(prepacked);
  check(rows);
  TORCH_CHECK_VALUE(
      rows.dim() == 2 && rows.sym_size(1) == input_size,
      "lltm::",
      cell.layer_class,
      ": expected input of packed shape (N, ",
      input_size,
      "), got ",
      shape_text(rows.sym_sizes()));
  if (reset.defined()) check_reset(c10::str("lltm::", cell.layer_class), rows, reset);
  const Interceptors interceptors = interceptors_of(rows, states, parameters, reset);
  const WithoutAutograd guard(interceptors);
  const SymInt batch = check_packed_rows(cell.layer_class, input, states);
  ConcatenatedState initial = initial_state(rows, states, batch, /*batched=*/true);
  // States are in the caller's order, packed rows in order of decreasing length.
  if (!states.empty() && sorted_indices.defined()) {
    initial.h = initial.h.index_select(1, sorted_indices);
    if (cell.has_c()) initial.c = initial.c.index_select(1, sorted_indices);
  }
  Result result = run({rows, batch_sizes, reset}, initial, interceptors);
  if (unsorted_indices.defined()) {
    result.states = map_states(result.states, [&order = unsorted_indices](const Tensor& s) {
      return s.index_select(1, order);
    });
  }
  return result;
}

ConcatenatedState LayerModule::initial_state(
    const Tensor& input, at::TensorList states, const SymInt& batch, bool batched) const {
  const int64_t count = directions();
  if (states.empty()) {
    ConcatenatedState first = first_state(cell, input, {SymInt(count), batch}, hidden_size);
    if (proj_size() > 0) first.h = Tensor();
    return first;
  }
  std::vector<SymInt> rows;
  rows.reserve(3);  // check_states appends one
  rows.emplace_back(count);
  if (batched) rows.push_back(batch);
  check_states(
      cell, cell.layer_class, input, states, "_0", std::move(rows), size_of_h(), hidden_size);
  if (batched) return concatenate(cell, states);
  return concatenate(cell, map_states(states, [](const Tensor& s) { return s.unsqueeze(1); }));
}

SequenceArgs LayerModule::args_of(
    int64_t k,
    bool reverse,
    const ConcatenatedState& initial,
    const Rows& rows,
    bool unobserved) const {
  SequenceArgs args = {{cell, rows.input, /*h_0=*/{}, /*c_0=*/{}, parameters_of(k)[0]}};
  set_parameters(args, has_bias, prepacked, hidden_size, parameters_of(k));
  args.batch_sizes = rows.batch_sizes;
  args.reverse = reverse;
  args.reset = rows.reset;
  args.checkpoint_steps = checkpoint_steps;
  if (initial.h.defined()) args.h_0 = select_state(initial.h, k, unobserved);
  if (cell.has_c()) args.c_0 = select_state(initial.c, k, unobserved);
  if (recurrent_dropout > 0) {  // one mask for all steps
    const Tensor ones = at::ones_like(args.h_0, {}, at::MemoryFormat::Contiguous);
    args.recurrent_mask = at::dropout(ones, recurrent_dropout, /*train=*/true);
  }
  return args;
}

SequenceOutputs LayerModule::run_projected(
    int64_t k, const SequenceArgs& args, const Interceptors& interceptors) const {
  const at::TensorList p = parameters_of(k);
  const Tensor& c_0 = args.c_0;
  const Tensor h_0 =
      args.h_0.defined() ? *args.h_0 : c_0.new_zeros_symint({c_0.sym_size(0), proj_size()});
  const bool unintercepted = args.input->is_cpu() && interceptors.at_most_autograd() &&
                             !prepacked && !args.batch_sizes.defined() && !args.reset.defined() &&
                             checkpoint_steps == 0 && !autocasts(args.input);
  if (unintercepted && is_short_for_product(args.input->size(0), hidden_size)) {
    return run_short_call(args.input, h_0, c_0, p, has_bias, args.reverse);
  }
  SequenceArgs of_y = args;
  of_y.h_0 = at::zeros_like(c_0);
  // Prepacked weights always have the columns of h_0.
  const bool with_h_0 = args.h_0.defined() || prepacked;
  const RowEnds ends(args.batch_sizes.flat(), args.reverse);
  if (with_h_0) of_y.input = ends.append_h_0(args.input, h_0, args.reset);
  if (!prepacked) {
    ProjectedWeights weights = project_weights(p[0], p[1], p.back(), with_h_0, unintercepted);
    of_y.weight_ih = std::move(weights.weight_ih);
    of_y.weight_hh = std::move(weights.weight_hh);
  }
  const auto [y, y_n, c_n] = op::call(of_y);
  const Tensor output = project_outputs(y, p.back(), unintercepted);
  return {output, ends.last_of(output, h_0), c_n};
}

SequenceOutputs LayerModule::run_direction(
    int64_t k, const SequenceArgs& args, const Interceptors& interceptors) const {
  return proj_size() > 0 ? run_projected(k, args, interceptors) : op::call(args);
}

LayerModule::Result LayerModule::run(
    Rows rows, const ConcatenatedState& initial, const Interceptors& interceptors) const {
  const bool unobserved = interceptors.none();
  if (directions() == 1) {  // states need no copy
    const SequenceArgs args = args_of(0, /*reverse=*/false, initial, rows, unobserved);
    auto [output, h, c] = run_direction(0, args, interceptors);
    h = unsqueeze_state(std::move(h), unobserved);
    if (cell.has_c()) c = unsqueeze_state(std::move(c), unobserved);
    std::vector<Tensor> more = split_output(output);
    return {std::move(output), split(cell, std::move(h), std::move(c)), std::move(more)};
  }
  std::vector<Tensor> more;
  std::vector<Tensor> h_n;
  std::vector<Tensor> c_n;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    if (layer > 0 && dropout > 0) rows.input = at::dropout(rows.input, dropout, /*train=*/true);
    const int64_t first = directions_each() * layer;
    std::vector<SequenceArgs> each;
    for (int64_t k = 0; k < directions_each(); ++k) {
      each.push_back(args_of(first + k, /*reverse=*/k == 1, initial, rows, unobserved));
    }
    std::vector<SequenceOutputs> results(each.size());
    if (each.size() == 2 && proj_size() == 0 && fits_side_by_side(each[0], interceptors)) {
      std::tie(results[0], results[1]) =
          sequences_side_by_side(std::move(each[0]), std::move(each[1]));
    } else {
      for (size_t k = 0; k < each.size(); ++k) {
        results[k] = run_direction(first + static_cast<int64_t>(k), each[k], interceptors);
      }
    }
    std::vector<Tensor> outputs;
    more.clear();
    for (auto& [output, h, c] : results) {
      std::vector<Tensor> others = split_output(output);
      for (size_t n = 0; n < others.size(); ++n) {
        if (outputs.empty()) {
          more.push_back(others[n]);
        } else {
          more[n] = at::cat({more[n], others[n]}, -1);
        }
      }
      outputs.push_back(std::move(output));
      h_n.push_back(std::move(h));
      c_n.push_back(std::move(c));
    }
    rows.input = outputs.size() == 1 ? outputs.front() : at::cat(outputs, -1);
  }
  return {
      rows.input,
      split(cell, at::stack(h_n), cell.has_c() ? at::stack(c_n) : Tensor()),
      std::move(more)};
}

std::vector<Tensor> LayerModule::split_output(Tensor& output) const {
  if (cell.outputs == 0) return {};
  std::vector<Tensor> all = output.chunk(cell.output_columns(), -1);
  const Tensor h = all.front();
  all.erase(all.begin());
  if (cell.output_of_h >= 0) all.insert(all.begin() + cell.output_of_h, h);
  output = all.front();
  all.erase(all.begin());
  return all;
}

// ---- the operators ------------------------------------------------------------

std::vector<Tensor> layer_step(
    std::string_view name,
    const Tensor& input,
    at::TensorList states,
    at::TensorList parameters,
    int64_t input_size,
    int64_t hidden_size) {
  const CellInfo& cell = get_cell("lltm::layer_step", name);
  return StepModule{cell, input_size, hidden_size, parameters}.forward(input, states);
}

std::tuple<Tensor, std::vector<Tensor>> layer(
    std::string_view name,
    const Tensor& input,
    at::TensorList states,
    at::TensorList parameters,
    bool has_bias,
    int64_t input_size,
    int64_t hidden_size,
    int64_t num_layers,
    bool batch_first,
    bool bidirectional,
    double dropout,
    double recurrent_dropout,
    int64_t checkpoint_steps,
    bool prepacked,
    const std::optional<Tensor>& batch_sizes,
    const std::optional<Tensor>& sorted_indices,
    const std::optional<Tensor>& unsorted_indices,
    const std::optional<Tensor>& reset) {
  const LayerModule module = {
      get_cell("lltm::layer", name),
      input_size,
      hidden_size,
      num_layers,
      batch_first,
      bidirectional,
      dropout,
      recurrent_dropout,
      checkpoint_steps,
      prepacked,
      parameters,
      has_bias};
  const PackedRows rows = {
      input,
      or_undefined(batch_sizes),
      or_undefined(sorted_indices),
      or_undefined(unsorted_indices)};
  const Tensor& mask = or_undefined(reset);
  LayerModule::Result result = batch_sizes.has_value() ? module.forward(rows, states, mask)
                                                       : module.forward(input, states, mask);
  return {std::move(result.output), std::move(result).states_and_more()};
}

namespace {

void register_composition(torch::Library& m) {
  m.impl("layer", TORCH_FN(layer));
  m.impl("layer_step", TORCH_FN(layer_step));
}

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  register_composition(m);
}

// torch.vmap maps over the operators that these functions call.
TORCH_LIBRARY_IMPL(lltm, FuncTorchBatchedDecomposition, m) {
  register_composition(m);
}

}  // namespace lltm
