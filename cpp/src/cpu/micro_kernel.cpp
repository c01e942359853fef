#include "cpu/micro_kernel.h"

#include "cpu/dispatch.h"

#if __has_include(<ATen/native/CPUBlas.h>)
#include <ATen/native/CPUBlas.h>
#endif

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <exception>
#include <string>
#include <type_traits>

namespace lltm::cpu {
namespace {

#if defined(CPUBLAS_BRGEMM_F32F32F32) && defined(CPUBLAS_BRGEMM_BF16BF16F32)
#define LLTM_HAS_BRGEMM 1
#endif

template <typename G>
void brgemm(
    [[maybe_unused]] std::int64_t rows,
    [[maybe_unused]] std::int64_t columns,
    [[maybe_unused]] std::int64_t depth,
    [[maybe_unused]] const G* a,
    [[maybe_unused]] std::int64_t lda,
    [[maybe_unused]] const G* b,
    [[maybe_unused]] std::int64_t ldb,
    [[maybe_unused]] float* c,
    [[maybe_unused]] std::int64_t ldc,
    [[maybe_unused]] bool accumulate) {
#if defined(LLTM_HAS_BRGEMM)
  using Operand = std::conditional_t<std::is_same_v<G, float>, float, at::BFloat16>;
  at::native::cpublas::brgemm(
      rows,
      columns,
      depth,
      lda,
      ldb,
      ldc,
      accumulate,
      reinterpret_cast<const Operand*>(a),
      reinterpret_cast<const Operand*>(b),
      c,
      /*is_vnni=*/std::is_same_v<G, BFloat16>);
#endif
}

template <typename G>
G operand(float x) {
  if constexpr (std::is_same_v<G, float>)
    return x;
  else
    return {c10::BFloat16(x).x};
}

// The height of the next band of rows: at most kMaxRows, a multiple of 4 as
// long as there are 4, and no sliver at the end: 19 heights in all.
std::int64_t next_band(std::int64_t rows) {
  if (rows >= 2 * kMaxRows) return kMaxRows;
  if (rows > kMaxRows) return (rows / 2 + 3) / 4 * 4;
  return rows < 4 ? rows : rows / 4 * 4;
}

// The kernel adds up the products of a row and a column one after the other, and
// then adds the sum to C: its rounding errors grow with K. So K is cut into pieces
// of at most this length; the fewer the rows, the more accurate is MKL, which plain
// PyTorch uses. bfloat16's own rounding is far larger than that of its sums.
template <typename G>
std::int64_t longest_sum(std::int64_t rows, std::int64_t depth) {
  if (!std::is_same_v<G, float>) return depth;
  return rows < 16 ? 32 : 64;
}

}  // namespace

template <typename G>
void multiply(
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t depth,
    const G* a,
    std::int64_t lda,
    const G* b,
    std::int64_t ldb,
    float* c,
    std::int64_t ldc,
    bool accumulate) {
  const std::int64_t longest = longest_sum<G>(rows, depth);
  const std::int64_t pieces = (depth + longest - 1) / longest;
  const std::int64_t piece = round_up((depth + pieces - 1) / pieces, 16);
  while (rows > 0) {
    const std::int64_t band = next_band(rows);
    for (std::int64_t k = 0; k < depth; k += piece) {
      brgemm(
          band,
          columns,
          std::min(piece, depth - k),
          a + k,
          lda,
          b + k * ldb,
          ldb,
          c,
          ldc,
          accumulate || k > 0);
    }
    a += band * lda;
    c += band * ldc;
    rows -= band;
  }
}

template void multiply<float>(
    std::int64_t,
    std::int64_t,
    std::int64_t,
    const float*,
    std::int64_t,
    const float*,
    std::int64_t,
    float*,
    std::int64_t,
    bool);
template void multiply<BFloat16>(
    std::int64_t,
    std::int64_t,
    std::int64_t,
    const BFloat16*,
    std::int64_t,
    const BFloat16*,
    std::int64_t,
    float*,
    std::int64_t,
    bool);

template <>
void multiply<BFloat16x3>(
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t depth,
    const BFloat16x3* a,
    std::int64_t lda,
    const BFloat16x3* b,
    std::int64_t /*ldb*/,
    float* c,
    std::int64_t ldc,
    bool accumulate) {
  kernels().split.multiply(rows, columns, depth, a, lda, b, c, ldc, accumulate);
}

template <typename G>
bool has_micro_kernel() {
#if defined(LLTM_HAS_BRGEMM)
  static const bool works = [] {
    // Below AVX2 the same function is an ordinary product of small blocks,
    // slower and less accurate than one of all rows.
    const std::string capability = at::get_cpu_capability();
    if (capability != "AVX2" && capability != "AVX512") return false;
    // (2, 3) . (5, 7) + 1, in numbers that both formats hold exactly.
    const G a[2] = {operand<G>(2.0f), operand<G>(3.0f)};
    const G b[2] = {operand<G>(5.0f), operand<G>(7.0f)};
    float c = 1.0f;
    try {
      brgemm(1, 1, 2, a, 2, b, 1, &c, 1, /*accumulate=*/true);
    } catch (const std::exception&) {
      return false;
    }
    release_micro_kernel();
    return c == 32.0f;
  }();
  // torch.backends.mkldnn.flags(enabled=False) turns it off, and may at any time.
  return works && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

template <>
bool has_micro_kernel<BFloat16x3>() {
  return kernels().split.multiply != nullptr;
}

template bool has_micro_kernel<float>();
template bool has_micro_kernel<BFloat16>();

void release_micro_kernel() {
#if defined(LLTM_HAS_BRGEMM)
  at::native::cpublas::brgemm_release(/*is_vnni=*/true);
#endif
}

}  // namespace lltm::cpu
