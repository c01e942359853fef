// Runs on the CPU. Checks values, indices and memory for partial accesses, blocks and grids.
#include "cell/cells.h"
#include "cell/registry.h"
#include "cell_program.h"
#include "cuda/kernel/elementwise_kernels.h"
#include "cuda_on_host.h"
#include "custom_definitions.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace lltm::cuda {
namespace {

using lltm_test::append;
using lltm_test::backward_inputs;
using lltm_test::forward_inputs;

// ---- index space ------------------------------------------------------------

TEST(CudaIndex, EveryPieceBelongsToOneThread) {
  for (const int64_t count : {1, 2, 127, 128, 129, 1000, 4097}) {
    std::vector<int> visits(static_cast<size_t>(count));
    for (int64_t block = 0; block < blocks_for(count); ++block) {
      for (int thread = 0; thread < kThreads; ++thread) {
        const int64_t n = piece_of(block, thread);
        if (n < count) ++visits[static_cast<size_t>(n)];
      }
    }
    EXPECT_EQ(visits, std::vector<int>(visits.size(), 1)) << count;
  }
}

TEST(CudaIndex, GridsAreWithinTheLimits) {
  EXPECT_EQ(blocks_for(1), 1);
  EXPECT_EQ(blocks_for(kThreads), 1);
  EXPECT_EQ(blocks_for(kThreads + 1), 2);
  // 256 GB of the smallest pieces.
  EXPECT_LE(blocks_for(int64_t{1} << 37), std::numeric_limits<int32_t>::max());
}

TEST(CudaIndex, PositionsAreCorrectBeyond32Bits) {
  const int64_t limit = int64_t{1} << 32;
  for (const int64_t per_row :
       {int64_t{1}, int64_t{7}, int64_t{768}, limit - 1, limit, limit + 5}) {
    for (const int64_t n :
         {int64_t{0}, int64_t{6}, limit - 2, limit - 1, limit, limit + 1, 9 * limit + 8}) {
      const Position position = lltm::cuda::position(n, per_row);
      EXPECT_EQ(position.row, n / per_row) << n << " of " << per_row;
      EXPECT_EQ(position.col, n % per_row) << n << " of " << per_row;
    }
  }
}

// ---- matrices in memory ---------------------------------------------------

template <typename T>
double epsilon() {
  return static_cast<double>(std::numeric_limits<T>::epsilon());
}

// An unlikely result, to detect writes.
template <typename T>
const T kUntouched = std::numeric_limits<T>::lowest();

// A matrix inside an array whose other elements must not change.
template <typename T>
class Array {
 public:
  Array(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, int64_t offset)
      : rows_(rows),
        cols_(cols),
        values_(
            static_cast<size_t>(offset + rows * row_stride + cols * col_stride + 32),
            kUntouched<T>) {
    // Aligned like at::empty on a GPU; 16 bytes would suffice.
    const auto address = reinterpret_cast<std::uintptr_t>(values_.data());
    const auto ahead = static_cast<int64_t>((64 - address % 64) % 64 / sizeof(T));
    first_ = ahead % 16 + offset;
    matrix_ = {values_.data() + first_, row_stride, col_stride};
  }
  Array(const Array&) = delete;

  Matrix<T> matrix() { return matrix_; }
  operator Matrix<const T>() const {
    return {matrix_.data, matrix_.row_stride, matrix_.col_stride};
  }
  double at(int64_t row, int64_t col) const {
    return static_cast<double>(matrix_.row(row)[col * matrix_.col_stride]);
  }
  void fill(std::mt19937& random) {
    std::normal_distribution<double> normal;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) {
        matrix_.row(r)[c * matrix_.col_stride] = static_cast<T>(normal(random));
      }
    }
  }
  int64_t changed() const {
    int64_t count = 0;
    for (const T& value : values_)
      count += static_cast<double>(value) != static_cast<double>(kUntouched<T>);
    return count;
  }

 private:
  int64_t rows_, cols_, first_;
  std::vector<T> values_;
  Matrix<T> matrix_;
};

// e(y) = max|y - exact| / max|exact|.
class Error {
 public:
  void add(double y, double exact) {
    difference_ = std::max(difference_, std::isfinite(y) ? std::abs(y - exact) : 1e30);
    scale_ = std::max(scale_, std::abs(exact));
  }
  void add(const Error& other) {
    difference_ = std::max(difference_, other.difference_);
    scale_ = std::max(scale_, other.scale_);
  }
  double value() const {
    return static_cast<double>(scale_ > 0 ? difference_ / scale_ : difference_);
  }

 private:
  double difference_ = 0, scale_ = 0;
};

// Input layout. Outputs have contiguous columns.
struct Layout {
  const char* name;
  int64_t row_gap;     // distance between rows
  int64_t col_stride;  // 0: repeated column, overlapping rows
  int64_t offset;      // of the first element
};
constexpr Layout kLayouts[] = {
    {"contiguous", 0, 1, 0},
    {"rows far apart", 16, 1, 0},
    {"rows out of line", 3, 1, 0},
    {"begins out of line", 0, 1, 1},
    {"every third column", 2, 3, 0},
    {"expanded", 0, 0, 0},
};

template <typename T>
Array<T> input(const Layout& layout, int64_t rows, int64_t cols) {
  const int64_t row_stride = layout.col_stride == 0 ? 0 : cols * layout.col_stride + layout.row_gap;
  return {rows, cols, row_stride, layout.col_stride, layout.offset};
}

struct Size {
  int64_t rows, hidden;
};
constexpr Size kSizes[] = {{1, 1}, {3, 7}, {5, 8}, {2, 33}, {17, 16}, {1, 136}, {130, 24}};

// Wide if size and cell allow.
template <typename T, typename Check>
void for_each_case(const CellInfo& cell, const Check& check) {
  bool any_wide = false;
  for (const Size& size : kSizes) {
    for (const Layout& layout : kLayouts) {
      for (const bool in_place : {false, true}) {
        for (const bool optional : {false, true}) {
          SCOPED_TRACE(
              testing::Message() << size.rows << " x " << size.hidden << ", " << layout.name
                                 << (in_place ? ", in place" : "")
                                 << (optional ? ", with optional arguments" : ""));
          check(size, layout, in_place, optional, /*wide=*/false);
          if (size.hidden % kWide<T> != 0) continue;
          any_wide = true;
          check(size, layout, in_place, optional, /*wide=*/true);
        }
      }
    }
  }
  EXPECT_TRUE(any_wide) << cell.title();
}

template <typename Body>
void for_each_cell(const Body& body) {
  Cells::for_each([&]<typename Definition>(Definition) {
    SCOPED_TRACE(Definition::kCell.name);
    body(Definition::kCell, DefinitionRegisters<Definition>());
  });
  for (const std::string& text : lltm_test::kCellTexts) {
    const CellInfo& cell = *find_cell(text);
    SCOPED_TRACE(cell.title());
    lltm_test::visit_custom_definition(cell, [&](auto definition) { body(cell, definition); });
  }
}

template <typename Types>
class CudaElementwise : public testing::Test {};

template <typename T_, typename D_>
struct Kinds {
  using T = T_;
  using D = D_;
};
using AllKinds = testing::Types<
    Kinds<double, double>,
    Kinds<float, float>,
    Kinds<c10::Half, c10::Half>,
    Kinds<c10::Half, float>,
    Kinds<c10::BFloat16, c10::BFloat16>,
    Kinds<c10::BFloat16, float>>;
TYPED_TEST_SUITE(CudaElementwise, AllKinds);

template <typename T>
void append(
    std::vector<double>& to,
    const Array<T>& array,
    int64_t row,
    int64_t col,
    int64_t hidden,
    int n) {
  append(to, Matrix<const T>(array), row, col, hidden, n);
}

template <typename T>
Matrix<const T> as_row(Array<T>& array) {
  return {array.matrix().data, 0, array.matrix().col_stride};
}

template <int kWidth, typename T, typename Cell>
std::vector<Error> check_forward(
    const CellInfo& cell,
    Cell /*functions*/,
    const Size& size,
    const Layout& layout,
    bool in_place,
    bool optional) {
  using C = compute_t<T>;
  const int64_t rows = size.rows, hidden = size.hidden;
  const int states = cell.state_columns(), own = cell.reads_h ? 1 : 0;
  std::mt19937 random(1);
  auto gates = input<C>(layout, rows, cell.slots * hidden);
  auto bias_ih = input<T>(layout, 1, (cell.x.count() + cell.parameters) * hidden);
  auto bias_hh = input<T>(layout, 1, cell.h.count() * hidden);
  auto parameters = input<T>(layout, 1, cell.parameters * hidden);
  auto c = input<T>(layout, rows, states * hidden);
  Array<T> h_next(rows, hidden, hidden, 1, 0), h_operand(rows, hidden, hidden, 1, 0);
  Array<T> c_next(rows, states * hidden, states * hidden, 1, 0);
  Array<T> activations(rows, cell.saved * hidden, cell.saved * hidden, 1, 0);
  gates.fill(random);
  bias_ih.fill(random);
  bias_hh.fill(random);
  parameters.fill(random);
  c.fill(random);
  if (in_place) c_next.fill(random);

  ForwardArgs<T> args;
  args.rows = rows;
  args.hidden = hidden;
  args.gates = gates;
  if (optional) args.bias_ih = as_row(bias_ih);
  // Only the bias of h can be omitted separately.
  if (optional && !in_place) args.bias_hh = as_row(bias_hh);
  args.parameters = as_row(parameters);
  args.c = in_place ? c_next : c;
  args.h_next = h_next.matrix();
  if (optional) args.h_operand = h_operand.matrix();
  args.c_next = c_next.matrix();
  if (optional) args.activations = activations.matrix();

  std::vector<std::vector<double>> exact;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < hidden; ++j) {
      exact.push_back(
          lltm_test::run_program(
              programs_of(cell).forward.program(), forward_inputs(cell, args, r, j)));
    }
  }
  const ForwardAccess wide = access_of(args);
  for (int64_t n = 0; n < rows * hidden / kWidth; ++n) forward_at<Cell, kWidth>(args, wide, n);

  std::vector<Error> errors(exact[0].size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < hidden; ++j) {
      std::vector<double> out;
      append(out, h_next, r, j, hidden, 1);
      if (own == 1) {
        EXPECT_EQ(c_next.at(r, j), h_next.at(r, j));
      }
      append(out, c_next, r, j + own * hidden, hidden, cell.states);
      if (optional) {
        append(out, activations, r, j, hidden, cell.saved);
        EXPECT_EQ(h_operand.at(r, j), h_next.at(r, j));
      }
      for (size_t k = 0; k < out.size(); ++k) errors[k].add(out[k], exact[r * hidden + j][k]);
    }
  }
  EXPECT_EQ(h_next.changed(), rows * hidden);
  EXPECT_EQ(c_next.changed(), states * rows * hidden);
  EXPECT_EQ(h_operand.changed(), optional ? rows * hidden : 0);
  EXPECT_EQ(activations.changed(), optional ? cell.saved * rows * hidden : 0);
  return errors;
}

template <int kWidth, typename T, typename D, typename Cell>
std::vector<Error> check_backward(
    const CellInfo& cell,
    Cell /*functions*/,
    const Size& size,
    const Layout& layout,
    bool in_place,
    bool optional) {
  const int64_t rows = size.rows, hidden = size.hidden;
  const int states = cell.state_columns();
  std::mt19937 random(1);
  auto activations = input<T>(layout, rows, cell.saved * hidden);
  auto parameters = input<T>(layout, 1, cell.parameters * hidden);
  auto grad_h = input<T>(layout, rows, hidden);
  auto grad_h_state = input<D>(layout, rows, hidden);
  auto grad_c = input<D>(layout, rows, states * hidden);
  Array<T> grad_gates(rows, cell.grad_columns() * hidden, cell.grad_columns() * hidden, 1, 0);
  Array<D> grad_c_prev(rows, states * hidden, states * hidden, 1, 0);
  activations.fill(random);
  parameters.fill(random);
  grad_h.fill(random);
  grad_h_state.fill(random);
  grad_c.fill(random);
  if (in_place) grad_c_prev.fill(random);

  BackwardArgs<T, D> args;
  args.rows = rows;
  args.hidden = hidden;
  args.activations = activations;
  args.parameters = as_row(parameters);
  args.grad_h = grad_h;
  if (optional) args.grad_h_state = grad_h_state;
  if (optional || in_place) args.grad_c = in_place ? grad_c_prev : grad_c;
  args.grad_gates = grad_gates.matrix();
  if (optional || in_place) args.grad_c_prev = grad_c_prev.matrix();

  std::vector<std::vector<double>> exact;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < hidden; ++j) {
      exact.push_back(
          lltm_test::run_program(
              programs_of(cell).backward.program(), backward_inputs(cell, args, r, j)));
    }
  }
  const BackwardAccess wide = access_of(args);
  for (int64_t n = 0; n < rows * hidden / kWidth; ++n) backward_at<Cell, kWidth>(args, wide, n);

  std::vector<Error> errors(exact[0].size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < hidden; ++j) {
      std::vector<double> out;
      append(out, grad_gates, r, j, hidden, cell.grad_columns());
      if (args.grad_c_prev.data != nullptr) append(out, grad_c_prev, r, j, hidden, states);
      for (size_t k = 0; k < out.size(); ++k) errors[k].add(out[k], exact[r * hidden + j][k]);
    }
  }
  EXPECT_EQ(grad_gates.changed(), cell.grad_columns() * rows * hidden);
  EXPECT_EQ(grad_c_prev.changed(), optional || in_place ? states * rows * hidden : 0);
  return errors;
}

// Per case for built-in cells; over all cases for others and for cells with one pre-activation,
// because a single value may cancel.
class Errors {
 public:
  Errors(const CellInfo& cell, std::vector<double> bounds)
      : cell_(cell), bounds_(std::move(bounds)), all_(bounds_.size()) {}
  Errors(const Errors&) = delete;
  ~Errors() { expect(all_); }

  void add(const std::vector<Error>& of_case) {
    for (size_t k = 0; k < all_.size(); ++k) all_[k].add(of_case[k]);
    if (cell_.programs == nullptr && cell_.slots > 1) expect(of_case);
  }

 private:
  void expect(const std::vector<Error>& errors) const {
    for (size_t k = 0; k < errors.size(); ++k) {
      EXPECT_LE(errors[k].value(), bounds_[k]) << "output " << k;
    }
  }

  const CellInfo& cell_;
  const std::vector<double> bounds_;
  std::vector<Error> all_;
};

TYPED_TEST(CudaElementwise, ForwardMatchesTheProgramAndWritesNothingElse) {
  using T = typename TypeParam::T;
  for_each_cell([](const CellInfo& cell, auto functions) {
    const double roundings = cell.programs != nullptr ? 16 : 8;
    Errors errors(
        cell, std::vector<double>(ProgramSizes(cell).forward_out, roundings * epsilon<T>()));
    for_each_case<T>(
        cell, [&](const Size& size, const Layout& layout, bool in_place, bool optional, bool wide) {
          errors.add(
              wide ? check_forward<kWide<T>, T>(cell, functions, size, layout, in_place, optional)
                   : check_forward<1, T>(cell, functions, size, layout, in_place, optional));
        });
  });
}

TYPED_TEST(CudaElementwise, BackwardMatchesTheProgramAndWritesNothingElse) {
  using T = typename TypeParam::T;
  using D = typename TypeParam::D;
  for_each_cell([](const CellInfo& cell, auto functions) {
    // The GRU's d (h - n) cancels digits.
    const double roundings = cell.programs != nullptr || cell.reads_h ? 16 : 8;
    std::vector<double> bounds(ProgramSizes(cell).backward_out, roundings * epsilon<D>());
    std::fill_n(bounds.begin(), cell.grad_columns(), roundings * epsilon<T>());
    Errors errors(cell, bounds);
    for_each_case<T>(
        cell, [&](const Size& size, const Layout& layout, bool in_place, bool optional, bool wide) {
          errors.add(
              wide ? check_backward<kWide<T>, T, D>(
                         cell, functions, size, layout, in_place, optional)
                   : check_backward<1, T, D>(cell, functions, size, layout, in_place, optional));
        });
  });
}

TYPED_TEST(CudaElementwise, OnlyAlignedDataIsReadSixteenBytesAtATime) {
  using T = typename TypeParam::T;
  const auto wide = [](const Layout& layout) {
    return is_wide(Matrix<const T>(input<T>(layout, 3, 16)));
  };
  EXPECT_TRUE(wide(kLayouts[0]));
  EXPECT_TRUE(wide(kLayouts[1]));
  for (const size_t k : {2, 3, 4, 5}) EXPECT_FALSE(wide(kLayouts[k])) << kLayouts[k].name;
}

}  // namespace
}  // namespace lltm::cuda
