#include "cpu/engine/weight_gradient_gemm.h"

#include "common/tensor_views.h"
#include "cpu/dispatch.h"
#include "cpu/gemm/gemm.h"
#include "cpu/threads/parallel.h"

#include <algorithm>

namespace lltm::cpu {

using at::Tensor;

namespace {

// Split-K GEMM: accumulators, copies of C, share the rows of all steps. The threads of an
// accumulator split its columns into panels and its rows into tiles. If they are many, they pack A
// together, slice by slice. Each packs its own panels of B.
template <typename Format>
class WeightGradientGemmOf final : public WeightGradientGemm {
 public:
  using Unpacked = typename Format::Unpacked;
  using Element = typename Format::Element;

  WeightGradientGemmOf(int64_t threads, int64_t m, int64_t n, const at::TensorOptions& options)
      : m_(m),
        schedule_(schedule_gradient_gemm(current_machine(), kFormat<Format>, threads, m, n)),
        bands_(n, kGemmBand),
        c_(empty_large(
               {std::max(schedule_.accumulators, kFewestCopies), bands_.count, m, kGemmBand},
               options.dtype(at::kFloat))
               .zero_()) {}

  bool add(const std::vector<Tensor>& a, const Tensor& b) override {
    std::vector<Tensor> parts;
    for (const Tensor& part : a) parts.push_back(with_contiguous_rows(part));
    const Tensor rows = with_contiguous_rows(b);
    const Grid& grid = schedule_.grid;
    const int64_t team = grid.workers(), workers = schedule_.accumulators * team;
    const int64_t packers = team < kMostPrivate ? 1 : team;  // of a slice
    const Partition k(rows.size(0), kGroup, schedule_.accumulators);
    const int64_t most = std::min(schedule_.slice_rows, round_up(k.width, kGroup));
    const int64_t slices = divide_up(k.width, most);
    // Two slices alternate: one barrier per slice.
    const int64_t buffers = std::min<int64_t>(slices, 2);
    reserve(a_, workers / packers * buffers * m_, most + kGap);
    reserve(b_, workers * most, kGemmBand);
    const int64_t copies = c_.size(0) / schedule_.accumulators;
    float* const c = c_.mutable_data_ptr<float>() + calls_++ % copies * c_.stride(0);
    const auto run_thread = [&](Team& threads) {
      const auto for_each_worker = [&](int64_t slice, const auto& work) {
        threads.for_each_worker([&](int64_t worker) {
          const Range all = k.range(worker / team);
          const Range own = intersect({slice * most, (slice + 1) * most}, {0, all.size()});
          if (own.size() == 0) return true;
          const int64_t member = worker % team;
          const Range tiles = share(divide_up(m_, kMaxRows), grid.rows, member / grid.columns);
          return work(
              Share{
                  {all.begin + own.begin, all.begin + own.end},
                  {tiles.begin * kMaxRows, std::min(tiles.end * kMaxRows, m_)},
                  share(bands_.count, grid.columns, member % grid.columns),
                  a_.rows.from((worker / packers * buffers + slice % buffers) * m_),
                  b_.rows.row(worker * most),
                  c + worker / team * c_.stride(0),
                  member});
        });
      };
      for (int64_t slice = 0; slice < slices; ++slice) {
        for_each_worker(slice, [&](const Share& part) {
          const Range m =
              packers == 1 ? part.m : Partition(m_, kVector, packers).range(part.member);
          return pack_slice(parts, part.k, m, part.a);
        });
        threads.barrier();
        for_each_worker(
            slice, [&](const Share& part) { return multiply_slice(part, read<Unpacked>(rows)); });
      }
    };
    return parallel_region(workers, run_thread, packers);
  }

  void write_transposed(
      int64_t begin_row,
      int64_t end_row,
      Matrix<float> out,
      int64_t height,
      const int* blocks) override {
    if (c_.size(0) > 1) c_ = c_.sum(0, /*keepdim=*/true);
    const int64_t grain = divide_up(kPackGrain, m_ * kGemmBand);
    parallel_for(bands_.count, grain, [&](int64_t begin, int64_t end) {
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
  static constexpr int64_t kVector = 16;
  // Fewer threads than this each pack A: fetching another thread's part costs more.
  static constexpr int64_t kMostPrivate = 4;
  // The rounding errors of bf16x3 grow with the number of additions to a copy of C: if there is one
  // accumulator, calls alternate between two copies.
  static constexpr int64_t kFewestCopies = kFormat<Format> == GemmFormat::kBf16x3 ? 2 : 1;
  // Rows of A with a power-of-two stride would map to few cache sets.
  static constexpr int64_t kGap = 32;

  struct Share {
    Range k, m, bands;
    Matrix<Element> a;
    Element* b;
    float* c;
    int64_t member;
  };

  static void reserve(OperandA<Format>& operand, int64_t rows, int64_t k) {
    if (operand.bytes > 0 && operand.rows.row_stride == Format::a_stride(k) &&
        operand.bytes >= rows * Format::a_stride(k) * int64_t{sizeof(Element)}) {
      return;
    }
    operand = allocate_a<Format>(rows, k);
  }

  bool multiply_slice(const Share& part, Matrix<const Unpacked> b) const {
    const int64_t k = part.k.size();
    for (int64_t m = part.m.begin; m < part.m.end; m += schedule_.group_rows) {
      const int64_t rows = std::min(schedule_.group_rows, part.m.end - m);
      for (int64_t band = part.bands.begin; band < part.bands.end; ++band) {
        const int64_t n = Format::padded_n(bands_.size(band));
        const PackedB<Element> packed = {part.b, round_up(k, kGroup), n, n};
        const auto from = b.from(part.k.begin, bands_.begin(band));
        if (!Format::pack_b(packed, 0, 0, from, k, bands_.size(band))) return false;
        const Matrix<float> to = {part.c + bands_.begin(band) * m_ + m * kGemmBand, kGemmBand};
        Format::gemm(rows, as_const(part.a.from(m)), as_const(packed), to, /*accumulate=*/true);
      }
    }
    return true;
  }

  static bool pack_slice(const std::vector<Tensor>& a, Range k, Range own, Matrix<Element> slice) {
    int64_t m = 0;
    for (const Tensor& part : a) {
      const Range here = intersect(own, {m, m + part.size(1)});
      if (here.size() > 0) {
        const auto x = read<Unpacked>(part).from(k.begin, here.begin - m);
        const auto to = slice.from(here.begin);
        const int64_t rows = round_up(k.size(), kGroup);
        if (!Format::pack_a_transposed(here.size(), k.size(), rows, x, to)) return false;
      }
      m += part.size(1);
    }
    return true;
  }

  int64_t m_;
  GradientGemmSchedule schedule_;
  Partition bands_;
  int64_t calls_ = 0;
  Tensor c_;                // (accumulators, panels, M, panel columns)
  OperandA<Format> a_, b_;  // slices of A, transposed, and panels of B
};

}  // namespace

std::unique_ptr<WeightGradientGemm> make_weight_gradient_gemm(
    GemmFormat format, int64_t threads, int64_t m, int64_t n, const at::TensorOptions& options) {
  return visit_format(format, [&]<typename Format>(Format) -> std::unique_ptr<WeightGradientGemm> {
    return std::make_unique<WeightGradientGemmOf<Format>>(threads, m, n, options);
  });
}

}  // namespace lltm::cpu
