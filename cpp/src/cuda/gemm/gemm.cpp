#include "cuda/gemm/gemm.h"

#include "cuda/context.h"

#include <lltm/backends.h>

#include <ATen/ops/zeros.h>
#include <c10/util/env.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace lltm::cuda {
namespace {

constexpr int64_t kGemmAccessBytes = 16;

// cuBLAS requires rows that do not overlap, and 32-bit indices. A single row's stride is
// irrelevant.
bool is_leading_dimension(int64_t stride, int64_t rows, int64_t cols) {
  return rows <= 1 ||
         (stride >= std::max<int64_t>(cols, 1) && stride <= std::numeric_limits<int32_t>::max());
}

// cuBLAS checks also a single row's stride, which can be anything in a tensor: returns the row
// length instead.
int64_t leading_dimension(int64_t stride, int64_t rows, int64_t cols) {
  return std::max<int64_t>(rows > 1 ? stride : cols, 1);
}

bool has_contiguous_rows(const at::Tensor& t) {
  return (t.size(1) <= 1 || t.stride(1) == 1) &&
         is_leading_dimension(t.stride(0), t.size(0), t.size(1));
}

bool has_contiguous_columns(const at::Tensor& t) {
  return (t.size(0) <= 1 || t.stride(0) == 1) &&
         is_leading_dimension(t.stride(1), t.size(1), t.size(0));
}

// An empty tensor may have a null data pointer.
int64_t byte_offset(const at::Tensor& tensor, int64_t elements) {
  return tensor.numel() == 0 ? 0 : elements * static_cast<int64_t>(tensor.element_size());
}

CudaDataType data_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return kR64F;
    case at::kFloat:
      return kR32F;
    case at::kHalf:
      return kR16F;
    case at::kBFloat16:
      return kR16BF;
    default:
      TORCH_INTERNAL_ASSERT(false, "unchecked dtype ", dtype);
  }
}

// cuBLAS is column-major: contiguous rows are its columns.
CublasOperation operation(const GemmOperand& operand) {
  return operand.transposed ? kTransposed : kNotTransposed;
}

}  // namespace

at::Tensor as_operand(const at::Tensor& tensor) {
  return has_contiguous_rows(tensor) || has_contiguous_columns(tensor) ? tensor
                                                                       : tensor.contiguous();
}

int64_t padded_cols(int64_t cols, at::ScalarType dtype) {
  const int64_t access = kGemmAccessBytes / static_cast<int64_t>(c10::elementSize(dtype));
  return (cols + access - 1) / access * access;
}

at::Tensor as_padded_operand(const at::Tensor& tensor, int64_t rows, int64_t cols) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const int64_t row_bytes = tensor.stride(0) * static_cast<int64_t>(tensor.element_size());
  if (tensor.size(0) == rows && tensor.size(1) == cols && has_contiguous_rows(tensor) &&
      address % kGemmAccessBytes == 0 && row_bytes % kGemmAccessBytes == 0) {
    return tensor;
  }
  const at::Tensor memory =
      at::zeros({rows, padded_cols(cols, tensor.scalar_type())}, tensor.options());
  memory.slice(0, 0, tensor.size(0)).slice(1, 0, tensor.size(1)).copy_(tensor);
  return memory.slice(1, 0, cols);
}

GemmOperand operand(const at::Tensor& tensor) {
  return operand_rows(tensor, 0, tensor.size(0));
}

GemmOperand operand_rows(const at::Tensor& t, int64_t begin, int64_t count) {
  const auto* const data = static_cast<const char*>(t.const_data_ptr());
  if (has_contiguous_rows(t)) {
    const int64_t ld = leading_dimension(t.stride(0), t.size(0), t.size(1));
    return {data + byte_offset(t, begin * ld), count, t.size(1), ld, /*transposed=*/false};
  }
  const int64_t ld = leading_dimension(t.stride(1), t.size(1), t.size(0));
  return {data + byte_offset(t, begin), count, t.size(1), ld, /*transposed=*/true};
}

GemmOperand transposed(const GemmOperand& a) {
  return {a.data, a.cols, a.rows, a.ld, !a.transposed};
}

GemmResult result(const at::Tensor& tensor) {
  return result_rows(tensor, 0, tensor.size(0));
}

GemmResult result_rows(const at::Tensor& t, int64_t begin, int64_t count) {
  const int64_t ld = leading_dimension(t.stride(0), t.size(0), t.size(1));
  auto* const data = static_cast<char*>(t.mutable_data_ptr());
  return {data + byte_offset(t, begin * ld), count, t.size(1), ld, t.scalar_type()};
}

void zero(const GemmResult& c) {
  if (c.rows == 0 || c.cols == 0) return;
  const size_t element = c10::elementSize(c.dtype);
  check_driver(
      functions().cuMemsetD2D8Async(
          reinterpret_cast<Functions::Address>(c.data),
          static_cast<size_t>(c.ld) * element,
          0,
          static_cast<size_t>(c.cols) * element,
          static_cast<size_t>(c.rows),
          current_stream().handle));
}

std::int64_t l2_cache_bytes() {
  return attribute(DeviceAttribute::kL2CacheBytes);
}

// ATen's handle is bound to the current stream and its workspace: it works in a captured graph, and
// results are bitwise identical in every run. ATen sets the math mode before each use, so it is not
// restored here.
Gemm::Gemm(at::ScalarType dtype) : dtype_(dtype) {
  TORCH_CHECK(
      functions().torch_get_current_cuda_blas_handle(&handle_) == 0,
      "PyTorch has no cuBLAS handle");
  if (dtype_ == at::kHalf || dtype_ == at::kBFloat16) {
    // Also accumulates split-K partial results in float32.
    check_cublas(functions().cublasSetMathMode(handle_, kNoReducedPrecisionReduction));
  }
  if (const auto precision = cuda_float32(); dtype_ == at::kFloat && precision.has_value()) {
    check_cublas(
        functions().cublasSetMathMode(handle_, precision == "tf32" ? kTf32Math : kDefaultMath));
  }
}

// NVIDIA_TF32_OVERRIDE=0 overrides a handle's mode.
bool Gemm::uses_tf32() const {
  if (dtype_ != at::kFloat || c10::utils::get_env("NVIDIA_TF32_OVERRIDE") == "0") return false;
  int mode = 0;
  check_cublas(functions().cublasGetMathMode(handle_, &mode));
  return mode == kTf32Math;
}

void Gemm::operator()(
    const GemmOperand& a, const GemmOperand& b, const GemmResult& c, bool accumulate) const {
  const int64_t M = c.rows, N = c.cols, K = a.cols;
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(a.rows == M && b.rows == K && b.cols == N);
  if (M == 0 || N == 0 || (K == 0 && accumulate)) return;
  if (K == 0) return zero(c);
  // Column-major: C^T (N, M) = B^T (N, K) A^T (K, M). alpha and beta have the accumulation type.
  const bool is_double = dtype_ == at::kDouble;
  const double alpha = 1, beta = accumulate ? 1 : 0;
  const float alpha_f32 = 1, beta_f32 = accumulate ? 1 : 0;
  check_cublas(
      functions().cublasGemmEx_64(
          handle_,
          operation(b),
          operation(a),
          N,
          M,
          K,
          is_double ? static_cast<const void*>(&alpha) : &alpha_f32,
          b.data,
          data_type(dtype_),
          b.ld,
          a.data,
          data_type(dtype_),
          a.ld,
          is_double ? static_cast<const void*>(&beta) : &beta_f32,
          c.data,
          data_type(c.dtype),
          c.ld,
          is_double ? kCompute64F : kCompute32F,
          kCublasDefaultAlgorithm));
}

}  // namespace lltm::cuda
