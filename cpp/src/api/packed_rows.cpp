#include "api/packed_rows.h"

#include "op/argument_checks.h"
#include "op/check.h"
#include "op/interceptors.h"

#include <optional>

namespace lltm {
namespace {

using at::Tensor;
using c10::SymInt;

SymInt packed_batch(const char* where, const LayerInput& packed, at::TensorList states) {
  const Tensor& sizes = packed.batch_sizes;
  const Tensor& data = packed.data;
  const bool has_values = is_unwrapped(sizes);
  if (has_values) {
    check_batch_sizes(where, sizes, /*batch=*/std::nullopt, data.sym_size(0), data.device());
  }
  const bool steps = sizes.dim() == 1 && sizes.sym_numel() > 0;
  if (steps && has_values) return sizes[0].item<int64_t>();
  if (packed.sorted_indices.defined()) return packed.sorted_indices.sym_size(0);
  if (!states.empty()) {  // the operator compares it with batch_sizes
    const Tensor& h_0 = states[0];
    return h_0.defined() && h_0.dim() == 3 ? h_0.sym_size(1) : SymInt(0);
  }
  return steps ? sizes.select(0, 0).item().toSymInt() : SymInt(0);
}

// index_select would not name the argument.
void check_order(const char* where, const char* name, const Tensor& order, const SymInt& batch) {
  if (!order.defined()) return;
  check_memory(where, name, order);
  check_shape(where, name, order, {batch});
  check_dtype(where, name, order, at::kLong);
  if (!is_unwrapped(order) || !order.is_cpu()) return;
  for (int64_t k = 0; k < order.numel(); ++k) {
    const int64_t index = order.const_data_ptr<int64_t>()[k * order.stride(0)];
    TORCH_CHECK_VALUE(
        0 <= index && index < order.numel(),
        expected(where, c10::str(name, " to be in [0, ", order.numel(), ")"), index));
  }
}

}  // namespace

SymInt check_packed(const char* where, const LayerInput& packed, at::TensorList states) {
  const SymInt batch = packed_batch(where, packed, states);
  check_order(where, "sorted_indices", packed.sorted_indices, batch);
  check_order(where, "unsorted_indices", packed.unsorted_indices, batch);
  return batch;
}

}  // namespace lltm
