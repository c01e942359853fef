#include "cpu/engine/recompute_rows.h"

#include "common/step_io.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <iterator>

namespace lltm::cpu {

using at::Tensor;

namespace {

// Input and output indices along `dim`, and rows per step if the sequence is packed.
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
    if (last == rows.begin()) break;  // the remaining rows are shorter
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
  const Places places = places_of(args, rows);
  const auto& [dim, indices, batch_sizes] = places;
  const auto of_batch = [&](const Tensor& t) { return t.index_select(0, batch_rows); };
  SequenceArgs again = part_of(
      args, [&](const Tensor& t) { return t.index_select(places.dim, places.indices); }, of_batch);
  again.h_0 = of_batch(args.h_0);
  again.c_0 = of_batch(args.c_0);
  again.batch_sizes = batch_sizes;
  again.save = false;
  const auto [output, h_n, c_n, saved] = forward(again);
  std::get<0>(result).index_copy_(dim, indices, output);
  std::get<1>(result).index_copy_(0, batch_rows, h_n);
  std::get<2>(result).index_copy_(0, batch_rows, c_n);
}

}  // namespace lltm::cpu
