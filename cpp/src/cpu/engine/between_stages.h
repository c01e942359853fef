// Values between the stages of a step (cell/program.h): kept values, sums and means. The kernels
// add the terms of a mean (kernel/program_cell.h).
#pragma once

#include "cell/cell.h"
#include "common/matrix.h"
#include "common/memory.h"
#include "cpu/kernel/elementwise.h"
#include "cpu/range.h"
#include "cpu/schedule.h"

#include <cstdint>

namespace lltm::cpu {

// C: compute type.
template <typename C>
class BetweenStages {
 public:
  // `readers` average rows separately: threads that share rows.
  BetweenStages(const Pass& pass, int64_t batch, int64_t hidden, int64_t readers)
      : pass_(pass), batch_(batch), hidden_(hidden) {
    if (count() == 1) return;
    kept_ = Workspace<C>(batch * pass.kept * hidden);
    sums_ = Workspace<double>(batch * pass.means * groups());
    means_ = Workspace<C>(readers * batch * pass.means);
  }

  int count() const { return pass_.count; }
  bool has_means() const { return pass_.means > 0; }
  const Stage& stage(int s) const { return pass_.stages[s]; }

  // For row 0 and unit 0; without a stage if there is only one.
  StageMemory<C> memory(int s, int64_t reader) const {
    if (count() == 1) return {};
    return {
        &stage(s),
        {kept_.data(), pass_.kept * hidden_},
        hidden_,
        as_const(means_of(reader)),
        sums(),
        groups()};
  }

  // The means that follow stage s.
  void average(int s, Range rows, int64_t reader) const {
    const SlotRange means = stage(s).means;
    if (means.count() == 0) return;
    const Matrix<C> to = means_of(reader);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      for (int mean = means.begin; mean < means.end; ++mean) {
        const double* const terms = sums().row(r) + mean * groups();
        double sum = 0;
        for (int64_t k = 0; k < groups(); ++k) sum += terms[k];
        to.row(r)[mean] = static_cast<C>(sum / static_cast<double>(hidden_));
      }
    }
  }

 private:
  int64_t groups() const { return divide_up(hidden_, kUnitsPerSum); }
  Matrix<double> sums() const { return {sums_.data(), pass_.means * groups()}; }
  Matrix<C> means_of(int64_t reader) const {
    return {means_.data() + reader * batch_ * pass_.means, pass_.means};
  }

  const Pass& pass_;
  int64_t batch_, hidden_;
  Workspace<C> kept_, means_;
  Workspace<double> sums_;
};

}  // namespace lltm::cpu
