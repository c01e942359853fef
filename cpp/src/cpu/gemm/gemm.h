// The GEMMs of whole tensors: through ATen, or by the kernels of formats.h where those
// are faster.
#pragma once

#include "cell/cell.h"
#include "common/tensor_views.h"
#include "cpu/dispatch.h"
#include "cpu/gemm/formats.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <memory>

namespace lltm::cpu {

// ---- through ATen -----------------------------------------------------------

// The GEMMs of the cell with weights (G * H, H + I) and bias (G * H). 16-bit weights are widened to
// float32: pre-activations are then not rounded to 16 bits, and CPUs without float16 arithmetic are
// faster so.
struct Linear {
  Linear(const at::Tensor& weights, const at::Tensor& bias);

  // x (rows, I) to x W_x^T + b (rows, G * H).
  at::Tensor project_input(const at::Tensor& x) const;
  // gates (rows, G * H) += h (rows, H) W_h^T.
  void add_recurrent(at::Tensor gates, const at::Tensor& h) const;
  // gates = [h, x] W^T + b, in one GEMM: rounded as plain PyTorch rounds it.
  void project(at::Tensor gates, const at::Tensor& h, const at::Tensor& x) const;

  // From the gradients of the pre-activations, dz (rows, G * H), written to `out`:
  void input_gradient(at::Tensor out, const at::Tensor& dz) const;  // (rows, I)
  void state_gradient(at::Tensor out, const at::Tensor& dz) const;  // (rows, H)

  at::Tensor weights, weights_h, weights_x, bias;
};

// `out` (G * H, H + I) = dz^T [h, x].
void weights_gradient(
    const at::Tensor& out, const at::Tensor& dz, const at::Tensor& h, const at::Tensor& x);

// z (rows, G * width) = [a0, a1] W^T, or +=: the GEMM of few rows with weights as they lie. `w` is
// the first gate's rows of `width` of H units, the next gate's are H rows below.
template <typename T>
void multiply_in_place(
    int64_t rows,
    const typename InPlaceGemm<T>::Part (&a)[2],
    Matrix<const T> w,
    int64_t hidden,
    int64_t width,
    Matrix<float> z,
    bool accumulate) {
  for (int64_t r = 0; r < rows; r += kMostProductRows) {
    const int64_t count = std::min(rows - r, kMostProductRows);
    for (int64_t gate = 0; gate < Cell::kGates; ++gate) {
      gemms_f32<T>().multiply_transposed(
          count,
          {{{a[0].rows.from(r), a[0].k}, {a[1].rows.from(r), a[1].k}},
           width,
           w.from(gate * hidden),
           z.from(r, gate * width),
           accumulate});
    }
  }
}

// ---- operands ---------------------------------------------------------------

// The tensor itself, or a contiguous copy if its rows are not contiguous or overlap.
at::Tensor with_contiguous_rows(const at::Tensor& tensor);

// Rows of A in a format, and their memory.
template <typename Format>
struct OperandA {
  at::Tensor memory;
  Matrix<typename Format::Operand> rows;
};

// With zeros where K is padded, which packing leaves.
template <typename Format>
OperandA<Format> allocate_a(int64_t rows, int64_t k, const at::TensorOptions& options) {
  using Operand = typename Format::Operand;
  const int64_t stride = Format::a_stride(k);
  const int64_t bytes = rows * stride * static_cast<int64_t>(sizeof(Operand));
  const auto byte_options = options.dtype(at::kByte);
  const at::Tensor memory = Format::padded_k(k) == k ? at::empty({bytes}, byte_options)
                                                     : at::zeros({bytes}, byte_options);
  return {memory, {static_cast<Operand*>(memory.mutable_data_ptr()), stride, 1}};
}

// Calls body with values of the types that tensors of `dtype` are stored in and that belong to
// `format`, for the pairs that schedules choose.
template <typename Body>
auto visit_dtype_and_format(at::ScalarType dtype, GemmFormat format, const Body& body) {
  if (format == GemmFormat::kBf16) return body(BFloat16{}, Bf16Format{});
  if (format == GemmFormat::kBf16x3) {
    return dtype == at::kHalf ? body(Half{}, Bf16x3Format{}) : body(float{}, Bf16x3Format{});
  }
  if (dtype == at::kHalf) return body(Half{}, F32Format{});
  return dtype == at::kBFloat16 ? body(BFloat16{}, F32Format{}) : body(float{}, F32Format{});
}

// A row of sums to a storage type.
inline void narrow(const float* x, float* y, int64_t n) {
  std::copy_n(x, n, y);
}
inline void narrow(const float* x, Half* y, int64_t n) {
  kernels().convert_f16.store(x, y, n);
}
inline void narrow(const float* x, BFloat16* y, int64_t n) {
  kernels().convert_bf16.store(x, y, n);
}

// ---- by our own kernels -----------------------------------------------------

// C (rows, N) = A B with B (K, N) packed once. Tensors are of the format's Source, and the rows
// of `out` are contiguous.
class PackedGemm {
 public:
  virtual ~PackedGemm() = default;
  // False where values of A or B are out of range of the format.
  virtual bool run(const at::Tensor& out, const at::Tensor& a) const = 0;
};
std::unique_ptr<PackedGemm> make_packed_gemm(GemmFormat format, const at::Tensor& b);

}  // namespace lltm::cpu
