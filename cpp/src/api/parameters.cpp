#include "api/parameters.h"

#include "api/initial_states.h"
#include "op/argument_checks.h"

#include <vector>

namespace lltm {

using at::Tensor;

namespace {

// Inserts zeros for the gates without biases.
Tensor with_all_biases(
    const CellInfo& cell,
    const Tensor& biases,
    const SlotRange& slots,
    const int* blocks,
    int64_t hidden_size) {
  if (count_biases(cell, slots) == slots.count()) return biases;
  std::vector<Tensor> all(slots.count());
  for (int slot = slots.begin; slot < slots.end; ++slot) {
    if ((cell.modules.without_bias >> slot & 1) != 0)
      all[blocks[slot]] = biases.new_zeros(hidden_size);
  }
  int64_t next = 0;
  for (Tensor& bias : all) {
    if (!bias.defined()) bias = biases.narrow(0, hidden_size * next++, hidden_size);
  }
  return cat_without_autocast(all, 0);
}

}  // namespace

void set_parameters(
    SequenceInputs& args,
    bool has_bias,
    bool prepacked,
    int64_t hidden_size,
    at::TensorList parameters) {
  const CellInfo& cell = *args.cell;
  const size_t matrices = cell.concatenated || prepacked ? 1 : 2;
  args.weight_ih = parameters[0];
  if (matrices == 2) args.weight_hh = parameters[1];
  if (cell.parameters == 0 && (!has_bias || cell.modules.without_bias == 0)) {
    if (has_bias) args.bias_ih = parameters[matrices];
    if (has_bias && !cell.concatenated) args.bias_hh = parameters[matrices + 1];
    return;
  }
  const Tensor zeros =
      has_bias ? Tensor() : parameters.back().new_zeros(cell.concatenated_blocks() * hidden_size);
  const auto bias = [&](size_t k, const SlotRange& slots, const int* blocks) {
    if (!has_bias) return zeros.narrow(0, 0, slots.count() * hidden_size);
    return with_all_biases(cell, parameters[matrices + k], slots, blocks, hidden_size);
  };
  std::vector<Tensor> appended = {bias(0, cell.x, cell.x_blocks)};
  const size_t first = parameters.size() - cell.parameters;
  for (int k = 0; k < cell.parameters; ++k) {
    const Tensor& custom = parameters[first + k];
    appended.push_back(
        (cell.modules.scalars >> k & 1) != 0 ? custom.expand({hidden_size}) : custom);
  }
  args.bias_ih = appended.size() == 1 ? appended[0] : cat_without_autocast(appended, 0);
  args.bias_hh = bias(1, cell.h, cell.h_blocks);
}

int64_t count_biases(const CellInfo& cell, const SlotRange& slots) {
  int64_t count = slots.count();
  for (int slot = slots.begin; slot < slots.end; ++slot)
    count -= cell.modules.without_bias >> slot & 1;
  return count;
}

void check_custom_parameters(
    const CellInfo& cell,
    const char* where,
    const Tensor& input,
    bool has_bias,
    int64_t hidden_size,
    at::TensorList parameters) {
  if (cell.parameters == 0 && cell.modules.without_bias == 0) return;
  const auto check = [&](const char* name, const Tensor& parameter, int64_t size) {
    check_concatenated(where, name, parameter, {c10::SymInt(size)}, input);
  };
  const size_t first = parameters.size() - cell.parameters;
  if (has_bias) {
    check("bias_ih", parameters[first - 2], count_biases(cell, cell.x) * hidden_size);
    const bool partial = count_biases(cell, cell.h) < cell.h.count();
    if (partial) check("bias_hh", parameters[first - 1], count_biases(cell, cell.h) * hidden_size);
  }
  for (int k = 0; k < cell.parameters; ++k) {
    const bool scalar = (cell.modules.scalars >> k & 1) != 0;
    check(cell.modules.parameter_names[k], parameters[first + k], scalar ? 1 : hidden_size);
  }
}

}  // namespace lltm
