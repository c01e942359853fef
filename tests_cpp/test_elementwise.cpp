// Compares each cell's element-wise part with its cell definition in float64 and checks that other
// memory is unchanged. Links only the kernels.
#include "cell/cells.h"
#include "kernel_test.h"

#include <type_traits>

namespace lltm::cpu {
namespace {

// Largest error relative to 1 and the magnitude: 16-bit rounding, or some operations.
template <typename T>
constexpr double kError = 0;
template <>
constexpr double kError<double> = 16 * 0x1p-53;
template <>
constexpr double kError<float> = 16 * 0x1p-24;
template <>
constexpr double kError<Half> = 1.1 * 0x1p-11;
template <>
constexpr double kError<BFloat16> = 1.1 * 0x1p-8;

template <typename T>
testing::AssertionResult is_near(T x, double expected) {
  const double bound = kError<T> * (1 + std::abs(expected));
  if (std::abs(widen(x) - expected) <= bound) return testing::AssertionSuccess();
  return testing::AssertionFailure() << double{widen(x)} << ", not " << expected;
}

constexpr float kUntouched = -77;

// A matrix with gaps between rows, random or filled.
template <typename T>
class Values {
 public:
  Values(std::int64_t rows, std::int64_t columns)
      : stride_(columns + 3), data_(rows * stride_, narrow<T>(kUntouched)) {}
  Values(std::int64_t rows, std::int64_t columns, unsigned seed) : Values(rows, columns) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0, 2);
    for (T& value : data_) value = narrow<T>(normal(generator));
  }
  Matrix<T> matrix() { return {data_.data(), stride_}; }
  Matrix<const T> matrix() const { return {data_.data(), stride_}; }
  T& at(std::int64_t r, std::int64_t c) { return data_[r * stride_ + c]; }
  double at(std::int64_t r, std::int64_t c) const { return widen(data_[r * stride_ + c]); }
  bool touched(std::int64_t r, std::int64_t c) const { return at(r, c) != kUntouched; }

 private:
  std::int64_t stride_;
  std::vector<T> data_;
};

// The next GEMM's operand. `holds`: an element is the stored x.
template <typename G>
struct Operand {
  Operand(std::int64_t rows, std::int64_t columns) : values(rows, columns) {}
  Matrix<G> matrix() { return values.matrix(); }
  bool holds(std::int64_t r, std::int64_t c, double x) const {
    return values.at(r, c) == widen(narrow<G>(static_cast<compute_t<G>>(x)));
  }
  bool touched(std::int64_t r, std::int64_t c) const { return values.touched(r, c); }

  Values<G> values;
};
template <>
struct Operand<Int8> {
  Operand(std::int64_t rows, std::int64_t columns)
      : stride(int8_row_stride(columns)), bytes(rows * stride, Int8{0}) {}
  Matrix<Int8> matrix() { return {bytes.data(), stride}; }
  bool holds(std::int64_t r, std::int64_t c, double x) const {
    const int byte = bytes[r * stride + c].bits - kInt8Offset;
    return std::abs(byte - x * kInt8Largest) <= 0.5001;
  }
  bool touched(std::int64_t r, std::int64_t c) const { return bytes[r * stride + c].bits != 0; }

  std::int64_t stride;
  std::vector<Int8> bytes;
};

class ElementwiseKernels : public KernelTest {
 protected:
  template <typename Check>
  void for_each_problem(const Check& check) {
    Cells::for_each([&](auto definition) {
      for (const std::int64_t hidden : {1, 7, 16, 17, 64, 100}) {
        SCOPED_TRACE(testing::Message() << definition.kCell.name << ", hidden " << hidden);
        check(definition, hidden, std::int64_t{0}, kRows * hidden);
        check(definition, hidden, hidden / 2, kRows * hidden - hidden / 3);
      }
    });
  }

  // By dtype and format of the next GEMM's operand, without and with optional arguments.
  template <bool with_int8, typename Check>
  static void for_each_format(const Check& check) {
    const auto both = [&]<typename T, typename G>(T, G) {
      SCOPED_TRACE(testing::Message() << sizeof(T) << " and " << sizeof(G) << " bytes");
      for (const bool accessories : {false, true}) {
        check.template operator()<T, G>(accessories);
      }
    };
    both(0.0, 0.0);
    both(0.0F, 0.0F);
    both(Half{}, 0.0F);
    both(BFloat16{}, 0.0F);
    both(BFloat16{}, BFloat16{});
    both(0.0F, BFloat16{});
    if constexpr (with_int8) {
      both(0.0F, Int8{});
      both(Half{}, Int8{});
      both(BFloat16{}, Int8{});
    }
  }

  static constexpr std::int64_t kRows = 3;
};
LLTM_EACH_ISA(ElementwiseKernels, "default", "avx2", "avx512");

// Pre-activations are further apart than the block width.
std::int64_t layer_hidden_of(std::int64_t hidden) {
  return hidden + 5;
}

template <typename T, typename G, typename Definition>
void check_forward(
    const Kernels& kernels,
    Definition /*definition*/,
    std::int64_t rows,
    std::int64_t hidden,
    std::int64_t begin,
    std::int64_t end,
    bool accessories) {
  using C = compute_t<T>;
  constexpr int kSlots = Definition::kSlots, kSaved = Definition::kSaved;
  const std::int64_t layer = layer_hidden_of(hidden);
  const Values<C> gates(rows, kSlots * hidden, 1), bias(1, kSlots * layer, 2);
  Values<T> c(rows, hidden, 3), factor(rows, hidden, 4);
  for (std::int64_t k = 0; k < rows * hidden; ++k) {  // the GRU's h' is between h and 1
    T& x = c.at(k / hidden, k % hidden);
    if (Definition::kCell.reads_h) x = narrow<T>(std::sin(widen(x)));
    T& y = factor.at(k / hidden, k % hidden);
    y = narrow<T>(std::cos(widen(y)));
  }
  Values<T> h_next(rows, hidden), c_next(rows, hidden), saved(rows, kSaved * layer);
  Operand<G> operand(rows, hidden);
  bool out_of_range = false;
  ForwardArgs<T, G> args;
  args.cell = &Definition::kCell;
  args.hidden = hidden;
  args.layer_hidden = layer;
  args.z = std::as_const(gates).matrix();
  args.z_stride = hidden;
  args.c = std::as_const(c).matrix();
  args.h_next = h_next.matrix();
  args.h_operand = operand.matrix();
  args.out_of_range = {&out_of_range, 0, 0};
  args.c_next = c_next.matrix();
  if (accessories) {
    args.bias = {std::as_const(bias).matrix().data, 0};
    args.saved = saved.matrix();
    args.recurrent_mask = std::as_const(factor).matrix();
  }
  elementwise_of<T, G>(kernels.cells[Cells::native<Definition>()]).forward(args, begin, end);

  EXPECT_FALSE(out_of_range);
  for (std::int64_t k = 0; k < rows * hidden; ++k) {
    const std::int64_t r = k / hidden, j = k % hidden;
    SCOPED_TRACE(testing::Message() << "row " << r << ", unit " << j);
    const Values<T>&h = h_next, &next = c_next, &activations = saved;
    if (k < begin || k >= end) {
      ASSERT_FALSE(h.touched(r, j) || next.touched(r, j) || operand.touched(r, j));
      for (int s = 0; s < kSaved; ++s) ASSERT_FALSE(activations.touched(r, j + s * layer));
      continue;
    }
    double z[kSlots];
    for (int s = 0; s < kSlots; ++s) {
      z[s] = gates.at(r, j + s * hidden) + (accessories ? bias.at(0, j + s * layer) : 0);
    }
    const auto y = Definition::forward(z, std::as_const(c).at(r, j));
    ASSERT_TRUE(is_near(h_next.at(r, j), y.h));
    ASSERT_TRUE(is_near(c_next.at(r, j), y.c));
    // Rounded to T before packing.
    const double x = h.at(r, j);
    const double packed = accessories ? x * std::as_const(factor).at(r, j) : x;
    ASSERT_TRUE(operand.holds(r, j, static_cast<C>(packed)));
    for (int s = 0; s < kSaved; ++s) {
      if (accessories) {
        ASSERT_TRUE(is_near(saved.at(r, j + s * layer), y.saved[s])) << "saved " << s;
      } else {
        ASSERT_FALSE(activations.touched(r, j + s * layer));
      }
    }
  }
}

TEST_P(ElementwiseKernels, ForwardEqualsThatOfTheCell) {
  for_each_problem([&](auto definition, std::int64_t hidden, std::int64_t begin, std::int64_t end) {
    for_each_format<definition.kCell.bounded>([&]<typename T, typename G>(bool accessories) {
      check_forward<T, G>(*kernels_, definition, kRows, hidden, begin, end, accessories);
    });
  });
}

template <typename T, typename G, typename Definition>
void check_backward(
    const Kernels& kernels,
    Definition /*definition*/,
    std::int64_t rows,
    std::int64_t hidden,
    std::int64_t begin,
    std::int64_t end,
    bool accessories) {
  using C = compute_t<T>;
  constexpr int kSlots = Definition::kSlots, kSaved = Definition::kSaved;
  const std::int64_t layer = layer_hidden_of(hidden);
  Values<T> saved(rows, kSaved * layer, 1);
  for (std::int64_t r = 0; r < rows; ++r) {  // activations are between -1 and 1
    for (std::int64_t j = 0; j < kSaved * layer; ++j) {
      T& x = saved.at(r, j);
      x = narrow<T>(std::sin(widen(x)));
    }
  }
  const Values<T> grad_h(rows, hidden, 2);
  const Values<C> grad_h_state(rows, hidden, 3), grad_c(rows, hidden, 4);
  Values<source_t<G>> grad_gates(rows, kSlots * layer);
  Values<C> grad_c_prev(rows, hidden);
  Operand<G> operand(rows, kSlots * hidden);
  bool out_of_range = false;
  BackwardArgs<T, G> args;
  args.cell = &Definition::kCell;
  args.hidden = hidden;
  args.layer_hidden = layer;
  args.saved = std::as_const(saved).matrix();
  args.dz = grad_gates.matrix();
  args.grad_c_prev = grad_c_prev.matrix();
  args.out_of_range = &out_of_range;
  args.grad_h_state = grad_h_state.matrix();
  if (accessories) {
    args.grad_h = grad_h.matrix();
    args.grad_c = grad_c.matrix();
    args.operand = operand.matrix();
    args.operand_stride = hidden;
  }
  elementwise_of<T, G>(kernels.cells[Cells::native<Definition>()]).backward(args, begin, end);

  EXPECT_FALSE(out_of_range);
  for (std::int64_t k = 0; k < rows * hidden; ++k) {
    const std::int64_t r = k / hidden, j = k % hidden;
    SCOPED_TRACE(testing::Message() << "row " << r << ", unit " << j);
    const Values<source_t<G>>& dz = grad_gates;
    if (k < begin || k >= end) {
      ASSERT_FALSE(std::as_const(grad_c_prev).touched(r, j));
      for (int s = 0; s < kSlots; ++s) ASSERT_FALSE(dz.touched(r, j + s * layer));
      continue;
    }
    double activations[kSaved];
    for (int s = 0; s < kSaved; ++s) activations[s] = std::as_const(saved).at(r, j + s * layer);
    const double dh = grad_h_state.at(r, j) + (accessories ? grad_h.at(r, j) : 0);
    const auto d = backward_of<Definition>(activations, dh, accessories ? grad_c.at(r, j) : 0.0);
    ASSERT_NEAR(std::as_const(grad_c_prev).at(r, j), d.dc, 4 * kError<C> * (8 + std::abs(d.dc)));
    for (int s = 0; s < kSlots; ++s) {
      const double bound = (kError<source_t<G>> + 4 * kError<C>)*(8 + std::abs(d.dz[s]));
      ASSERT_NEAR(dz.at(r, j + s * layer), d.dz[s], bound) << "slot " << s;
      ASSERT_EQ(operand.touched(r, j + s * hidden), accessories);
      if (accessories && std::is_same_v<source_t<G>, G>) {
        ASSERT_TRUE(operand.holds(r, j + s * hidden, dz.at(r, j + s * layer)));
      }
    }
  }
}

TEST_P(ElementwiseKernels, BackwardEqualsThatOfTheCell) {
  for_each_problem([&](auto definition, std::int64_t hidden, std::int64_t begin, std::int64_t end) {
    for_each_format</*with_int8=*/false>([&]<typename T, typename G>(bool accessories) {
      check_backward<T, G>(*kernels_, definition, kRows, hidden, begin, end, accessories);
    });
  });
}

// Stores c in float32, computes in float64.
template <typename Definition>
void check_small_batch(
    const Kernels& kernels, Definition /*definition*/, std::int64_t rows, std::int64_t hidden) {
  constexpr int kSlots = Definition::kSlots, kSaved = Definition::kSaved;
  const std::int64_t layer = layer_hidden_of(hidden);
  const Values<float> gates(rows, kSlots * hidden, 1), bias(1, kSlots * layer, 2);
  for (const bool accessories : {false, true}) {
    Values<double> c(rows, hidden, 3);
    const Values<double> before = c;
    Values<float> h_next(rows, hidden), saved(rows, kSaved * layer);
    SmallBatchArgs args = {};
    args.cell = &Definition::kCell;
    args.hidden = hidden;
    args.layer_hidden = layer;
    args.z = gates.matrix();
    args.z_stride = hidden;
    args.c = c.matrix();
    args.h_next = h_next.matrix();
    if (accessories) {
      args.bias = bias.matrix().data;
      args.saved = saved.matrix();
    }
    kernels.cells[Cells::native<Definition>()].small_batch(args, rows);
    for (std::int64_t k = 0; k < rows * hidden; ++k) {
      const std::int64_t r = k / hidden, j = k % hidden;
      SCOPED_TRACE(testing::Message() << "row " << r << ", unit " << j);
      double z[kSlots];
      for (int s = 0; s < kSlots; ++s) {
        z[s] = gates.at(r, j + s * hidden) + (accessories ? bias.at(0, j + s * layer) : 0);
      }
      const auto y = Definition::forward(z, before.at(r, j));
      if (Definition::kCell.forgets) {  // in float
        ASSERT_TRUE(is_near(static_cast<float>(c.at(r, j)), y.c));
      } else {
        ASSERT_TRUE(is_near(c.at(r, j), y.c));
      }
      ASSERT_TRUE(is_near(h_next.at(r, j), y.h));
      for (int s = 0; s < kSaved && accessories; ++s) {
        ASSERT_TRUE(is_near(saved.at(r, j + s * layer), y.saved[s])) << "saved " << s;
      }
    }
  }
}

TEST_P(ElementwiseKernels, SmallBatchesEqualThoseOfTheCell) {
  for_each_problem([&](auto definition, std::int64_t hidden, std::int64_t /*begin*/, std::int64_t) {
    check_small_batch(*kernels_, definition, kRows, hidden);
  });
}

TEST_P(ElementwiseKernels, RowsAreSummed) {
  for (const std::int64_t rows : {0, 1, 2, 3, 50}) {
    for (const std::int64_t columns : {1, 15, 64, 65, 130}) {
      const Values<float> x(rows, columns, 1);
      std::vector<float> y(columns + 1, kUntouched);
      kernels_->sum_rows_f32(rows, columns, x.matrix(), y.data());
      for (std::int64_t j = 0; j < columns; ++j) {
        double sum = 0, magnitude = 0;
        for (std::int64_t r = 0; r < rows; ++r) {
          sum += x.at(r, j);
          magnitude += std::abs(x.at(r, j));
        }
        ASSERT_NEAR(y[j], sum, static_cast<double>(rows) * 0x1p-24 * magnitude);
      }
      ASSERT_EQ(y[columns], kUntouched);
    }
  }
}

}  // namespace
}  // namespace lltm::cpu
