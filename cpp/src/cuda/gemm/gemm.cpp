#include "cuda/gemm/gemm.h"

#include "cuda/context.h"

#include <lltm/backends.h>

#include <c10/util/env.h>

#include <cstddef>
#include <cstdint>

namespace lltm::cuda {
namespace {

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

}  // namespace

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

// If a sum of K terms is rounded after each addition, as cuBLAS may do, its relative error in half
// epsilons is about sqrt(K / 6) for random signs and sqrt(K) / 3 for equal signs: more than a
// hundred for 100,000 rows. The accuracy criterion (docs/accuracy.md) counts errors below 4
// epsilons as 4, the error of a GEMM over 512 rows. With two levels of sums, 32 GEMMs per partial
// sum, adding exceeds that error only after eight million rows. In 16 bits and TF32, rounding the
// factors causes far larger errors than float32 sums.
SumLimits Gemm::over_rows() const {
  const bool is_decisive = dtype_ == at::kDouble || (dtype_ == at::kFloat && !uses_tf32());
  return is_decisive ? SumLimits{512, 32} : SumLimits{};
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
