// Files for the real-time library.
#include "api/parameters.h"
#include "api/serialize.h"
#include "cell/registry.h"
#include "common/weights.h"
#include "realtime/format.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lltm {

using at::Tensor;

namespace {

constexpr const char* kWhere = "lltm::save_realtime: ";

// In float32, of this shape; zeros if undefined.
Tensor stored(const std::string& name, const Tensor& tensor, std::vector<int64_t> shape) {
  if (!tensor.defined()) return at::zeros(shape);
  TORCH_CHECK_VALUE(
      tensor.sizes() == shape,
      kWhere,
      "expected ",
      name,
      " of shape ",
      at::IntArrayRef(shape),
      ", got ",
      tensor.sizes());
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
    TORCH_CHECK_VALUE(
        of_layer[0].dim() == 2 && of_layer[cell.concatenated ? 0 : 1].dim() == 2,
        kWhere,
        "expected weights of 2 dimensions, without heads, got ",
        of_layer[0].sizes());
    set_parameters(args, bias, /*prepacked=*/false, hidden_size, of_layer);
    const Weights weights = weights_of(args);
    const int64_t x = cell.x.count() * hidden_size, h = cell.h.count() * hidden_size;
    const auto add = [&](const char* stem, const Tensor& tensor, std::vector<int64_t> shape) {
      const std::string name = stem + ("_l" + std::to_string(k));
      tensors[name] = stored(name, tensor, std::move(shape));
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
