// GEMMs on complete tensors: ATen, or the kernels in formats.h if faster.
#pragma once

#include "common/tensor_views.h"
#include "common/weights.h"
#include "cpu/bias.h"
#include "cpu/dispatch.h"
#include "cpu/gemm/formats.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>

namespace lltm::cpu {

// Between a cell's inputs and pre-activations. 16-bit weights are widened to float32:
// pre-activations are not rounded, and CPUs without float16 arithmetic are faster.
class Linear {
 public:
  // project_x and project add the biases.
  template <typename Args>
  static Linear with_bias(const Args& args) {
    const Weights weights = weights_of(args);
    return Linear(*args.cell, weights, slot_bias(args, args.h_0->size(1)));
  }
  template <typename Args>
  explicit Linear(const Args& args) : Linear(*args.cell, weights_of(args), at::Tensor()) {}

  // (rows, S * H) = x (rows, I) W_x^T + b.
  at::Tensor project_x(const at::Tensor& x) const;
  // gates += h (rows, H) W_h^T, for the gates that multiply h.
  void add_recurrent(const at::Tensor& gates, const at::Tensor& h) const {
    add_product(gates, h, cell_.direct);
  }
  // The same for an operand of products and its gates.
  void add_product(const at::Tensor& gates, const at::Tensor& operand, SlotRange slots) const;
  // Rounded as PyTorch's operations: one GEMM if every pre-activation depends on both.
  void project(at::Tensor gates, const at::Tensor& h, const at::Tensor& x) const;

  // Gradients from dz (rows, (S + P) * H), written to `out`. Not for weights with heads.
  void input_gradient(at::Tensor out, const at::Tensor& dz) const;                  // (rows, I)
  void state_gradient(at::Tensor out, const at::Tensor& dz) const;                  // (rows, H)
  at::Tensor operand_gradient(const at::Tensor& dz, const Operand& operand) const;  // (rows, H)
  // d_ih (Gx * H, I) = dz^T x and d_hh (Gh * H, H) = dz^T h or, if `accumulate`, +=, unless
  // undefined. `saved` has the operands of products.
  void weight_gradients(
      const Weights& out,
      const at::Tensor& dz,
      const at::Tensor& h,
      const at::Tensor& x,
      const at::Tensor& saved,
      bool accumulate) const;

 private:
  Linear(const CellInfo& cell, const Weights& weights, at::Tensor bias);
  at::Tensor columns(const at::Tensor& z, SlotRange slots) const;
  at::Tensor x_columns(const at::Tensor& z) const { return columns(z, cell_.x); }
  at::Tensor rows_of(SlotRange slots) const;               // of weight_h_
  at::Tensor projected_input(const at::Tensor& x) const {  // without the columns of given gates
    return x.narrow(1, 0, weight_x_.size(1));
  }

  const CellInfo& cell_;
  const int64_t heads_, hidden_;
  at::Tensor weight_x_, weight_h_, bias_;  // in pre-activation order
  mutable at::Tensor both_;                // [weight_h_, weight_x_], created on first use
};

// For few rows, with weights in place, whose rows are contiguous. For `width` units from `unit` on:
// z (rows, S * width) = x W_x^T + h W_h^T. Without x, adds the recurrent part. Without h,
// pre-activations of only h do not change.
template <typename T>
struct WeightsInPlace {
  void multiply(
      int64_t rows,
      Matrix<const float> x,
      Matrix<const float> h,
      int64_t unit,
      int64_t width,
      Matrix<float> z) const {
    using Term = typename InPlaceGemm<T>::Term;
    for (int64_t r = 0; r < rows; r += kMostProductRows) {
      const int64_t count = std::min(rows - r, kMostProductRows);
      for (int slot = 0; slot < cell.slots; ++slot) {
        const bool of_x = x.data != nullptr && cell.x.contains(slot);
        const bool of_h = h.data != nullptr && cell.h.contains(slot);
        if (!of_x && !of_h) continue;
        const auto term = [&](bool has_term,
                              Matrix<const float> a,
                              Matrix<const T> w,
                              const int* blocks,
                              int64_t k) {
          return has_term ? Term{a.from(r), w.from(blocks[slot] * hidden + unit), k} : Term{};
        };
        gemms_f32<T>().multiply_transposed(
            count,
            {{term(of_x, x, weights.ih, cell.x_blocks, input_size),
              term(of_h, h, weights.hh, cell.h_blocks, hidden)},
             width,
             z.from(r, slot * width),
             /*accumulate=*/!of_x && (cell.x.contains(slot) || cell.given_blocks[slot] > 0)});
      }
    }
  }

  const CellInfo& cell;
  WeightMatrices<T> weights;
  int64_t hidden, input_size;
};

// Copies if rows overlap or are not contiguous.
at::Tensor with_contiguous_rows(const at::Tensor& tensor);

template <typename Format>
struct OperandA {
  at::Tensor memory;
  Matrix<typename Format::Element> rows;
};

// Packing does not write the K padding, which is zero.
template <typename Format>
OperandA<Format> allocate_a(
    int64_t rows, int64_t k, const at::TensorOptions& options, int64_t heads = 1) {
  using Element = typename Format::Element;
  const int64_t stride = Format::a_stride(k, heads);
  const int64_t bytes = rows * stride * static_cast<int64_t>(sizeof(Element));
  const auto byte_options = options.dtype(at::kByte);
  const at::Tensor memory = Format::padded_k(k) == k ? at::empty({bytes}, byte_options)
                                                     : at::zeros({bytes}, byte_options);
  return {memory, {static_cast<Element*>(memory.mutable_data_ptr()), stride, 1}};
}

template <typename Body>
auto visit_dtype_and_format(at::ScalarType dtype, GemmFormat format, const Body& body) {
  if (format == GemmFormat::kBf16) {
    return dtype == at::kFloat ? body(float{}, Bf16Format{}) : body(BFloat16{}, Bf16Format{});
  }
  if (format == GemmFormat::kBf16x3) {
    return dtype == at::kHalf ? body(Half{}, Bf16x3Format{}) : body(float{}, Bf16x3Format{});
  }
  if (dtype == at::kHalf) return body(Half{}, F32Format{});
  return dtype == at::kBFloat16 ? body(BFloat16{}, F32Format{}) : body(float{}, F32Format{});
}

inline void narrow(const float* x, float* y, int64_t n) {
  std::copy_n(x, n, y);
}
inline void narrow(const float* x, Half* y, int64_t n) {
  kernels().convert_f16.store(x, y, n);
}
inline void narrow(const float* x, BFloat16* y, int64_t n) {
  kernels().convert_bf16.store(x, y, n);
}

// n elements of a row.
inline void widen(Matrix<const float> x, float* y, int64_t n) {
  for (int64_t j = 0; j < n; ++j) y[j] = x.data[j * x.col_stride];
}
template <typename T>
void widen(Matrix<const T> x, float* y, int64_t n, const ArrayConvert<T>& convert) {
  if (x.col_stride == 1) return convert.load(x.data, y, n);
  for (int64_t j = 0; j < n; ++j) convert.load(x.data + j * x.col_stride, y + j, 1);
}
inline void widen(Matrix<const Half> x, float* y, int64_t n) {
  widen(x, y, n, kernels().convert_f16);
}
inline void widen(Matrix<const BFloat16> x, float* y, int64_t n) {
  widen(x, y, n, kernels().convert_bf16);
}

// C (rows, N) = A B, with B (K, N) packed once. Rows are contiguous, in the format's Unpacked type,
// or float32 for `out`. False: out of range.
using PackedGemm = std::function<bool(const at::Tensor& out, const at::Tensor& a)>;
PackedGemm make_packed_gemm(GemmFormat format, const at::Tensor& b);

}  // namespace lltm::cpu
