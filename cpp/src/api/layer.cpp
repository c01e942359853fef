// Sizes may be symbolic, because torch.compile and torch.export trace this code.
#include "api/layer.h"

#include "api/initial_states.h"
#include "api/parameters.h"
#include "api/projection.h"
#include "op/argument_checks.h"
#include "op/bidirectional.h"
#include "op/check.h"
#include "op/interceptors.h"
#include "op/operators.h"

#include <lltm/nn.h>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm {
namespace {

using at::Tensor;
using c10::str;
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
using WithoutAutograd = at::AutoDispatchBelowADInplaceOrView;

// The operators might report a parameter instead, but the caller has passed only the input.
void check_kind(
    const char* where, const Tensor& input, const Tensor& parameter, const char* owner) {
  check_device(where, "input", input, parameter.device(), owner);
  if (!autocasts(input)) check_dtype(where, "input", input, parameter.scalar_type(), owner);
}

}  // namespace

// ---- one step -----------------------------------------------------------------

std::vector<Tensor> run_step(
    const CellInfo& cell,
    const Tensor& input,
    at::TensorList states,
    at::TensorList parameters,
    int64_t input_size,
    int64_t hidden_size) {
  const char* const where = cell.modules.step_class;
  check_size(where, "hidden_size", hidden_size, kLargestSize);
  check_tensor(where, "input", input);
  TORCH_CHECK_VALUE(
      (input.dim() == 1 || input.dim() == 2) && input.sym_size(-1) == input_size,
      expected(
          where,
          str("input of shape (B, ", input_size, ") or (", input_size, ",)"),
          shape_text(input.sym_sizes())));
  const auto passed = static_cast<int64_t>(parameters.size());
  const auto count = [&](bool bias) { return count_parameters(cell, bias, /*prepacked=*/false); };
  const bool has_bias = passed == count(/*bias=*/true);
  TORCH_CHECK_VALUE(
      has_bias || passed == count(/*bias=*/false),
      expected(where, "weights with or without biases", str(passed, " parameters")));
  check_kind(where, input, parameters[0], "parameters");
  check_custom_parameters(cell, where, input, has_bias, hidden_size, parameters);
  std::optional<WithoutAutograd> guard;
  if (interceptors_of(input, states, parameters).none()) guard.emplace();
  const bool batched = input.dim() == 2;
  if (!states.empty()) {
    StateShape rows;
    if (batched) rows.push_back(input.sym_size(0));
    check_states(cell, where, input, states, "", std::move(rows), hidden_size, hidden_size);
  }
  if (!batched) {
    const auto next = run_step(
        cell,
        input.unsqueeze(0),
        map_states(states, [](const Tensor& s) { return s.unsqueeze(0); }),
        parameters,
        input_size,
        hidden_size);
    return map_states(next, [](const Tensor& s) { return s.squeeze(0); });
  }
  ConcatenatedState initial = states.empty()
                                  ? first_state(cell, input, {input.sym_size(0)}, hidden_size)
                                  : concatenate(cell, states);
  SequenceArgs args = {{cell, input, initial.h, std::move(initial.c), parameters[0]}};
  set_parameters(args, has_bias, /*prepacked=*/false, hidden_size, parameters);
  auto [output, h, c] = op::call(args);
  return split(cell, std::move(h), std::move(c));
}

// ---- options of layers ----------------------------------------------------------

void check_options(const CellInfo& cell, const LayerOptions& options) {
  const char* const where = cell.modules.layer_class;
  check_size(where, "hidden_size", options.hidden_size(), kLargestSize);
  check_size(where, "num_layers", options.num_layers(), kMostLayers);
  check_probability(where, "dropout", options.dropout());
  check_probability(where, "recurrent_dropout", options.recurrent_dropout());
  check_checkpoint_steps(where, options.checkpoint_steps());
  check_projection(cell, options.proj_size(), options.hidden_size(), options.recurrent_dropout());
}

void print_options(std::ostream& stream, const LayerOptions& options) {
  const auto text = [](bool value) { return value ? "true" : "false"; };
  stream << "input_size=" << options.input_size() << ", hidden_size=" << options.hidden_size()
         << ", num_layers=" << options.num_layers() << ", bias=" << text(options.bias())
         << ", batch_first=" << text(options.batch_first()) << ", dropout=" << options.dropout()
         << ", bidirectional=" << text(options.bidirectional());
  const auto print = [&](const char* name, auto value, auto usual) {
    if (value != usual) stream << ", " << name << '=' << value;
  };
  print("proj_size", options.proj_size(), 0);
  print("heads", options.heads(), 1);
  print("recurrent_dropout", options.recurrent_dropout(), 0.0);
  print("checkpoint_steps", options.checkpoint_steps(), 0);
}

// ---- layers -------------------------------------------------------------------

namespace {

class Layers : LayerCall {
 public:
  struct Result {
    Tensor output;
    std::vector<Tensor> states;
    std::vector<Tensor> more;  // outputs, of cells that return several
  };

  explicit Layers(const LayerCall& call)
      : LayerCall(call),
        interceptors(interceptors_of(input.data, states, parameters, input.reset)) {
    check();
  }

  Result forward() const;

 private:
  // As for the operator sequence: (T, B, I), or (N, I) with batch_sizes.
  struct Rows {
    Tensor input;
    std::optional<Tensor> batch_sizes;
    Tensor reset;
  };

  int64_t directions_each() const { return options.bidirectional() ? 2 : 1; }
  int64_t directions() const { return options.num_layers() * directions_each(); }
  double dropout() const { return training ? options.dropout() : 0; }
  double recurrent_dropout() const { return training ? options.recurrent_dropout() : 0; }
  int64_t size_of_h() const { return proj_size > 0 ? proj_size : options.hidden_size(); }
  at::TensorList parameters_of(int64_t k) const {
    const size_t each = parameters.size() / directions();
    return parameters.slice(k * each, each);
  }

  void check();
  void check_projection() const;
  Result forward_packed() const;
  // Concatenates checked states, (L*D, B, H) each. With a projection, h_0 is (L*D, B, P), or
  // undefined without states.
  ConcatenatedState initial_state(const SymInt& batch, bool batched) const;
  // Without interceptors, views are created without the dispatcher.
  Result run(Rows rows, const ConcatenatedState& initial) const;
  // They refer to `rows`.
  SequenceArgs args_of(
      int64_t k, bool reverse, const ConcatenatedState& initial, const Rows& rows) const;
  SequenceOutputs run_direction(int64_t k, const SequenceArgs& args) const;
  SequenceOutputs run_projected(int64_t k, const SequenceArgs& args) const;
  // Leaves the first of the cell's outputs, and returns the others.
  std::vector<Tensor> split_output(Tensor& output) const;

  const Interceptors interceptors;
  int64_t proj_size = 0;  // P if the parameters end with weight_hr
};

void Layers::check() {
  const char* const where = cell.modules.layer_class;
  check_tensor(where, "input", input.data);
  check_options(cell, options);
  const auto passed = static_cast<int64_t>(parameters.size());
  const int64_t count = directions() * count_parameters(cell, options.bias(), prepacked);
  const bool projects = can_project(cell) && passed == count + directions();
  TORCH_CHECK_VALUE(
      passed == count || projects,
      expected(
          where,
          str(options.bias() ? "weights and biases of " : "weights of ",
              options.num_layers(),
              options.bidirectional() ? " layers in two directions" : " layers"),
          str(passed, " parameters")));
  if (!prepacked) {
    check_kind(where, input.data, parameters.front(), "parameters");
  } else if (options.bias()) {  // prepacked weights are bytes
    check_kind(where, input.data, parameters[1], "prepacked layer");
  }
  for (int64_t k = 0; k < directions(); ++k) {
    check_custom_parameters(
        cell, where, input.data, options.bias(), options.hidden_size(), parameters_of(k));
  }
  if (projects) {
    const Tensor& weight_hr = parameters.back();
    check_tensor(where, "weight_hr", weight_hr);
    TORCH_CHECK_VALUE(
        weight_hr.dim() == 2,
        expected(
            where,
            "weight_hr of shape (proj_size, hidden_size)",
            shape_text(weight_hr.sym_sizes())));
    proj_size = weight_hr.sym_size(0).guard_int(__FILE__, __LINE__);
    if (proj_size > 0) check_projection();
  }
}

// The operators see neither weight_hr and h_0 nor, in a short call, any argument.
void Layers::check_projection() const {
  lltm::check_projection(cell, proj_size, options.hidden_size(), recurrent_dropout());
  const int64_t rows = cell.slots * options.hidden_size();
  for (int64_t k = 0; k < directions(); ++k) {
    const at::TensorList p = parameters_of(k);
    const auto check = [&](const char* name, const Tensor& tensor, c10::SymIntArrayRef shape) {
      check_concatenated(cell.modules.layer_class, name, tensor, shape, input.data);
    };
    check("weight_hr", p.back(), {proj_size, options.hidden_size()});
    if (options.bias()) {
      check("bias_ih", p[p.size() - 3], {rows});
      check("bias_hh", p[p.size() - 2], {rows});
    }
    if (prepacked) continue;  // the operator checks the packed weights
    const bool first = k < directions_each();
    check("weight_ih", p[0], {rows, first ? options.input_size() : directions_each() * proj_size});
    check("weight_hh", p[1], {rows, proj_size});
  }
}

Layers::Result Layers::forward() const {
  const auto& [data, batch_sizes, sorted_indices, unsorted_indices, reset] = input;
  const char* const where = cell.modules.layer_class;
  const bool packed = batch_sizes.defined();
  const bool batched = data.dim() == 3;
  const auto shapes = [&] {
    if (packed) return str("packed shape (N, ", options.input_size(), ")");
    const char* const steps = options.batch_first() ? "(B, T, " : "(T, B, ";
    return str("shape ", steps, options.input_size(), ") or (T, ", options.input_size(), ")");
  };
  TORCH_CHECK_VALUE(
      (data.dim() == 2 || (batched && !packed)) && data.sym_size(-1) == options.input_size(),
      expected(where, "input of " + shapes(), shape_text(data.sym_sizes())));
  if (reset.defined()) check_reset(where, data, reset);
  std::optional<WithoutAutograd> guard;
  if (interceptors.none()) guard.emplace();
  if (packed) return forward_packed();

  const auto by_step = [&](const Tensor& tensor) {
    if (!batched && tensor.defined()) return tensor.unsqueeze(1);
    return options.batch_first() && tensor.defined() ? tensor.transpose(0, 1) : tensor;
  };
  const auto in_layout = [&](const Tensor& tensor) {
    if (!batched) return tensor.squeeze(1);
    return options.batch_first() ? tensor.transpose(0, 1) : tensor;
  };
  const Rows rows = {by_step(data), std::nullopt, by_step(reset)};
  Result result = run(rows, initial_state(rows.input.sym_size(1), batched));
  return {
      in_layout(result.output),
      batched ? std::move(result.states) : map_states(result.states, in_layout),
      map_states(result.more, in_layout)};
}

Layers::Result Layers::forward_packed() const {
  const auto& [data, batch_sizes, sorted_indices, unsorted_indices, reset] = input;
  const SymInt batch = check_packed(cell.modules.layer_class, input, states);
  ConcatenatedState initial = initial_state(batch, /*batched=*/true);
  if (!states.empty()) {
    initial.h = permuted(initial.h, sorted_indices);
    initial.c = permuted(initial.c, sorted_indices);
  }
  Result result = run({data, batch_sizes, reset}, initial);
  result.states = map_states(result.states, [&order = unsorted_indices](const Tensor& state) {
    return permuted(state, order);
  });
  return result;
}

ConcatenatedState Layers::initial_state(const SymInt& batch, bool batched) const {
  const int64_t hidden = options.hidden_size();
  StateShape rows = {SymInt(directions())};
  if (batched || states.empty()) rows.push_back(batch);
  if (states.empty()) {
    ConcatenatedState first = first_state(cell, input.data, std::move(rows), hidden);
    if (proj_size > 0) first.h = Tensor();
    return first;
  }
  check_states(
      cell,
      cell.modules.layer_class,
      input.data,
      states,
      "_0",
      std::move(rows),
      size_of_h(),
      hidden);
  if (batched) return concatenate(cell, states);
  return concatenate(cell, map_states(states, [](const Tensor& s) { return s.unsqueeze(1); }));
}

SequenceArgs Layers::args_of(
    int64_t k, bool reverse, const ConcatenatedState& initial, const Rows& rows) const {
  SequenceArgs args = {{cell, rows.input, /*h_0=*/{}, /*c_0=*/{}, parameters_of(k)[0]}};
  set_parameters(args, options.bias(), prepacked, options.hidden_size(), parameters_of(k));
  args.batch_sizes = rows.batch_sizes;
  args.reverse = reverse;
  args.reset = rows.reset;
  args.checkpoint_steps = options.checkpoint_steps();
  if (initial.h.defined()) args.h_0 = select_state(initial.h, k, interceptors.none());
  if (cell.has_c()) args.c_0 = select_state(initial.c, k, interceptors.none());
  if (recurrent_dropout() > 0) {  // one mask for all steps
    const Tensor ones = at::ones_like(args.h_0, {}, at::MemoryFormat::Contiguous);
    args.recurrent_mask = at::dropout(ones, recurrent_dropout(), /*train=*/true);
  }
  return args;
}

SequenceOutputs Layers::run_projected(int64_t k, const SequenceArgs& args) const {
  const at::TensorList p = parameters_of(k);
  const Tensor& c_0 = args.c_0;
  const Tensor h_0 =
      args.h_0.defined() ? *args.h_0 : c_0.new_zeros_symint({c_0.sym_size(0), proj_size});
  const bool unintercepted = args.input->is_cpu() && interceptors.at_most_autograd() &&
                             !prepacked && !args.batch_sizes.defined() && !args.reset.defined() &&
                             options.checkpoint_steps() == 0 && !autocasts(args.input);
  if (unintercepted && is_short_for_product(args.input->size(0), options.hidden_size())) {
    return run_short_call(args.input, h_0, c_0, p, options.bias(), args.reverse);
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
  const Tensor output = project(y, p.back(), unintercepted);
  return {output, ends.last_of(output, h_0), c_n};
}

SequenceOutputs Layers::run_direction(int64_t k, const SequenceArgs& args) const {
  return proj_size > 0 ? run_projected(k, args) : op::call(args);
}

Layers::Result Layers::run(Rows rows, const ConcatenatedState& initial) const {
  if (directions() == 1) {  // states need no copy
    const SequenceArgs args = args_of(0, /*reverse=*/false, initial, rows);
    auto [output, h, c] = run_direction(0, args);
    h = unsqueeze_state(std::move(h), interceptors.none());
    if (cell.has_c()) c = unsqueeze_state(std::move(c), interceptors.none());
    std::vector<Tensor> more = split_output(output);
    return {std::move(output), split(cell, std::move(h), std::move(c)), std::move(more)};
  }
  std::vector<Tensor> more;
  std::vector<Tensor> h_n;
  std::vector<Tensor> c_n;
  for (int64_t layer = 0; layer < options.num_layers(); ++layer) {
    if (layer > 0 && dropout() > 0) rows.input = at::dropout(rows.input, dropout(), /*train=*/true);
    const int64_t first = directions_each() * layer;
    std::vector<SequenceArgs> each;
    for (int64_t k = 0; k < directions_each(); ++k) {
      each.push_back(args_of(first + k, /*reverse=*/k == 1, initial, rows));
    }
    std::vector<SequenceOutputs> results(each.size());
    if (each.size() == 2 && proj_size == 0 && fits_side_by_side(each[0], interceptors)) {
      std::tie(results[0], results[1]) =
          sequences_side_by_side(std::move(each[0]), std::move(each[1]));
    } else {
      for (size_t k = 0; k < each.size(); ++k) {
        results[k] = run_direction(first + static_cast<int64_t>(k), each[k]);
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

std::vector<Tensor> Layers::split_output(Tensor& output) const {
  if (cell.outputs == 0) return {};
  std::vector<Tensor> all = output.chunk(cell.output_columns(), -1);
  const Tensor h = all.front();
  all.erase(all.begin());
  if (cell.modules.output_of_h >= 0) all.insert(all.begin() + cell.modules.output_of_h, h);
  output = all.front();
  all.erase(all.begin());
  return all;
}

}  // namespace

std::tuple<Tensor, std::vector<Tensor>> run_layer(const LayerCall& call) {
  std::optional<c10::impl::ExcludeDispatchKeyGuard> without_autocast;  // prepacked layers ignore it
  if (call.prepacked) without_autocast.emplace(c10::autocast_dispatch_keyset);
  auto [output, states, more] = Layers(call).forward();
  states.insert(states.end(), more.begin(), more.end());
  return {std::move(output), std::move(states)};
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
  return run_step(cell, input, states, parameters, input_size, hidden_size);
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
  LayerOptions options(input_size, hidden_size);
  options.num_layers(num_layers)
      .bias(has_bias)
      .batch_first(batch_first)
      .bidirectional(bidirectional)
      .dropout(dropout)
      .recurrent_dropout(recurrent_dropout)
      .checkpoint_steps(checkpoint_steps);
  const LayerInput packed_or_padded = {
      input,
      or_undefined(batch_sizes),
      or_undefined(sorted_indices),
      or_undefined(unsorted_indices),
      or_undefined(reset)};
  const CellInfo& cell = get_cell("lltm::layer", name);
  return run_layer(
      {cell, options, /*training=*/true, prepacked, parameters, packed_or_padded, states});
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
