#include "cpu/engine/recompute_rows.h"

#include "common/steps.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <iterator>

namespace lltm::cpu {

using at::Tensor;

namespace {

// Where these rows lie in the input and the output, and how many of them each step has.
struct Places {
  int64_t dim;
  Tensor indices, batch_sizes;
};

Places places_of(const SequenceArgs& args, const std::vector<int64_t>& rows) {
  if (!args.batch_sizes.defined()) return {1, at::tensor(rows), Tensor()};
  std::vector<int64_t> indices;
  std::vector<int64_t> sizes;
  for (const Step& step : plan_steps(args.input, args.batch_sizes, /*reverse=*/false)) {
    const auto last = std::lower_bound(rows.begin(), rows.end(), step.rows);
    if (last == rows.begin()) break;  // the rows that are left are shorter
    std::transform(rows.begin(), last, std::back_inserter(indices), [&](int64_t row) {
      return step.offset + row;
    });
    sizes.push_back(last - rows.begin());
  }
  return {0, at::tensor(indices), at::tensor(sizes)};
}

}  // namespace

void recompute_rows(
    const SequenceArgs& args,
    const std::vector<int64_t>& rows,
    SequenceResult& result,
    SequenceResult (*forward)(const SequenceArgs&)) {
  const Tensor batch_rows = at::tensor(rows);
  const auto [dim, indices, batch_sizes] = places_of(args, rows);
  const auto again = forward({for_rows(
      args,
      args.input.index_select(dim, indices),
      args.h_0.index_select(0, batch_rows),
      args.state_c().index_select(0, batch_rows),
      batch_sizes,
      args.reset.defined() ? args.reset->index_select(dim, indices) : Tensor(),
      /*recurrent_mask=*/Tensor())});
  std::get<0>(result).index_copy_(dim, indices, std::get<0>(again));
  std::get<1>(result).index_copy_(0, batch_rows, std::get<1>(again));
  std::get<2>(result).index_copy_(0, batch_rows, std::get<2>(again));
}

}  // namespace lltm::cpu
