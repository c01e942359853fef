#include "common/device.h"
#include "common/tensor_steps.h"
#include "cpu/dispatch.h"
#include "cpu/engine/engine.h"
#include "cpu/gemm/formats.h"
#include "cpu/prepack.h"
#include "cpu/threads/parallel.h"
#include "op/argument_checks.h"
#include "op/aten_backend.h"
#include "op/backend.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/nan_to_num.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

struct Cpu {
  using DeviceGuard = NoDeviceGuard;
  static constexpr auto backward = cpu::sequence_backward;
  static constexpr auto prepack = cpu::prepack;

  static SequenceResult forward(const SequenceArgs& args) {
    if (!args.prepacked()) return cpu::sequence_forward(args);
    check_prepacked(args);
    const Tensor weights = aligned(args.weight_ih);
    if (weights.is_same(args.weight_ih)) return cpu::sequence_forward(args);
    SequenceArgs with_aligned = args;
    with_aligned.weight_ih = weights;
    return cpu::sequence_forward(with_aligned);
  }
};

std::vector<Tensor> unpack_saved(std::string_view name, const Tensor& given) {
  constexpr const char* kOp = "lltm::_unpack";
  if (given.scalar_type() != at::kByte) return aten_fallback::unpack_concatenated(name, given);
  const CellInfo& cell = get_cell(kOp, name);
  check_memory("_unpack", "packed", given);
  check_prepacked(kOp, cell, given);
  const WithoutAutocast without_autocast;
  const Tensor packed = aligned(given);
  const Weights weights = unpack(cell, packed);
  if (!has_form(bytes_of(packed), GemmFormat::kInt8)) return matrices_of_layer(cell, weights);
  std::vector<Tensor> rows, scales;
  for (const Tensor& w : {weights.ih, weights.hh}) {  // exactly rows * scales; a zero row has 0 / 0
    scales.push_back(at::amax(w.abs(), -1) / kInt8Largest);
    rows.push_back(at::nan_to_num(w / scales.back().unsqueeze(-1), 0).to(at::kChar));
  }
  return {rows[0], rows[1], scales[0], scales[1]};
}

Tensor prepack_int8(
    std::string_view cell,
    const Tensor& rows_ih,
    const Tensor& rows_hh,
    const Tensor& scales_ih,
    const Tensor& scales_hh) {
  check_prepack_int8(rows_ih, rows_hh, scales_ih, scales_hh);
  const auto weights = [](const Tensor& rows, const Tensor& scales) {
    return rows.to(at::kFloat) * scales.unsqueeze(-1);
  };
  return CheckedBackend<Cpu>::prepack(
      cell, weights(rows_ih, scales_ih), weights(rows_hh, scales_hh), at::kQInt8);
}

std::string description() {
  std::ostringstream text;
  text << "CPU kernels: " << kernels_default()->name << (kernels_avx2() != nullptr ? ", AVX2" : "")
       << (kernels_avx512() != nullptr ? ", AVX512" : "")
       << (kernels_amx() != nullptr ? ", AMX" : "") << '\n'
       << "CPU kernels in use: " << kernels().name << '\n'
       << "CPU micro-kernel: " << (F32Format::available() ? "float32" : "none")
       << (kernels().fast_bf16 ? ", bfloat16" : "")
       << (Bf16x3Format::available() ? ", float32 as bf16x3 (AMX)" : "") << '\n';
  return text.str();
}

bool fits_side_by_side(const SequenceArgs& call, bool training) {
  const Tensor& input = call.input;
  const bool bf16 = input.scalar_type() == at::kBFloat16;
  const LayerShape shape = {
      call.h_0->size(0),
      input.size(-1),
      call.h_0->size(1),
      flat_size(input),
      bf16,
      slots_of(*call.cell),
      packed_heads_of(call.weight_hh)};
  return schedule_side_by_side(current_machine(), shape, training);
}

void run_side_by_side(const std::function<void(size_t)>& run) {
  const int64_t threads = std::min(available_threads(), usable_cpus());
  run_crews(2, std::max<int64_t>(threads / 2, 1), [&](int64_t k) { run(static_cast<size_t>(k)); });
}

constexpr Device kDevice = {
    [] { return kernels().name; }, description, fits_side_by_side, run_side_by_side};

}  // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  register_device(c10::DeviceType::CPU, kDevice);
  register_backend<Cpu>(m);
  m.impl("_unpack", TORCH_FN(unpack_saved));
  m.impl("_prepack_int8", TORCH_FN(prepack_int8));
}

}  // namespace lltm::cpu
