#include "cpu/engine/sequence_gradients.h"

#include "common/step_io.h"
#include "common/tensor_views.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <utility>

namespace lltm::cpu {

using at::Tensor;

SequenceGradients::SequenceGradients(
    const SequenceBackwardArgs& args,
    const std::vector<Step>& steps,
    const Weights& weights,
    const BackwardSchedule& schedule)
    : args_(args),
      cell_(*args.cell),
      hidden_(args.h_0->size(1)),
      input_size_(args.input->size(-1) - args.cell->given * args.h_0->size(1)),
      heads_(heads_of(args.weight_hh)),
      schedule_(schedule),
      steps_(steps) {
  int64_t begun = 0;
  for (const Step& step : steps_) {
    begun_.push_back(begun);
    begun = std::max(begun, step.rows);
  }

  const auto [want_input, want_h, want_c, want_ih, want_hh, want_bias_ih, want_bias_hh] =
      args.output_mask;
  const bool bf16 = schedule.format == GemmFormat::kBf16;
  const auto options = weights.hh.options().dtype(bf16 ? at::kBFloat16 : at::kFloat);
  if (want_input) {
    d_input_ = empty_large({flat_size(args.input), args.input->size(-1)}, args.input->options());
    if (cell_.x.count() > 0) {
      input_gemm_ = make_packed_gemm(schedule.gradient_format, weights.ih);
    } else {
      d_input_.zero_();
    }
  }
  if (want_h) {
    const int64_t before = (cell_.direct.begin - cell_.h.begin) * hidden_;
    weights_h_ =
        without_heads(weights.hh).narrow(0, before, cell_.direct.count() * hidden_).to(at::kFloat);
    d_h_0_ = at::empty(args.h_0->sizes(), compute_options(args.h_0));
  }
  const bool concatenated = !args.weight_hh.defined();
  const bool of_h = concatenated ? want_ih : want_hh;
  const bool bias = want_bias_ih || want_bias_hh;
  if (cell_.x == cell_.direct && heads_ == 1) {
    add_gemm({cell_.x, /*of_x=*/true, /*of_h=*/true, of_h, want_ih, bias}, options);
  } else {
    add_gemm({cell_.x, /*of_x=*/true, /*of_h=*/false, false, want_ih, want_bias_ih}, options);
    add_gemm({cell_.direct, /*of_x=*/false, /*of_h=*/true, of_h, false, want_bias_hh}, options);
  }
  for (int p = 0; p < cell_.operands().count; ++p) {
    for (const SlotRange gates : cell_.operands()[p].gates) {
      add_gemm({gates, /*of_x=*/false, /*of_h=*/true, of_h, false, want_bias_hh, p}, options);
    }
  }
}

void SequenceGradients::add_gemm(GradientGemm product, const at::TensorOptions& options) {
  const int64_t heads = product.of_h ? heads_ : 1, units = hidden_ / heads;
  const int64_t m = (product.h ? units : 0) + (product.x ? input_size_ : 0) + (product.one ? 1 : 0);
  const int64_t n = product.slots.count() * units;
  if (m == 0 || n == 0) return;
  for (int64_t head = 0; head < heads; ++head) {
    if (heads > 1) product.head = head;
    product.gemm = make_weight_gradient_gemm(
        schedule_.gradient_format, schedule_.gradient_threads, m, n, options);
    gemms_.push_back(std::move(product));
  }
}

Tensor SequenceGradients::columns(const Tensor& dz, SlotRange slots) const {
  return dz.narrow(1, slots.begin * hidden_, slots.count() * hidden_);
}

bool SequenceGradients::add(size_t first, size_t last, const Tensor& dz) {
  const int64_t rows = dz.size(0);
  if (rows == 0) return true;  // steps without rows
  const int64_t begin = std::min(steps_[first].offset, steps_[last - 1].offset);
  if (d_h_0_.defined()) add_initial_state(first, last, dz);
  if (d_input_.defined()) {
    const Tensor to = d_input_.narrow(0, begin, rows);
    for_each_given(cell_, hidden_, to.size(1), [&](int gate, int64_t column) {
      to.narrow(1, column, hidden_).copy_(columns(dz, {gate, gate + 1}));
    });
    if (input_gemm_ && !input_gemm_(to.narrow(1, 0, input_size_), columns(dz, cell_.x))) {
      return false;
    }
  }
  const at::ScalarType dtype = dz.scalar_type();
  Tensor by_head;  // dz of a product's gates, (heads, rows, gates * H/heads)
  for (const GradientGemm& product : gemms_) {
    std::vector<Tensor> a;
    if (product.head == 0) {
      by_head = columns(dz, product.slots)
                    .unflatten(1, {product.slots.count(), heads_, -1})
                    .permute({2, 0, 1, 3})
                    .flatten(2)
                    .contiguous();
    }
    if (product.h && product.operand >= 0) {
      const int64_t column = cell_.operands()[product.operand].saved * hidden_;
      a.push_back(args_.saved->narrow(0, begin, rows).narrow(1, column, hidden_).to(dtype));
    } else if (product.h) {
      a.push_back(entering_h(args_, steps_, first, last, dtype));
    }
    if (product.x) {
      a.push_back(flat_rows(args_.input, begin, rows).narrow(1, 0, input_size_).to(dtype));
    }
    if (product.one) a.push_back(at::ones({rows, 1}, dz.options()));
    if (product.head >= 0 && product.h) {
      const int64_t units = hidden_ / heads_;
      a[0] = a[0].narrow(1, product.head * units, units);
    }
    const Tensor b = product.head < 0 ? columns(dz, product.slots) : by_head[product.head];
    if (!product.gemm->add(a, b)) return false;
  }
  return true;
}

// Each row's dz W_h in its first step, or zero if reset there.
void SequenceGradients::add_initial_state(size_t first, size_t last, const Tensor& dz) {
  const int64_t begin = std::min(steps_[first].offset, steps_[last - 1].offset);
  const Tensor dz_h = columns(dz, cell_.direct);
  for (size_t k = first; k < last; ++k) {
    const int64_t count = steps_[k].rows - begun_[k];
    if (count <= 0) continue;
    const Tensor dz_first = dz_h.narrow(0, steps_[k].offset - begin + begun_[k], count);
    const Tensor d_h_0 = d_h_0_.narrow(0, begun_[k], count);
    d_h_0.copy_(at::mm(dz_first.to(at::kFloat), weights_h_));
    StepIO(args_, steps_[k], begun_[k]).enter_h_in_place(d_h_0);
  }
}

Gradients SequenceGradients::finish(const Tensor& dc, const Tensor& parameter_sums) {
  const auto& mask = args_.output_mask;
  const WeightGradients weights(args_, dc.options().dtype(at::kFloat));
  const auto bias = [&](bool wanted, int64_t blocks) {
    return wanted ? at::empty({blocks * hidden_}, dc.options().dtype(at::kFloat)) : Tensor();
  };
  const Tensor bias_ih = bias(mask[5], cell_.x.count() + cell_.parameters);
  const Tensor bias_hh = bias(mask[6], cell_.h.count());
  if (mask[5] && cell_.parameters > 0) {
    bias_ih.slice(0, cell_.x.count() * hidden_).copy_(parameter_sums.sum(0));
  }
  for (GradientGemm& product : gemms_) {
    int64_t m = 0;
    const bool of_head = product.head >= 0;
    const int64_t units = of_head ? hidden_ / heads_ : hidden_;
    const auto next = [&](Matrix<float> out, int64_t columns, const int* blocks) {
      const int* const own = blocks + product.slots.begin;
      product.gemm->write_transposed(m, m + columns, out, units, own);
      m += columns;
    };
    if (product.h) {
      const int64_t row = of_head ? product.head * cell_.h.count() * units : 0;
      next(weights.write_hh<float>().from(row), units, cell_.h_blocks);
    }
    if (product.x) next(weights.write_ih<float>(hidden_), input_size_, cell_.x_blocks);
    const auto write_sums = [&](const Tensor& out, const int* own) {
      const Matrix<float> column = {out.mutable_data_ptr<float>(), 1};
      product.gemm->write_transposed(m, m + 1, column, units, own);
    };
    if (mask[5] && product.of_x) write_sums(bias_ih, cell_.x_blocks + cell_.x.begin);
    if (mask[6] && product.of_h) {
      int blocks[CellInfo::kMostSlots];  // of a head's units
      for (int k = 0; k < product.slots.count(); ++k) {
        const int block = cell_.h_blocks[product.slots.begin + k];
        blocks[k] = of_head ? static_cast<int>(block * heads_ + product.head) : block;
      }
      write_sums(bias_hh, blocks);
    }
  }
  return {
      mask[0] ? d_input_.view(args_.input->sizes()) : Tensor(),
      d_h_0_,
      mask[2] ? dc : Tensor(),
      weights.weight_ih,
      weights.weight_hh,
      bias_ih,
      bias_hh};
}

}  // namespace lltm::cpu
