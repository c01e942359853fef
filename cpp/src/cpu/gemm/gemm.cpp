#include "cpu/gemm/gemm.h"

#include "common/tensor_views.h"
#include "cpu/threads/parallel.h"

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

namespace lltm::cpu {

using at::Tensor;

Tensor with_contiguous_rows(const Tensor& tensor) {
  const bool contiguous = tensor.stride(1) == 1 && tensor.stride(0) >= tensor.size(1);
  return contiguous ? tensor : tensor.contiguous();
}

Tensor converted(const Tensor& x, at::ScalarType dtype) {
  if (x.scalar_type() == dtype) return x;
  const bool widens = dtype == at::kFloat;
  const at::ScalarType narrow_dtype = widens ? x.scalar_type() : dtype;
  const bool from_float = widens || x.scalar_type() == at::kFloat;
  const bool is_16_bit = narrow_dtype == at::kHalf || narrow_dtype == at::kBFloat16;
  if (!from_float || !is_16_bit || !x.is_contiguous()) return x.to(dtype);
  const Tensor y = new_tensor(x.sizes(), x.options().dtype(dtype));
  const auto convert = [&]<typename T>(T*) {
    parallel_for(x.numel(), kPackGrain, [&](int64_t begin, int64_t end) {
      const int64_t n = end - begin;
      if (widens) {
        const auto from = static_cast<const T*>(x.const_data_ptr()) + begin;
        widen(Matrix<const T>{from, n}, y.mutable_data_ptr<float>() + begin, n);
      } else {
        const auto to = static_cast<T*>(y.mutable_data_ptr()) + begin;
        narrow(x.const_data_ptr<float>() + begin, to, n);
      }
    });
  };
  narrow_dtype == at::kHalf ? convert(static_cast<Half*>(nullptr))
                            : convert(static_cast<BFloat16*>(nullptr));
  return y;
}

Tensor as_packed_dtype(const Tensor& weights, at::ScalarType dtype) {
  const bool widens = weights.scalar_type() == at::kHalf || weights.scalar_type() == at::kBFloat16;
  return widens && dtype == at::kFloat ? weights : weights.to(dtype);
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
    const Tensor rows = with_contiguous_rows(as_packed_dtype(matrix, kDtype<Unpacked>));
    const int64_t elements = padded_k_ * Format::padded_n(matrix.size(1));
    memory_ = empty_large(
        {elements * static_cast<int64_t>(sizeof(Element))}, matrix.options().dtype(at::kByte));
    visit_packed_storage<Format>(storage_of(matrix.scalar_type()), [&]<typename T>(T*) {
      const auto b = read<T>(rows);
      fits_ = parallel_tasks(
          bands_.count, elements, kPackGrain, [&](int64_t band, int64_t part, int64_t parts) {
            const Range own = Partition(k_, kPackedRows, parts).range(part);
            const int64_t n = bands_.size(band);
            const auto pack = [&](const auto& from, int64_t first, int64_t count) {
              return Format::pack_b(band_of(band), own.begin + first, 0, from, count, n);
            };
            const auto from = b.from(own.begin, bands_.begin(band));
            return own.size() == 0 || pack_widened<Unpacked>(from, own.size(), n, pack);
          });
    });
  }

  bool operator()(const Tensor& out, const Tensor& a) const {
    const int64_t rows = a.size(0);
    if (rows == 0) return true;
    const int64_t tiers = (rows + kMaxRows - 1) / kMaxRows;
    const int64_t grain = divide_up(kGemmGrain, std::min(rows, kMaxRows) * kGemmBand * padded_k_);
    return fits_ && parallel_for(tiers * bands_.count, grain, [&](int64_t begin, int64_t end) {
             const Range own = {begin, end};
             if (out.scalar_type() == at::kHalf) return run_tasks<Half>(out, a, own);
             if (out.scalar_type() == at::kBFloat16) return run_tasks<BFloat16>(out, a, own);
             return run_tasks<float>(out, a, own);
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
    const auto packed = in_place ? OperandA<Format>{} : allocate_a<Format>(kMaxRows, k_);
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
  Partition bands_;
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
