#include "api/packed_rows.h"

#include "api/layer_checks.h"
#include "common/format.h"
#include "op/check.h"
#include "op/interceptors.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <optional>

namespace lltm {
namespace {

using at::Tensor;
using c10::SymInt;

SymInt packed_batch(const char* where, const PackedRows& rows, at::TensorList states) {
  const Tensor& sizes = rows.batch_sizes;
  const bool has_values = is_unwrapped(sizes);
  if (has_values) {
    check_batch_sizes(
        c10::str("lltm::", where),
        sizes,
        /*batch=*/std::nullopt,
        rows.data.sym_size(0),
        rows.data.device());
  }
  const bool steps = sizes.dim() == 1 && sizes.sym_numel() > 0;
  if (steps && has_values) return sizes[0].item<int64_t>();
  if (rows.sorted_indices.defined()) return rows.sorted_indices.sym_size(0);
  if (!states.empty()) {  // the operator compares it with batch_sizes
    const Tensor& h_0 = states[0];
    return h_0.defined() && h_0.dim() == 3 ? h_0.sym_size(1) : SymInt(0);
  }
  return steps ? sizes.select(0, 0).item().toSymInt() : SymInt(0);
}

// index_select would not name the argument.
void check_order(const char* where, const char* name, const Tensor& order, const SymInt& batch) {
  if (!order.defined()) return;
  check_shape(where, name, order, {batch});
  TORCH_CHECK_TYPE(
      order.scalar_type() == at::kLong,
      "lltm::",
      where,
      ": expected ",
      name,
      " of dtype int64, got ",
      dtype_text(order.scalar_type()));
  if (!is_unwrapped(order) || !order.is_cpu()) return;
  for (int64_t k = 0; k < order.numel(); ++k) {
    const int64_t index = order.const_data_ptr<int64_t>()[k * order.stride(0)];
    TORCH_CHECK_VALUE(
        0 <= index && index < order.numel(),
        "lltm::",
        where,
        ": expected ",
        name,
        " to be in [0, ",
        order.numel(),
        "), got ",
        index);
  }
}

}  // namespace

SymInt check_packed_rows(const char* where, const PackedRows& rows, at::TensorList states) {
  const SymInt batch = packed_batch(where, rows, states);
  check_order(where, "sorted_indices", rows.sorted_indices, batch);
  check_order(where, "unsorted_indices", rows.unsorted_indices, batch);
  return batch;
}

}  // namespace lltm
