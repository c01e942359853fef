// Values between the stages of a step (cell/program.h): kept values, sums and means. The kernels
// add the terms of a mean (kernel/program_cell.h).
#pragma once

#include "cell/cell.h"
#include "common/tensor_views.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/range.h"
#include "cpu/schedule.h"

#include <ATen/ops/empty.h>

#include <cstdint>
#include <type_traits>

namespace lltm::cpu {

// C: compute type.
template <typename C>
class BetweenStages {
 public:
  // `readers` average rows separately: threads that share rows.
  BetweenStages(
      const Pass& pass,
      int64_t batch,
      int64_t hidden,
      int64_t readers,
      const at::TensorOptions& options)
      : pass_(pass), batch_(batch), hidden_(hidden) {
    if (count() == 1) return;
    kept_ = at::empty({batch, pass.kept * hidden}, options.dtype(kType));
    sums_ = at::empty({batch, pass.means * groups()}, options.dtype(at::kDouble));
    means_ = at::empty({readers * batch, pass.means}, options.dtype(kType));
  }

  int count() const { return pass_.count; }
  bool has_means() const { return pass_.means > 0; }
  const Stage& stage(int s) const { return pass_.stages[s]; }

  // For row 0 and unit 0; without a stage if there is only one.
  StageMemory<C> memory(int s, int64_t reader) const {
    if (count() == 1) return {};
    return {
        &stage(s),
        write<C>(kept_),
        hidden_,
        read<C>(means_).from(reader * batch_),
        write<double>(sums_),
        groups()};
  }

  // The means that follow stage s.
  void average(int s, Range rows, int64_t reader) const {
    const SlotRange means = stage(s).means;
    if (means.count() == 0) return;
    const auto sums = read<double>(sums_);
    const auto to = write<C>(means_).from(reader * batch_);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      for (int mean = means.begin; mean < means.end; ++mean) {
        const double* const terms = sums.row(r) + mean * groups();
        double sum = 0;
        for (int64_t k = 0; k < groups(); ++k) sum += terms[k];
        to.row(r)[mean] = static_cast<C>(sum / static_cast<double>(hidden_));
      }
    }
  }

 private:
  static constexpr at::ScalarType kType = std::is_same_v<C, double> ? at::kDouble : at::kFloat;

  int64_t groups() const { return divide_up(hidden_, kUnitsPerSum); }

  const Pass& pass_;
  int64_t batch_, hidden_;
  at::Tensor kept_, sums_, means_;
};

}  // namespace lltm::cpu
