// A call of an element-wise kernel may begin and end inside rows: its results are a part of those
// of a call for all elements, and other memory is unchanged. test_cells.cpp and test_engines.cpp
// compare values with an oracle. Links only the kernels.
#include "cell/cells.h"
#include "kernel_test.h"

#include <cstring>
#include <type_traits>

namespace lltm::cpu {
namespace {

constexpr std::int64_t kRows = 3;

// Untouched, or random. With gaps between rows.
template <typename T>
struct Values {
  explicit Values(std::int64_t columns)
      : stride(std::is_same_v<T, Int8> ? int8_row_stride(columns) : columns + 3),
        data(kRows * stride) {
    std::memset(static_cast<void*>(data.data()), 0x5A, bytes());
  }
  Values(std::int64_t columns, unsigned seed) : Values(columns) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (T& value : data) value = narrow<T>(uniform(generator));
  }
  Matrix<T> matrix() { return {data.data(), stride}; }
  Matrix<const T> matrix() const { return {data.data(), stride}; }
  std::size_t bytes() const { return data.size() * sizeof(T); }

  std::int64_t stride;
  std::vector<T> data;
};

// Elements [begin, end) of kRows rows, in row order. Blocks of `hidden` columns are `step` apart.
struct Part {
  std::int64_t hidden, begin, end;

  template <typename T>
  void expect(const Values<T>& part, const Values<T>& whole, int blocks, std::int64_t step) const {
    Values<T> expected = whole;
    std::memset(static_cast<void*>(expected.data.data()), 0x5A, expected.bytes());
    for (std::int64_t k = begin; k < end; ++k) {
      for (int block = 0; block < blocks; ++block) {
        const std::int64_t at = k / hidden * whole.stride + k % hidden + block * step;
        expected.data[at] = whole.data[at];
      }
    }
    ASSERT_EQ(std::memcmp(part.data.data(), expected.data.data(), expected.bytes()), 0);
  }
};

template <typename T, typename G, typename Definition>
void check_forward(const Kernels& kernels, const Part& part) {
  constexpr int kSlots = Definition::kSlots, kSaved = Definition::kSaved;
  // Pre-activations are further apart than the block width.
  const std::int64_t hidden = part.hidden, layer = hidden + 5;
  const Values<compute_t<T>> gates(kSlots * hidden, 1), bias(kSlots * layer, 2);
  const Values<T> c(hidden, 3), factor(hidden, 4);
  struct Results {
    Values<T> h_next, c_next, saved;
    Values<G> operand;
  };
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    Results results = {
        Values<T>(hidden), Values<T>(hidden), Values<T>(kSaved * layer), Values<G>(hidden)};
    bool out_of_range = false;
    ForwardArgs<T, G> args;
    args.cell = &Definition::kCell;
    args.hidden = hidden;
    args.layer_hidden = layer;
    args.z = gates.matrix();
    args.z_stride = hidden;
    args.bias = {bias.matrix().data, 0};
    args.c = c.matrix();
    args.recurrent_mask = factor.matrix();
    args.out_of_range = {&out_of_range, 0, 0};
    args.h_next = results.h_next.matrix();
    args.c_next = results.c_next.matrix();
    args.saved = results.saved.matrix();
    args.h_operand = results.operand.matrix();
    elementwise_of<T, G>(kernels.cells[Cells::native<Definition>()]).forward(args, begin, end);
    EXPECT_FALSE(out_of_range);
    return results;
  };
  const Results whole = run(0, kRows * hidden), some = run(part.begin, part.end);
  part.expect(some.h_next, whole.h_next, 1, 0);
  part.expect(some.c_next, whole.c_next, 1, 0);
  part.expect(some.saved, whole.saved, kSaved, layer);
  part.expect(some.operand, whole.operand, 1, 0);
}

template <typename T, typename G, typename Definition>
void check_backward(const Kernels& kernels, const Part& part) {
  constexpr int kSlots = Definition::kSlots, kSaved = Definition::kSaved;
  const std::int64_t hidden = part.hidden, layer = hidden + 5;
  const Values<T> saved(kSaved * layer, 1), grad_h(hidden, 2);
  const Values<compute_t<T>> grad_h_state(hidden, 3), grad_c(hidden, 4);
  struct Results {
    Values<source_t<G>> grad_gates;
    Values<compute_t<T>> grad_c_prev;
    Values<G> operand;
  };
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    Results results = {
        Values<source_t<G>>(kSlots * layer),
        Values<compute_t<T>>(hidden),
        Values<G>(kSlots * hidden)};
    bool out_of_range = false;
    BackwardArgs<T, G> args;
    args.cell = &Definition::kCell;
    args.hidden = hidden;
    args.layer_hidden = layer;
    args.saved = saved.matrix();
    args.grad_h = grad_h.matrix();
    args.grad_h_state = grad_h_state.matrix();
    args.grad_c = grad_c.matrix();
    args.dz = results.grad_gates.matrix();
    args.grad_c_prev = results.grad_c_prev.matrix();
    args.operand = results.operand.matrix();
    args.operand_stride = hidden;
    args.out_of_range = &out_of_range;
    elementwise_of<T, G>(kernels.cells[Cells::native<Definition>()]).backward(args, begin, end);
    EXPECT_FALSE(out_of_range);
    return results;
  };
  const Results whole = run(0, kRows * hidden), some = run(part.begin, part.end);
  part.expect(some.grad_gates, whole.grad_gates, kSlots, layer);
  part.expect(some.grad_c_prev, whole.grad_c_prev, 1, 0);
  part.expect(some.operand, whole.operand, kSlots, hidden);
}

class ElementwiseKernels : public KernelTest {
 protected:
  // By dtype and format of the next GEMM's operand.
  template <typename T, typename G>
  void check() const {
    SCOPED_TRACE(testing::Message() << sizeof(T) << " and " << sizeof(G) << " bytes");
    Cells::for_each([&]<typename Definition>(Definition) {
      for (const std::int64_t hidden : {1, 7, 16, 17, 64, 100}) {
        SCOPED_TRACE(testing::Message() << Definition::kCell.name << ", hidden " << hidden);
        const Part part = {hidden, hidden / 2, kRows * hidden - hidden / 3};
        if constexpr (!std::is_same_v<G, Int8> || Definition::kCell.bounded) {
          check_forward<T, G, Definition>(*kernels_, part);
        }
        if constexpr (!std::is_same_v<G, Int8>) check_backward<T, G, Definition>(*kernels_, part);
      }
    });
  }
};
LLTM_EACH_ISA(ElementwiseKernels, "default", "avx2", "avx512");

TEST_P(ElementwiseKernels, APartOfTheElementsEqualsThatOfAllAndWritesNothingElse) {
  check<double, double>();
  check<float, float>();
  check<Half, float>();
  check<BFloat16, float>();
  check<BFloat16, BFloat16>();
  check<float, BFloat16>();
  check<float, Int8>();
  check<Half, Int8>();
  check<BFloat16, Int8>();
}

}  // namespace
}  // namespace lltm::cpu
