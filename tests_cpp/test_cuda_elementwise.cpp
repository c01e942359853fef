// The code of a thread of the CUDA element-wise kernels, run on the CPU for every thread of
// a grid: values, indices and memory, for sizes and strides that fill no access, no block
// and no grid.
#include "cell/cells.h"
#include "cell_program.h"
#include "common/operator_args.h"
#include "cuda/kernel/elementwise_kernels.h"
#include "own_pages.h"
#include "reference.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace lltm::cuda {
namespace {

using Real = reference::Widest;

// ---- the index space ------------------------------------------------------

TEST(CudaIndex, EveryPieceBelongsToOneThread) {
  for (const int64_t count : {1, 2, 127, 128, 129, 1000, 4097}) {
    for (const int64_t blocks : {int64_t{1}, int64_t{3}, grid_for(count).blocks}) {
      std::vector<int> visits(static_cast<size_t>(count));
      for (int64_t block = 0; block < blocks; ++block) {
        for (int thread = 0; thread < kThreads; ++thread) {
          grid_stride(block, blocks, thread, kThreads, count, [&](int64_t n) {
            ++visits.at(static_cast<size_t>(n));
          });
        }
      }
      EXPECT_EQ(visits, std::vector<int>(visits.size(), 1)) << count << " in " << blocks;
    }
  }
}

TEST(CudaIndex, GridsAreWithinTheLimits) {
  EXPECT_EQ(grid_for(1).blocks, 1);
  EXPECT_EQ(grid_for(kThreads).blocks, 1);
  EXPECT_EQ(grid_for(kThreads + 1).blocks, 2);
  EXPECT_EQ(grid_for(int64_t{1} << 50).blocks, kMaxBlocks);
  EXPECT_LE(kMaxBlocks, std::numeric_limits<int32_t>::max());
}

TEST(CudaIndex, PositionsAreRightBeyond32Bits) {
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

// What memory holds at first: a value that results hardly have.
template <typename T>
const T kUntouched = std::numeric_limits<T>::lowest();

// A matrix somewhere in a larger array, the rest of which must not change.
template <typename T>
class Array {
 public:
  Array(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, int64_t offset)
      : rows_(rows),
        cols_(cols),
        values_(
            static_cast<size_t>(offset + rows * row_stride + cols * col_stride + 32),
            kUntouched<T>) {
    // As at::empty on a GPU, and more than 16 bytes need.
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
  Real at(int64_t row, int64_t col) const {
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
  // How many elements of the array hold something else than at first.
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
  void add(Real y, Real exact) {
    difference_ = std::max(difference_, std::isfinite(y) ? std::abs(y - exact) : Real(1e30));
    scale_ = std::max(scale_, std::abs(exact));
  }
  double value() const {
    return static_cast<double>(scale_ > 0 ? difference_ / scale_ : difference_);
  }

 private:
  Real difference_ = 0, scale_ = 0;
};

// Of the inputs; what is written has contiguous columns.
struct Layout {
  const char* name;
  int64_t row_gap;     // between rows
  int64_t col_stride;  // 0: one column for all; rows then lie on each other too
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

// Every thread of a grid of at most `blocks`, so that some have several pieces.
template <typename Body>
void for_each_thread(int64_t count, int64_t blocks, const Body& body) {
  blocks = std::min(blocks, grid_for(count).blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) {
      grid_stride(block, blocks, thread, kThreads, count, body);
    }
  }
}

// ---- the cells, from their formulas -------------------------------------------

// Of one unit: h', c' and what is saved; backward from the latter, dz and the gradient of c. dc is
// the gradient of c', and of the GRU a part of that of h'.
struct Outputs {
  Real h, c;
  std::vector<Real> saved;
};
struct UnitGradients {
  std::vector<Real> dz;
  Real dc;
};

template <typename Page>
struct Formulas;

template <>
struct Formulas<Lltm> {
  static constexpr int kGates = 3;
  static constexpr int kOfX[] = {0, 1, 2}, kOfH[] = {0, 1, 2};

  static Outputs forward(const std::vector<Real>& z, Real c) {
    const Real i = reference::sigmoid(z[0]), o = reference::sigmoid(z[1]);
    const Real g = reference::elu(z[2]), c_next = c + i * g, t = std::tanh(c_next);
    return {o * t, c_next, {i, o, g, t}};
  }
  static UnitGradients backward(const std::vector<Real>& saved, Real dh, Real dc_next) {
    const Real i = saved[0], o = saved[1], g = saved[2], t = saved[3];
    const Real dc = dc_next + dh * o * (1 - t * t);
    return {{dc * g * i * (1 - i), dh * t * o * (1 - o), dc * i * (g > 0 ? 1 : g + 1)}, dc};
  }
};

template <>
struct Formulas<Lstm> {
  static constexpr int kGates = 4;
  static constexpr int kOfX[] = {0, 1, 2, 3}, kOfH[] = {0, 1, 2, 3};

  static Outputs forward(const std::vector<Real>& z, Real c) {
    const Real i = reference::sigmoid(z[0]), f = reference::sigmoid(z[1]);
    const Real g = std::tanh(z[2]), o = reference::sigmoid(z[3]);
    const Real c_next = f * c + i * g, t = std::tanh(c_next);
    return {o * t, c_next, {i, f, g, o, t, c}};
  }
  static UnitGradients backward(const std::vector<Real>& saved, Real dh, Real dc_next) {
    const Real i = saved[0], f = saved[1], g = saved[2], o = saved[3], t = saved[4], c = saved[5];
    const Real dc = dc_next + dh * o * (1 - t * t);
    return {
        {dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)},
        dc * f};
  }
};

// Gates are r, u, n; slots n of x, r, u, n of h.
template <>
struct Formulas<Gru> {
  static constexpr int kGates = 3;
  static constexpr int kOfX[] = {2, 0, 1, -1}, kOfH[] = {-1, 0, 1, 2};

  static Outputs forward(const std::vector<Real>& z, Real h) {
    const Real r = reference::sigmoid(z[1]), u = reference::sigmoid(z[2]);
    const Real n = std::tanh(z[0] + r * z[3]), h_next = (1 - u) * n + u * h;
    return {h_next, h_next, {r, u, n, z[3], h}};
  }
  static UnitGradients backward(const std::vector<Real>& saved, Real dh, Real dh_direct) {
    const Real r = saved[0], u = saved[1], n = saved[2], z_nh = saved[3], h = saved[4];
    const Real d = dh + dh_direct, dz_n = d * (1 - u) * (1 - n * n);
    return {{dz_n, dz_n * z_nh * r * (1 - r), d * (h - n) * u * (1 - u), dz_n * r}, d * u};
  }
};

// ---- the kernels ------------------------------------------------------------

template <typename Types>
class CudaElementwise : public testing::Test {};

template <typename Page_, typename T_, typename D_>
struct Kinds {
  using Page = Page_;
  using T = T_;
  using D = D_;
};
template <typename... Pages>
using EachKindOf = testing::Types<
    Kinds<Pages, double, double>...,
    Kinds<Pages, float, float>...,
    Kinds<Pages, c10::Half, c10::Half>...,
    Kinds<Pages, c10::Half, float>...,
    Kinds<Pages, c10::BFloat16, c10::BFloat16>...,
    Kinds<Pages, c10::BFloat16, float>...>;
using AllKinds = EachKindOf<Lltm, Lstm, Gru>;
TYPED_TEST_SUITE(CudaElementwise, AllKinds);

template <typename Page, int kWidth, typename T>
void check_forward(const Size& size, const Layout& layout, bool in_place, bool optional) {
  using Cell = Formulas<Page>;
  using C = compute_t<T>;
  constexpr int kSlots = Page::kSlots, kSaved = Page::kSaved;
  const int64_t rows = size.rows, hidden = size.hidden;
  std::mt19937 random(1);
  auto gates = input<C>(layout, rows, kSlots * hidden);
  auto bias_ih = input<T>(layout, 1, Cell::kGates * hidden);
  auto bias_hh = input<T>(layout, 1, Cell::kGates * hidden);
  auto c = input<T>(layout, rows, hidden);
  Array<T> h_next(rows, hidden, hidden, 1, 0), h_operand(rows, hidden, hidden, 1, 0);
  Array<T> c_next(rows, hidden, hidden, 1, 0),
      activations(rows, kSaved * hidden, kSaved * hidden, 1, 0);
  gates.fill(random);
  bias_ih.fill(random);
  bias_hh.fill(random);
  c.fill(random);
  if (in_place) c_next.fill(random);

  // The bias of h may be absent alone.
  const bool has_bias_hh = optional && !in_place;
  ForwardArgs<T> args;
  args.rows = rows;
  args.hidden = hidden;
  args.gates = gates;
  if (optional) args.bias_ih = {bias_ih.matrix().data, 0, bias_ih.matrix().col_stride};
  if (has_bias_hh) args.bias_hh = {bias_hh.matrix().data, 0, bias_hh.matrix().col_stride};
  args.c = in_place ? c_next : c;
  args.h_next = h_next.matrix();
  if (optional) args.h_operand = h_operand.matrix();
  args.c_next = c_next.matrix();
  if (optional) args.activations = activations.matrix();

  std::vector<Real> c_before;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < hidden; ++j) c_before.push_back((in_place ? c_next : c).at(r, j));
  }
  const ForwardAccess wide = access_of(args);
  for_each_thread(
      rows * hidden / kWidth, 2, [&](int64_t n) { forward_at<Page, kWidth>(args, wide, n); });

  Error e_h, e_c, e_activations;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < hidden; ++j) {
      std::vector<Real> z;
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        z.push_back(gates.at(r, slot * hidden + j));
        const int64_t of_x = Cell::kOfX[slot], of_h = Cell::kOfH[slot];
        if (optional && of_x >= 0) z.back() += bias_ih.at(0, of_x * hidden + j);
        if (has_bias_hh && of_h >= 0) z.back() += bias_hh.at(0, of_h * hidden + j);
      }
      const Outputs exact = Cell::forward(z, c_before[static_cast<size_t>(r * hidden + j)]);
      e_c.add(c_next.at(r, j), exact.c);
      e_h.add(h_next.at(r, j), exact.h);
      if (!optional) continue;
      EXPECT_EQ(h_operand.at(r, j), h_next.at(r, j));
      for (int64_t k = 0; k < kSaved; ++k) {
        e_activations.add(activations.at(r, k * hidden + j), exact.saved.at(k));
      }
    }
  }
  EXPECT_LE(e_h.value(), 8 * epsilon<T>());
  EXPECT_LE(e_c.value(), 8 * epsilon<T>());
  EXPECT_LE(e_activations.value(), 8 * epsilon<T>());
  EXPECT_EQ(h_next.changed(), rows * hidden);
  EXPECT_EQ(c_next.changed(), rows * hidden);
  EXPECT_EQ(h_operand.changed(), optional ? rows * hidden : 0);
  EXPECT_EQ(activations.changed(), optional ? kSaved * rows * hidden : 0);
}

template <typename Page, int kWidth, typename T, typename D>
void check_backward(const Size& size, const Layout& layout, bool in_place, bool optional) {
  constexpr int kSlots = Page::kSlots, kSaved = Page::kSaved;
  const int64_t rows = size.rows, hidden = size.hidden;
  std::mt19937 random(1);
  auto activations = input<T>(layout, rows, kSaved * hidden);
  auto grad_h = input<T>(layout, rows, hidden);
  auto grad_h_state = input<D>(layout, rows, hidden);
  auto grad_c = input<D>(layout, rows, hidden);
  Array<T> grad_gates(rows, kSlots * hidden, kSlots * hidden, 1, 0);
  Array<D> grad_c_prev(rows, hidden, hidden, 1, 0);
  activations.fill(random);
  grad_h.fill(random);
  grad_h_state.fill(random);
  grad_c.fill(random);
  if (in_place) grad_c_prev.fill(random);

  BackwardArgs<T, D> args;
  args.rows = rows;
  args.hidden = hidden;
  args.activations = activations;
  args.grad_h = grad_h;
  if (optional) args.grad_h_state = grad_h_state;
  if (optional || in_place) args.grad_c = in_place ? grad_c_prev : grad_c;
  args.grad_gates = grad_gates.matrix();
  if (optional || in_place) args.grad_c_prev = grad_c_prev.matrix();

  std::vector<Real> dc_before;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < hidden; ++j) {
      dc_before.push_back(in_place ? grad_c_prev.at(r, j) : optional ? grad_c.at(r, j) : Real(0));
    }
  }
  const BackwardAccess wide = access_of(args);
  for_each_thread(
      rows * hidden / kWidth, 2, [&](int64_t n) { backward_at<Page, kWidth>(args, wide, n); });

  Error e_dz, e_dc;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < hidden; ++j) {
      std::vector<Real> saved;
      for (int64_t k = 0; k < kSaved; ++k) saved.push_back(activations.at(r, k * hidden + j));
      const Real dh = grad_h.at(r, j) + (optional ? grad_h_state.at(r, j) : 0);
      const UnitGradients exact =
          Formulas<Page>::backward(saved, dh, dc_before[static_cast<size_t>(r * hidden + j)]);
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        e_dz.add(grad_gates.at(r, slot * hidden + j), exact.dz.at(slot));
      }
      if (optional || in_place) e_dc.add(grad_c_prev.at(r, j), exact.dc);
    }
  }
  // In the GRU's d (h - n) digits cancel.
  const double roundings = std::is_same_v<Page, Gru> ? 16 : 8;
  EXPECT_LE(e_dz.value(), roundings * epsilon<T>());
  EXPECT_LE(e_dc.value(), roundings * epsilon<D>());
  EXPECT_EQ(grad_gates.changed(), kSlots * rows * hidden);
  EXPECT_EQ(grad_c_prev.changed(), optional || in_place ? rows * hidden : 0);
}

// Every size, layout and choice of arguments; wide where the size allows.
template <typename T, typename Check>
void for_each_case(const Check& check) {
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
          if (!fits_wide<T>(size.hidden)) continue;
          any_wide = true;
          check(size, layout, in_place, optional, /*wide=*/true);
        }
      }
    }
  }
  EXPECT_TRUE(any_wide);
}

TYPED_TEST(CudaElementwise, ForwardMatchesTheFormulasAndWritesNothingElse) {
  using Page = typename TypeParam::Page;
  using T = typename TypeParam::T;
  for_each_case<T>(
      [](const Size& size, const Layout& layout, bool in_place, bool optional, bool wide) {
        wide ? check_forward<Page, kWide<T>, T>(size, layout, in_place, optional)
             : check_forward<Page, 1, T>(size, layout, in_place, optional);
      });
}

TYPED_TEST(CudaElementwise, BackwardMatchesTheFormulasAndWritesNothingElse) {
  using Page = typename TypeParam::Page;
  using T = typename TypeParam::T;
  using D = typename TypeParam::D;
  for_each_case<T>(
      [](const Size& size, const Layout& layout, bool in_place, bool optional, bool wide) {
        wide ? check_backward<Page, kWide<T>, T, D>(size, layout, in_place, optional)
             : check_backward<Page, 1, T, D>(size, layout, in_place, optional);
      });
}

TYPED_TEST(CudaElementwise, OnlyWhatIsAlignedIsReadSixteenBytesAtATime) {
  using T = typename TypeParam::T;
  const auto wide = [](const Layout& layout) {
    return is_wide(Matrix<const T>(input<T>(layout, 3, 16)));
  };
  EXPECT_TRUE(wide(kLayouts[0]));
  EXPECT_TRUE(wide(kLayouts[1]));
  for (const size_t k : {2, 3, 4, 5}) EXPECT_FALSE(wide(kLayouts[k])) << kLayouts[k].name;
}

// ---- cells that users have written ---------------------------------------------

// The values of a program's registers of one unit: those of a row and of columns that lie H apart.
template <typename A>
void append(
    std::vector<double>& to, const A& array, int64_t row, int64_t col, int64_t hidden, int count) {
  for (int k = 0; k < count; ++k)
    to.push_back(static_cast<double>(array.at(row, col + k * hidden)));
}

template <typename T>
Matrix<const T> as_row(Array<T>& array) {
  return {array.matrix().data, 0, array.matrix().col_stride};
}

// Zero where absent.
template <typename T>
double element(const Matrix<const T>& matrix, int64_t row, int64_t col) {
  return matrix.data == nullptr ? 0 : static_cast<double>(matrix.row(row)[col * matrix.col_stride]);
}

template <typename T>
std::vector<double> forward_inputs(
    const CellInfo& cell, const ForwardArgs<T>& args, int64_t row, int64_t unit) {
  std::vector<double> in;
  for (int k = 0; k < cell.slots; ++k) {
    double z = element(args.gates, row, unit + k * args.hidden);
    if (cell.x.contains(k)) z += element(args.bias_ih, 0, unit + cell.x_blocks[k] * args.hidden);
    if (cell.h.contains(k)) z += element(args.bias_hh, 0, unit + cell.h_blocks[k] * args.hidden);
    in.push_back(z);
  }
  for (int k = 0; k < cell.state_columns(); ++k) {
    in.push_back(element(args.c, row, unit + k * args.hidden));
  }
  for (int k = 0; k < cell.parameters; ++k) {
    in.push_back(element(args.parameters, 0, unit + k * args.hidden));
  }
  return in;
}

template <typename Page, int kWidth, typename T>
void check_forward_program(
    const CellInfo& cell,
    const Size& size,
    const Layout& layout,
    bool in_place,
    bool optional,
    std::vector<Error>& errors) {
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
      const std::vector<double> in = forward_inputs(cell, args, r, j);
      exact.push_back(lltm_test::run_program(cell.programs->forward, in));
    }
  }
  const ForwardAccess wide = access_of(args);
  for_each_thread(rows * hidden / kWidth, 2, [&](int64_t n) {
    forward_program_at<Page, kWidth>(args, wide, n);
  });

  errors.resize(exact[0].size());
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
}

template <typename Page, int kWidth, typename T, typename D>
void check_backward_program(
    const CellInfo& cell,
    const Size& size,
    const Layout& layout,
    bool in_place,
    bool optional,
    std::vector<Error>& errors) {
  const int64_t rows = size.rows, hidden = size.hidden;
  const int states = cell.state_columns(), own = cell.reads_h ? 1 : 0;
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
      std::vector<double> in, of_states;
      append(in, activations, r, j, hidden, cell.saved);
      append(in, parameters, 0, j, hidden, cell.parameters);
      append(in, grad_h, r, j, hidden, 1);
      if (optional) in.back() += static_cast<double>(grad_h_state.at(r, j));
      append(of_states, in_place ? grad_c_prev : grad_c, r, j, hidden, states);
      if (args.grad_c.data == nullptr) of_states.assign(states, 0);
      if (own == 1) in.back() += of_states[0];
      in.insert(in.end(), of_states.begin() + own, of_states.end());
      exact.push_back(lltm_test::run_program(cell.programs->backward, in));
    }
  }
  const BackwardAccess wide = access_of(args);
  for_each_thread(rows * hidden / kWidth, 2, [&](int64_t n) {
    backward_program_at<Page, kWidth>(args, wide, n);
  });

  errors.resize(exact[0].size());
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
}

template <typename Types>
class CudaProgram : public testing::Test {};
TYPED_TEST_SUITE(CudaProgram, EachKindOf<Lltm>);  // its page stands for nothing

// body(cell, page, errors) for the text of every cell. Errors of an output are those of all cases
// together: a case may have one value only, which cancels.
template <typename T, typename Body>
void for_each_own_cell(const Body& body) {
  for (const std::string& text : lltm_test::kCellTexts) {
    const CellInfo& cell = *find_cell(text);
    SCOPED_TRACE(cell.title());
    std::vector<Error> errors;
    lltm_test::visit_own_page(cell, [&](auto page) { body(cell, page, errors); });
    for (size_t k = 0; k < errors.size(); ++k) {
      EXPECT_LE(errors[k].value(), 16 * epsilon<T>()) << "output " << k;
    }
  }
}

TYPED_TEST(CudaProgram, ForwardMatchesTheInstructionsAndWritesNothingElse) {
  using T = typename TypeParam::T;
  for_each_own_cell<T>([]<typename Page>(const CellInfo& cell, Page, std::vector<Error>& errors) {
    for_each_case<T>(
        [&](const Size& size, const Layout& layout, bool in_place, bool optional, bool wide) {
          wide ? check_forward_program<Page, kWide<T>, T>(
                     cell, size, layout, in_place, optional, errors)
               : check_forward_program<Page, 1, T>(cell, size, layout, in_place, optional, errors);
        });
  });
}

TYPED_TEST(CudaProgram, BackwardMatchesTheInstructionsAndWritesNothingElse) {
  using T = typename TypeParam::T;
  using D = typename TypeParam::D;
  for_each_own_cell<T>([]<typename Page>(const CellInfo& cell, Page, std::vector<Error>& errors) {
    for_each_case<T>(
        [&](const Size& size, const Layout& layout, bool in_place, bool optional, bool wide) {
          wide ? check_backward_program<Page, kWide<T>, T, D>(
                     cell, size, layout, in_place, optional, errors)
               : check_backward_program<Page, 1, T, D>(
                     cell, size, layout, in_place, optional, errors);
        });
  });
}

}  // namespace
}  // namespace lltm::cuda
