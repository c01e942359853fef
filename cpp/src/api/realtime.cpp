// Files for the real-time library.
#include "api/parameters.h"
#include "api/serialize.h"
#include "cell/registry.h"
#include "common/weights.h"
#include "op/argument_checks.h"
#include "realtime/format.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lltm {

using at::Tensor;

namespace {

constexpr const char* kWhere = "lltm::save_realtime: ";

// In float32, of this shape; zeros if undefined.
Tensor stored(const char* name, const Tensor& tensor, const std::vector<int64_t>& shape) {
  if (!tensor.defined()) return at::zeros(shape);
  const std::vector<c10::SymInt> expected(shape.begin(), shape.end());
  check_shape("save_realtime", name, tensor, expected);
  return tensor.detach().to(at::kCPU, at::kFloat).contiguous();
}

}  // namespace

void save_realtime(
    const std::string& cell_name,
    const std::vector<Tensor>& parameters,
    bool bias,
    int64_t num_layers,
    int64_t hidden_size,
    const std::string& path) {
  const CellInfo& cell = get_cell("lltm::save_realtime", CellName(cell_name));
  if (const char* const has = realtime::unsupported(cell)) {
    TORCH_CHECK_VALUE(false, kWhere, "expected a cell without ", has, ", got ", cell.title());
  }
  const auto each = static_cast<size_t>(count_parameters(cell, bias, /*prepacked=*/false));
  const auto expected = each * static_cast<size_t>(num_layers);
  TORCH_CHECK_VALUE(
      num_layers > 0 && parameters.size() == expected,
      kWhere,
      "expected ",
      expected,
      " parameters, of one direction of at least one layer, got ",
      parameters.size());
  std::map<std::string, Tensor> tensors;
  for (int64_t k = 0; k < num_layers; ++k) {
    SequenceInputs args = {cell, {}, {}, {}, {}};
    const at::TensorList of_layer = at::TensorList(parameters).slice(k * each, each);
    constexpr const char* kOp = "save_realtime";
    for (const Tensor& parameter : of_layer) {
      check_tensor(kOp, "parameters", parameter);
      check_kind_of_concatenated(kOp, "parameters", parameter, of_layer[0]);
    }
    const auto columns = [&](const Tensor& matrix) {
      return matrix.dim() == 0 ? 0 : matrix.size(-1);
    };
    const int64_t rows = cell.concatenated ? cell.concatenated_blocks() : cell.x.count();
    check_shape(kOp, "weight_ih", of_layer[0], {rows * hidden_size, columns(of_layer[0])});
    if (!cell.concatenated) {
      check_shape(kOp, "weight_hh", of_layer[1], {cell.h.count() * hidden_size, hidden_size});
    }
    check_custom_parameters(cell, kOp, of_layer[0], bias, hidden_size, of_layer);
    set_parameters(args, bias, /*prepacked=*/false, hidden_size, of_layer);
    const Weights weights = weights_of(args);
    const int64_t x = cell.x.count() * hidden_size, h = cell.h.count() * hidden_size;
    const auto add =
        [&](const char* stem, const Tensor& tensor, const std::vector<int64_t>& shape) {
          tensors[stem + ("_l" + std::to_string(k))] = stored(stem, tensor, shape);
        };
    add("weight_ih", weights.ih, {x, weights.ih.size(1)});
    add("weight_hh", weights.hh, {h, hidden_size});
    add("bias_ih", args.bias_ih, {x + cell.parameters * hidden_size});
    add("bias_hh", args.bias_hh, {h});
  }
  save_safetensors(
      tensors,
      {{realtime::kVersionKey, realtime::kVersion}, {realtime::kCellKey, cell.name}},
      path);
}

}  // namespace lltm

// For lltm.realtime.save, also if the wheel has no lltm._C for the running Python.
TORCH_LIBRARY_IMPL(lltm, CompositeImplicitAutograd, m) {
  m.impl(
      "_save_realtime",
      [](const std::string& cell,
         at::TensorList parameters,
         bool bias,
         int64_t num_layers,
         int64_t hidden_size,
         const std::string& path) {
        lltm::save_realtime(cell, parameters.vec(), bias, num_layers, hidden_size, path);
      });
}
