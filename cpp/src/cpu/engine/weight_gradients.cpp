#include "cpu/engine/weight_gradients.h"

#include "cpu/dispatch.h"
#include "cpu/gemm/gemm.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"

#include <algorithm>

namespace lltm::cpu {

using at::Tensor;

namespace {

// Split-K GEMM: accumulators, copies of C, share the rows of all steps. Threads that share an
// accumulator split its columns into panels and, if there are more threads than panels, its rows.
// Each thread packs its operands: fetching data that another thread has just written would cost
// more.
template <typename Format>
class WeightGradientGemmOf final : public WeightGradientGemm {
 public:
  using Source = typename Format::Source;
  using Operand = typename Format::Operand;

  WeightGradientGemmOf(int64_t m, int64_t n, const at::TensorOptions& options)
      : m_(m),
        schedule_(schedule_gradient_gemm(current_machine(), kFormat<Format>, m, n)),
        bands_(n, kGemmBand),
        c_(empty_large(
               {schedule_.accumulators, bands_.count, m, kGemmBand}, options.dtype(at::kFloat))
               .zero_()) {}

  bool add(const std::vector<Tensor>& a, const Tensor& b) override {
    std::vector<Tensor> parts;
    for (const Tensor& part : a) parts.push_back(with_contiguous_rows(part));
    const Tensor rows = with_contiguous_rows(b);
    const int64_t threads = std::max<int64_t>(available_threads() / c_.size(0), 1);
    const int64_t columns = std::min(threads, bands_.count);
    const int64_t m_tiles = (m_ + kMaxRows - 1) / kMaxRows;
    const int64_t m_parts = std::min(threads / columns, m_tiles);
    const int64_t slots = c_.size(0) * columns * m_parts;
    return parallel_region(std::min(slots, available_threads()), [&](Team& team) {
      team.for_each_slot(slots, [&](int64_t slot) {
        const int64_t part = slot / c_.size(0);
        const Range tiles = share(m_tiles, m_parts, part / columns);
        const int64_t accumulator = slot % c_.size(0);
        const Range k = share((rows.size(0) + kGroup - 1) / kGroup, c_.size(0), accumulator);
        return add_part(
            parts,
            rows,
            {{k.begin * kGroup, std::min(k.end * kGroup, rows.size(0))},
             {tiles.begin * kMaxRows, std::min(tiles.end * kMaxRows, m_)},
             share(bands_.count, columns, part % columns),
             c_.mutable_data_ptr<float>() + accumulator * c_.stride(0)});
      });
    });
  }

  void write_transposed(
      int64_t begin_row,
      int64_t end_row,
      Matrix<float> out,
      int64_t height,
      const int* blocks) override {
    if (c_.size(0) > 1) c_ = c_.sum(0, /*keepdim=*/true);
    parallel_for(bands_.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t band = begin; band < end; ++band) {
        const float* const c = c_.const_data_ptr<float>() + bands_.begin(band) * m_;
        for (int64_t n = 0, count; n < bands_.size(band); n += count) {
          const int64_t column = bands_.begin(band) + n;
          const int64_t row = column % height;
          count = std::min(bands_.size(band) - n, height - row);
          kernels().transpose_f32(
              end_row - begin_row,
              count,
              {c + begin_row * kGemmBand + n, kGemmBand},
              out.from(blocks[column / height] * height + row));
        }
      }
    });
  }

 private:
  // K in kernel calls is a multiple of kGroup, so that few different K occur.
  static constexpr int64_t kGroup = 32;

  struct Part {
    Range k, m, bands;
    float* c;
  };

  bool add_part(const std::vector<Tensor>& a, const Tensor& b, const Part& part) const {
    if (part.k.size() == 0 || part.m.size() == 0) return true;
    const int64_t most = std::min(schedule_.slice_rows, round_up(part.k.size(), kGroup));
    const auto a_slice = allocate_a<Format>(part.m.size(), most, b.options());
    const auto b_band = allocate_a<Format>(most, kGemmBand, b.options());
    for (int64_t first = part.k.begin; first < part.k.end; first += most) {
      const int64_t k = std::min(most, part.k.end - first);
      if (!pack_slice(a, first, k, part.m, a_slice.rows)) return false;
      const auto left = as_const(a_slice.rows);
      const auto right = read<Source>(b).from(first);
      if (!multiply_slice(left, right, k, part, b_band.rows.data)) return false;
    }
    return true;
  }

  bool multiply_slice(
      Matrix<const Operand> a,
      Matrix<const Source> b,
      int64_t k,
      const Part& part,
      Operand* packed_b) const {
    for (int64_t m = 0; m < part.m.size(); m += schedule_.group_rows) {
      const int64_t rows = std::min(schedule_.group_rows, part.m.size() - m);
      float* const c = part.c + (part.m.begin + m) * kGemmBand;
      for (int64_t band = part.bands.begin; band < part.bands.end; ++band) {
        const int64_t n = Format::padded_n(bands_.size(band));
        const PackedB<Operand> packed = {packed_b, round_up(k, kGroup), n, n};
        const auto from = b.from(0, bands_.begin(band));
        if (!Format::pack_b(packed, 0, 0, from, k, bands_.size(band))) return false;
        const Matrix<float> to = {c + bands_.begin(band) * m_, kGemmBand};
        Format::gemm(rows, a.from(m), as_const(packed), to, /*accumulate=*/true);
      }
    }
    return true;
  }

  static bool pack_slice(
      const std::vector<Tensor>& a, int64_t first, int64_t k, Range own, Matrix<Operand> slice) {
    int64_t m = 0;
    for (const Tensor& part : a) {
      const Range here = intersect(own, {m, m + part.size(1)});
      if (here.size() > 0) {
        const auto x = read<Source>(part).from(first, here.begin - m);
        const auto to = slice.from(here.begin - own.begin);
        if (!Format::pack_a_transposed(here.size(), k, round_up(k, kGroup), x, to)) return false;
      }
      m += part.size(1);
    }
    return true;
  }

  int64_t m_;
  GradientGemmSchedule schedule_;
  Blocks bands_;
  Tensor c_;  // (accumulators, panels, M, panel columns)
};

}  // namespace

std::unique_ptr<WeightGradientGemm> make_weight_gradient_gemm(
    GemmFormat format, int64_t m, int64_t n, const at::TensorOptions& options) {
  return visit_format(format, [&]<typename Format>(Format) -> std::unique_ptr<WeightGradientGemm> {
    return std::make_unique<WeightGradientGemmOf<Format>>(m, n, options);
  });
}

}  // namespace lltm::cpu
