#include "cpu/gemm/gemm.h"

#include "common/memory.h"
#include "common/step_io.h"
#include "cpu/parallel.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

namespace lltm::cpu {

using at::Tensor;

namespace {

// out += a b. On ARM, ATen's addmm_ continues the sums in `out`: rounding errors grow.
void add_mm(const Tensor& out, const Tensor& a, const Tensor& b) {
#if defined(__aarch64__)
  out.add_(at::mm(a, b));
#else
  out.addmm_(a, b);
#endif
}

}  // namespace

Linear::Linear(const CellInfo& cell, const Weights& weights, Tensor bias)
    : cell_(cell),
      heads_(heads_of(weights.hh)),
      hidden_(heads_ * weights.hh.size(-1)),
      bias_(std::move(bias)) {
  const at::ScalarType dtype = compute_dtype(weights.hh.scalar_type());
  weight_x_ = with_contiguous_rows(x_slots(weights.ih, cell).to(dtype));
  const Tensor h = h_slots(weights.hh, cell).to(dtype);
  weight_h_ = heads_ > 1 ? h : with_contiguous_rows(h);
}

Tensor Linear::columns(const Tensor& z, SlotRange slots) const {
  return slot_columns(z, cell_, slots, hidden_);
}
Tensor Linear::rows_of(SlotRange slots) const {
  if (slots == cell_.h) return weight_h_;
  const int64_t units = hidden_ / heads_;
  const int64_t first = (slots.begin - cell_.h.begin) * units;
  return weight_h_.narrow(-2, first, slots.count() * units);
}

Tensor Linear::project_x(const Tensor& x) const {
  const Tensor input = with_contiguous_rows(projected_input(x).to(weight_x_.scalar_type()));
  if (cell_.x.count() == cell_.slots) {
    return bias_.defined() ? at::addmm(bias_, input, weight_x_.t()) : at::mm(input, weight_x_.t());
  }
  const Tensor gates = bias_.defined()
                           ? bias_.repeat({input.size(0), 1})
                           : at::zeros({input.size(0), cell_.slots * hidden_}, input.options());
  if (cell_.x.count() > 0) add_mm(x_columns(gates), input, weight_x_.t());
  for_each_given(cell_, hidden_, x.size(1), [&](int slot, int64_t column) {
    columns(gates, {slot, slot + 1}).add_(x.narrow(1, column, hidden_));
  });
  return gates;
}

void Linear::add_product(const Tensor& gates, const Tensor& operand, SlotRange slots) const {
  if (slots.count() == 0) return;
  if (heads_ == 1) return add_mm(columns(gates, slots), operand, rows_of(slots).t());
  const Tensor by_head = operand.unflatten(1, {heads_, -1}).transpose(0, 1);
  const Tensor product =
      at::bmm(by_head, rows_of(slots).transpose(1, 2));  // (heads, rows, G H/heads)
  columns(gates, slots)
      .unflatten(1, {slots.count(), heads_, -1})
      .add_(product.unflatten(2, {slots.count(), -1}).permute({1, 2, 0, 3}));
}

void Linear::project(Tensor gates, const Tensor& h, const Tensor& x) const {
  const auto multiply = [&](const Tensor& a, const Tensor& weight) {
    bias_.defined() ? at::addmm_out(gates, bias_, a, weight.t()) : at::mm_out(gates, a, weight.t());
  };
  if (cell_.concatenated) {
    if (!both_.defined()) both_ = at::cat({weight_h_, weight_x_}, 1);
    multiply(at::cat({h, x}, 1), both_);
  } else if (cell_.x == cell_.h && cell_.is_element_wise()) {
    multiply(x, weight_x_);
    add_recurrent(gates, h);
  } else {
    gates.copy_(project_x(x));
    add_recurrent(gates, h);
  }
}

void Linear::input_gradient(Tensor out, const Tensor& dz) const {
  if (cell_.given == 0) {
    at::mm_out(out, x_columns(dz), weight_x_);
    return;
  }
  projected_input(out).copy_(at::mm(x_columns(dz), weight_x_));
  for_each_given(cell_, hidden_, out.size(1), [&](int slot, int64_t column) {
    out.narrow(1, column, hidden_).copy_(columns(dz, {slot, slot + 1}));
  });
}

void Linear::state_gradient(Tensor out, const Tensor& dz) const {
  at::mm_out(out, columns(dz, cell_.direct), rows_of(cell_.direct));
}

Tensor Linear::operand_gradient(const Tensor& dz, const Operand& operand) const {
  Tensor sum = at::zeros({dz.size(0), hidden_}, dz.options());
  for (const SlotRange slots : operand.gates) {
    if (slots.count() > 0) add_mm(sum, columns(dz, slots), rows_of(slots));
  }
  return sum;
}

void Linear::weight_gradients(
    const Weights& out,
    const Tensor& dz,
    const Tensor& h,
    const Tensor& x,
    const Tensor& saved,
    bool accumulate) const {
  const auto multiply =
      [&](const Tensor& to, SlotRange slots, const int* blocks, const Tensor& by) {
        const Tensor rows = by.to(dz.scalar_type());
        for_each_run(slots, blocks, [&](int slot, int count) {
          Tensor part = to.narrow(0, blocks[slot] * hidden_, count * hidden_);
          const Tensor a = dz.narrow(1, slot * hidden_, count * hidden_).t();
          if (accumulate) {
            part.add_(at::mm(a, rows));  // addmm might continue the chain of the earlier sum
          } else {
            at::mm_out(part, a, rows);
          }
        });
      };
  if (out.ih.defined()) multiply(out.ih, cell_.x, cell_.x_blocks, projected_input(x));
  if (!out.hh.defined()) return;
  multiply(out.hh, cell_.direct, cell_.h_blocks, h);
  for (const Operand& operand : cell_.operands()) {
    const Tensor rows = saved.narrow(1, operand.saved * hidden_, hidden_);
    for (const SlotRange slots : operand.gates) multiply(out.hh, slots, cell_.h_blocks, rows);
  }
}

Tensor with_contiguous_rows(const Tensor& tensor) {
  const bool contiguous = tensor.stride(1) == 1 && tensor.stride(0) >= tensor.size(1);
  return contiguous ? tensor : tensor.contiguous();
}

namespace {

// A GEMM into part of `out`, through a buffer unless `out` is float32 and N is not padded.
template <typename Format, typename T>
class OutputBlock {
 public:
  OutputBlock(int64_t rows, int64_t columns)
      : copy_(static_cast<size_t>(rows * Format::padded_n(columns))) {}

  void gemm(
      Matrix<T> out,
      int64_t rows,
      int64_t columns,
      Matrix<const typename Format::Element> a,
      PackedB<const typename Format::Element> b) {
    if constexpr (std::is_same_v<T, float>) {
      if (b.n == columns) return Format::gemm(rows, a, b, out, /*accumulate=*/false);
    }
    Format::gemm(rows, a, b, {copy_.data(), b.n}, /*accumulate=*/false);
    for (int64_t r = 0; r < rows; ++r) narrow(copy_.data() + r * b.n, out.row(r), columns);
  }

 private:
  std::vector<float> copy_;
};

template <typename Format>
class PackedGemmOf {
 public:
  using Unpacked = typename Format::Unpacked;
  using Element = typename Format::Element;

  explicit PackedGemmOf(const Tensor& matrix)
      : k_(matrix.size(0)), bands_(matrix.size(1), kGemmBand), padded_k_(Format::padded_k(k_)) {
    const Tensor rows = with_contiguous_rows(matrix);
    const int64_t elements = padded_k_ * Format::padded_n(matrix.size(1));
    memory_ = empty_large(
        {elements * static_cast<int64_t>(sizeof(Element))}, matrix.options().dtype(at::kByte));
    const auto b = read<Unpacked>(rows);
    fits_ = parallel_tasks(
        bands_.count, elements, kPackGrain, [&](int64_t band, int64_t part, int64_t parts) {
          const Range own = Blocks(k_, kPackedRows, parts).range(part);
          const auto from = b.from(own.begin, bands_.begin(band));
          return own.size() == 0 ||
                 Format::pack_b(band_of(band), own.begin, 0, from, own.size(), bands_.size(band));
        });
  }

  bool operator()(const Tensor& out, const Tensor& a) const {
    const int64_t rows = a.size(0);
    if (rows == 0) return true;
    const int64_t tiers = (rows + kMaxRows - 1) / kMaxRows;
    const int64_t grain = divide_up(kGemmGrain, std::min(rows, kMaxRows) * kGemmBand * padded_k_);
    const bool wide = out.scalar_type() == at::kFloat;
    return fits_ && parallel_for(tiers * bands_.count, grain, [&](int64_t begin, int64_t end) {
             const Range own = {begin, end};
             return wide ? run_tasks<float>(out, a, own) : run_tasks<Unpacked>(out, a, own);
           });
  }

 private:
  PackedB<Element> band_of(int64_t band) const {
    const int64_t n = Format::padded_n(bands_.size(band));
    auto* const data = static_cast<Element*>(memory_.data_ptr()) + bands_.begin(band) * padded_k_;
    return {data, padded_k_, n, n};
  }

  template <typename Out>
  bool run_tasks(const Tensor& out, const Tensor& a, Range tasks) const {
    const auto x = read<Unpacked>(a);
    const auto y = write<Out>(out);
    const bool in_place = Format::fits_in_place(k_, a.stride(0));
    OutputBlock<Format, Out> block(kMaxRows, kGemmBand);
    const auto packed =
        in_place ? OperandA<Format>{} : allocate_a<Format>(kMaxRows, k_, a.options());
    for (int64_t task = tasks.begin; task < tasks.end; ++task) {
      const int64_t first = task / bands_.count * kMaxRows;
      const int64_t band = task % bands_.count;
      const int64_t rows = std::min(kMaxRows, a.size(0) - first);
      const bool next_rows = task == tasks.begin || band == 0;
      if (!in_place && next_rows && !Format::pack_a(rows, k_, x.from(first), packed.rows)) {
        return false;
      }
      const Matrix<const Element> left =
          in_place ? Format::in_place(x.from(first)) : as_const(packed.rows);
      const auto b = as_const(band_of(band));
      block.gemm(y.from(first, bands_.begin(band)), rows, bands_.size(band), left, b);
    }
    return true;
  }

  int64_t k_;
  Blocks bands_;
  int64_t padded_k_;
  Tensor memory_;
  bool fits_ = true;
};

}  // namespace

PackedGemm make_packed_gemm(GemmFormat format, const Tensor& b) {
  return visit_format(
      format, [&]<typename Format>(Format) { return PackedGemm(PackedGemmOf<Format>(b)); });
}

}  // namespace lltm::cpu
