#include "properties.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>
#include <utility>

namespace lltm_test {

void PrintTo(const Form& form, std::ostream* stream) {
  *stream << form.name;
}

std::vector<Form> forms_of_cells(Form form, bool weights, const std::vector<const char*>& cells) {
  std::vector<Form> forms;
  for (const char* const cell : cells) {
    form.name = cell;
    form.cell = cell;
    form.positions = positions_of(cell, weights);
    if (!forms.empty()) form.positions = {form.positions.back()};
    forms.push_back(form);
  }
  return forms;
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const auto& [form, dtype, reverse] = info.param;
  return form.name + ('_' + name(dtype)) + (reverse ? "_reverse" : "");
}

Problem with_resets_and_mask(const Problem& problem) {
  return [=](uint64_t seed) {
    Arguments arguments = problem(seed);
    arguments.reset = random_reset(arguments, seed + 1);
    if (seed % 2 == 0) arguments.recurrent_mask = random_mask(arguments, seed + 2);
    return arguments;
  };
}

FormTest::FormTest() : form_(std::get<0>(GetParam())) {
  if (form_.setting != nullptr) setting_ = form_.setting();
}

Problem FormTest::dense(const Sizes& sizes, bool bias) const {
  return [=, this](uint64_t seed) {
    if (form_.step) return cell_problem(sizes, dtype(), seed, bias, form_.cell);
    Arguments arguments = sequence_problem(sizes, dtype(), seed, bias, form_.cell);
    arguments.reverse = std::get<2>(GetParam());
    return arguments;
  };
}

Problem FormTest::packed(const std::vector<int64_t>& lengths, int64_t I, int64_t H) const {
  return [=, this](uint64_t seed) {
    Arguments arguments = packed_problem(lengths, I, H, dtype(), seed, form_.cell);
    arguments.reverse = std::get<2>(GetParam());
    return arguments;
  };
}

std::vector<Problem> FormTest::problems() const {
  std::vector<Problem> problems = {dense(form_.sizes)};
  if (!form_.step) problems.push_back(packed({4, 4, 3, 1}, form_.sizes.I, form_.sizes.H));
  return problems;
}

void FormTest::check(const Problem& problem, const OutputGradients& gradients) const {
  check(form_.baseline, problem, gradients);
}

void FormTest::check(
    const Function& baseline, const Problem& problem, const OutputGradients& gradients) const {
  if (form_.differentiable) {
    lltm_test::check(form_.run, baseline, problem, gradients);
    return;
  }
  const at::NoGradGuard no_grad;
  const double tolerance = form_.tolerance + form_.roundings * epsilon(dtype());
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const Arguments arguments = problem(seed);
    const Tensors ours = form_.run(arguments), expected = baseline(arguments);
    ASSERT_EQ(ours.size(), expected.size());
    for (size_t k = 0; k < ours.size(); ++k) {
      ASSERT_EQ(ours[k].sizes(), expected[k].sizes()) << "output " << k;
      ASSERT_EQ(ours[k].scalar_type(), expected[k].scalar_type()) << "output " << k;
      EXPECT_TRUE(ours[k].is_contiguous()) << "output " << k;
      EXPECT_TRUE(at::allclose(ours[k], expected[k], tolerance, tolerance))
          << "output " << k << ", seed " << seed;
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Properties);

TEST_P(Properties, MatchesItsBaseline) {
  for (const Sizes& sizes :
       {Sizes{1, 1, 1, 1}, Sizes{5, 3, 5, 7}, Sizes{7, 2, 3, 16}, Sizes{3, 17, 9, 33}}) {
    check(dense(sizes));
  }
}

TEST_P(Properties, MatchesItsBaselineWithoutBias) {
  check(dense({5, 3, 5, 7}, /*bias=*/false));
}

TEST_P(Properties, EmptySizesGiveEmptyResults) {
  for (const Sizes& sizes :
       {Sizes{4, 0, 2, 5},
        Sizes{4, 3, 0, 5},
        Sizes{4, 3, 2, 0},
        Sizes{0, 3, 2, 5},
        Sizes{0, 0, 2, 5}}) {
    if (form_.step && sizes.T == 0) continue;
    SCOPED_TRACE(testing::PrintToString(sizes));
    check(dense(sizes));
    if (sizes.B > 0 || !form_.differentiable) continue;
    const Arguments arguments = dense(sizes)(1);
    const Tensors grad_outputs = random_gradients(arguments);
    const Evaluation ours = evaluate(form_.run, arguments, grad_outputs);
    for (size_t k = arguments.c.defined() ? 3 : 2; k < ours.gradients.size(); ++k) {
      EXPECT_TRUE(identical(ours.gradients[k], at::zeros_like(differentiable(arguments)[k])))
          << argument_names(arguments)[k];
    }
  }
}

TEST_P(Properties, ArgumentsMayBeStridedInAnyWay) {
  for (const Layout& layout : layouts()) {
    for (const auto& positions : form_.positions) {
      SCOPED_TRACE(testing::Message() << layout.name << ": " << testing::PrintToString(positions));
      const Problem problem = dense(form_.sizes);
      check(contiguous(form_.run), [&](uint64_t seed) {
        return laid_out(problem(seed), layout, positions);
      });
    }
  }
}

namespace {

void expect_equally_finite(const Tensors& ours, const Tensors& expected, const char* what) {
  for (size_t k = 0; k < ours.size(); ++k) {
    EXPECT_TRUE(identical(ours[k].isnan(), expected[k].isnan())) << what << ' ' << k;
    EXPECT_TRUE(identical(ours[k].isinf(), expected[k].isinf())) << what << ' ' << k;
  }
}

}  // namespace

// A NaN or infinity affects the same results as in PyTorch: one batch element from one step on; in
// large batches, an infinity can change every partial product. In double, because PyTorch's 16-bit
// GEMMs may spread a NaN to the row above.
TEST_P(Properties, NonFiniteArgumentsPropagateAsInTheReference) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Function plain = form_.step ? eager_cell : eager_sequence;
  for (const Sizes& sizes : {Sizes{4, 5, 3, 8}, Sizes{4, 40, 3, 40}}) {
    const Arguments finite = dense(sizes)(1);
    const Tensors tensors = differentiable(finite);
    for (const size_t k : form_.positions.back()) {
      for (const double value : {std::nan(""), infinity, -infinity}) {
        // An infinity times a weight rounded to 0 is NaN.
        if (form_.tolerance > 0 && std::isinf(value)) continue;
        SCOPED_TRACE(
            testing::Message() << value << " in " << argument_names(finite)[k] << ", " << sizes.B);
        Tensors changed = tensors;
        changed[k] = tensors[k].clone();
        changed[k].view(-1)[changed[k].numel() / 2].fill_(value);
        const at::NoGradGuard no_grad;
        expect_equally_finite(
            form_.run(with(finite, changed)), plain(with(finite, in_double(changed))), "output");
      }
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SequenceProperties);

TEST_P(SequenceProperties, PackedSequencesMatchTheBaseline) {
  check(packed({5}, 3, 7));
  check(packed({3, 3, 3}, 3, 16));
  check(packed({7, 6, 5, 4, 3, 2, 1}, 3, 7));
  check(packed({9, 1, 1, 1}, 3, 16));
  check(packed({4, 4, 4, 4, 2, 2, 1}, 3, 7));
}

TEST_P(SequenceProperties, EmptyBatchesGiveEmptyResults) {
  check(packed({}, 2, 5));
}

TEST_P(SequenceProperties, NoStepsGiveTheInitialStates) {
  const Arguments arguments = dense({0, 3, 2, 5})(1);
  const Tensors outputs = form_.run(arguments);
  EXPECT_EQ(outputs[0].sizes(), at::IntArrayRef({0, 3, 5}));
  EXPECT_TRUE(identical(outputs[1], arguments.h));
  EXPECT_FALSE(outputs[1].is_alias_of(arguments.h));
  if (!arguments.c.defined()) return;
  EXPECT_TRUE(identical(outputs[2], arguments.c));
  EXPECT_FALSE(outputs[2].is_alias_of(arguments.c));
}

TEST_P(SequenceProperties, StepsWithoutSequencesChangeNothing) {
  const Problem problem = packed({5, 3, 2, 2}, 3, 8);
  const Problem longer = [&](uint64_t seed) {
    Arguments arguments = problem(seed);
    arguments.batch_sizes = at::cat({*arguments.batch_sizes, at::zeros({6}, at::kLong)});
    return arguments;
  };
  check(longer);
}

TEST_P(SequenceProperties, PackedArgumentsMayBeStridedInAnyWay) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const Problem one_row = dense({3, 1, 18, 22}), rows = packed({4, 4, 3, 1}, 17, 24);
    check(contiguous(form_.run), [&](uint64_t seed) {
      return laid_out(one_row(seed), layout, {1, 2});
    });
    check(contiguous(form_.run), [&](uint64_t seed) {
      return laid_out(rows(seed), layout, form_.positions.back());
    });
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GradientProperties);

// output.sum().backward() passes one element with strides of 0.
TEST_P(GradientProperties, OfTheOutputsMayBeStridedInAnyWay) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const OutputGradients gradients = [&](const Arguments& arguments, uint64_t seed) {
      return laid_out(random_gradients(arguments, seed), layout);
    };
    for (const Problem& problem : problems()) check(problem, gradients);
  }
}

TEST_P(GradientProperties, OfUnusedResultsAreZero) {
  const unsigned all = (1U << like_outputs(dense({1, 1, 1, 1})(1)).size()) - 1;
  for (unsigned used = 1; used < all; ++used) {
    SCOPED_TRACE(testing::Message() << "used " << used);
    const OutputGradients gradients = [&](const Arguments& arguments, uint64_t seed) {
      Tensors gradients = random_gradients(arguments, seed);
      for (size_t k = 0; k < gradients.size(); ++k) {
        if ((used >> k & 1) == 0) gradients[k] = at::Tensor();
      }
      return gradients;
    };
    for (const Problem& problem : problems()) check(problem, gradients);
  }
}

TEST_P(GradientProperties, AnySubsetOfArgumentsMayRequireGrad) {
  const Arguments arguments = dense({4, 5, 3, 7})(1);
  const Tensors grad_outputs = random_gradients(arguments);
  const Evaluation all = evaluate(form_.run, arguments, grad_outputs);
  const Evaluation expected = expect(arguments, grad_outputs);
  const Tensors tensors = differentiable(arguments);
  const std::vector<const char*> names = argument_names(arguments);
  for (size_t subset = 1; subset < size_t{1} << tensors.size(); ++subset) {
    SCOPED_TRACE(testing::Message() << "subset " << subset);
    Tensors leaves;
    for (size_t k = 0; k < tensors.size(); ++k) {
      leaves.push_back(tensors[k].detach().requires_grad_((subset >> k & 1) != 0));
    }
    torch::autograd::backward(form_.run(with(arguments, leaves)), grad_outputs);
    for (size_t k = 0; k < leaves.size(); ++k) {
      ASSERT_EQ(leaves[k].grad().defined(), (subset >> k & 1) != 0) << names[k];
      if (leaves[k].grad().defined()) {
        EXPECT_TRUE(is_accurate(leaves[k].grad(), all.gradients[k], expected.gradients[k]))
            << names[k];
      }
    }
  }
}

// Beyond ±88, float32 exp overflows. float16 uses at most ±200, because its GEMMs would overflow.
TEST_P(GradientProperties, OfLargePreActivationsSaturate) {
  for (const double scale : {100.0, dtype() == at::kHalf ? 200.0 : 1e4}) {
    SCOPED_TRACE(testing::Message() << "scale " << scale);
    const Problem problem = dense({3, 11, 3, 17});
    check([&](uint64_t seed) {
      Arguments arguments = problem(seed);
      // Sums of integers are exact in any order; exp would multiply a rounding error of z by |z|.
      arguments.weights = at::ones_like(arguments.weights);
      if (arguments.weight_hh)
        arguments.weight_hh = at::zeros_like(*arguments.weight_hh);
      else
        arguments.weights.slice(1, 0, 17).zero_();
      if (arguments.bias) arguments.bias = arguments.bias->round();
      if (arguments.bias_hh) arguments.bias_hh = arguments.bias_hh->round();
      const at::Tensor& input = arguments.input;
      arguments.input = at::linspace(-scale, scale, input.numel(), at::kDouble)
                            .view(input.sizes())
                            .div(3)
                            .round()
                            .to(dtype());
      return arguments;
    });
  }
}

TEST_P(GradientProperties, OfNaNsEqualThoseOfTheReference) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Function plain = form_.step ? eager_cell : eager_sequence;
  const auto expect_equal = [&](const Arguments& arguments, const Tensors& grad_outputs) {
    const Evaluation ours = evaluate(form_.run, arguments, grad_outputs);
    const Evaluation expected = evaluate(
        plain, with(arguments, in_double(differentiable(arguments))), in_double(grad_outputs));
    for (size_t k = 0; k < ours.gradients.size(); ++k) {
      EXPECT_TRUE(identical(ours.gradients[k].isnan(), expected.gradients[k].isnan()))
          << "gradient of " << argument_names(arguments)[k];
    }
  };
  for (const Sizes& sizes : {Sizes{4, 5, 3, 8}, Sizes{4, 40, 3, 40}}) {
    const Arguments finite = dense(sizes)(1);
    const Tensors tensors = differentiable(finite), grads = random_gradients(finite);
    for (const double value : {std::nan(""), infinity, -infinity}) {
      SCOPED_TRACE(testing::Message() << value << ", " << sizes.B << " rows");
      for (size_t k = 0; k < tensors.size(); ++k) {
        SCOPED_TRACE(argument_names(finite)[k]);
        Tensors changed = tensors;
        changed[k] = tensors[k].clone();
        changed[k].view(-1)[changed[k].numel() / 2].fill_(value);
        expect_equal(with(finite, changed), grads);
      }
      // PyTorch's GRU computes d - d u = inf - inf; lltm uses d (1 - u).
      if (form_.cell == "gru" && std::isinf(value)) continue;
      Tensors changed = grads;
      changed[0] = grads[0].clone();
      changed[0].view(-1)[changed[0].numel() / 2].fill_(value);
      expect_equal(finite, changed);
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(HostProperties);

TEST_P(HostProperties, ResultsAreNewTensorsAndArgumentsAreUnchanged) {
  const auto copies = [](const Tensors& tensors) {
    Tensors result;
    for (const at::Tensor& tensor : tensors) result.push_back(tensor.clone());
    return result;
  };
  for (const Problem& problem : problems()) {
    const Arguments arguments = problem(1);
    const Tensors grad_outputs = random_gradients(arguments);
    const Tensors before = copies(differentiable(arguments)), kept = copies(grad_outputs);
    const Evaluation ours = evaluate(form_.run, arguments, grad_outputs);
    EXPECT_TRUE(identical(differentiable(arguments), before));
    EXPECT_TRUE(identical(grad_outputs, kept));
    for (size_t k = 0; k < ours.outputs.size(); ++k) {
      for (const at::Tensor& argument : differentiable(arguments)) {
        EXPECT_FALSE(ours.outputs[k].is_alias_of(argument));
      }
      for (size_t other = k + 1; other < ours.outputs.size(); ++other) {
        EXPECT_FALSE(ours.outputs[k].is_alias_of(ours.outputs[other]));
      }
    }
  }
}

namespace {

// Up to three matrix rows, 2^31 elements apart. Only written pages use physical memory.
class FarApart {
 public:
  explicit FarApart(at::ScalarType dtype)
      : bytes_(kElements * c10::elementSize(dtype)),
        memory_(mmap(
            nullptr,
            bytes_,
            PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
            -1,
            0)) {
    TORCH_CHECK(memory_ != MAP_FAILED, "cannot reserve ", bytes_, " bytes of address space");
    elements_ = at::from_blob(memory_, {kElements}, at::TensorOptions(dtype));
  }
  ~FarApart() { munmap(memory_, bytes_); }
  FarApart(const FarApart&) = delete;
  FarApart& operator=(const FarApart&) = delete;

  // Starts at `offset` in the first row.
  at::Tensor copy(const at::Tensor& matrix, int64_t offset) const {
    return elements_.as_strided(matrix.sizes(), {kRowDistance, 1}, offset).copy_(matrix);
  }

 private:
  static constexpr int64_t kRowDistance = int64_t{1} << 31, kElements = 2 * kRowDistance + 64;

  size_t bytes_;
  void* memory_;
  at::Tensor elements_;
};

}  // namespace

TEST_P(HostProperties, StridesBeyond32BitsAreSupported) {
  const FarApart far_apart(dtype());
  std::vector<Problem> problems = {dense({1, 2, 3, 8})};
  if (!form_.step) problems = {packed({1, 1}, 3, 8), packed({2}, 3, 8)};
  for (const Problem& problem : problems) {
    check(
        [&](uint64_t seed) {
          Arguments arguments = problem(seed);
          arguments.input = far_apart.copy(arguments.input, 0);
          arguments.h = far_apart.copy(arguments.h, 8);
          if (arguments.c.defined()) arguments.c = far_apart.copy(arguments.c, 16);
          return arguments;
        },
        [&](const Arguments& arguments, uint64_t seed) {
          Tensors gradients = random_gradients(arguments, seed);
          int64_t offset = 24;
          for (at::Tensor& gradient : gradients) {
            gradient = far_apart.copy(gradient, std::exchange(offset, offset + 8));
          }
          return gradients;
        });
  }
}

TEST_P(HostProperties, StridesOfWeightsBeyond32BitsAreSupported) {
  const FarApart far_apart(dtype());
  const Problem problem = dense({2, 5, 3, 1});
  check([&](uint64_t seed) {
    Arguments arguments = problem(seed);
    arguments.weights = far_apart.copy(arguments.weights, 0);
    return arguments;
  });
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AutogradProperties);

namespace {

Arguments problem_of(const Form& form) {
  const Sizes sizes = {3, 2, 3, 4};
  return form.step ? cell_problem(sizes, at::kFloat, 1, /*bias=*/true, form.cell)
                   : sequence_problem(sizes, at::kFloat, 1, /*bias=*/true, form.cell);
}

}  // namespace

// Without c, which is saved only in some calls.
TEST_P(AutogradProperties, ArgumentsChangedInPlaceAreRejected) {
  const std::vector<const char*> names = argument_names(problem_of(GetParam()));
  for (size_t changed = 0; changed < names.size(); ++changed) {
    const std::string_view name = names[changed];
    if (name == "c" || name.starts_with("bias")) continue;
    const Arguments leaves = requiring_grad(problem_of(GetParam()));
    Tensors copies;
    for (const at::Tensor& leaf : differentiable(leaves)) copies.push_back(leaf.clone());
    const Tensors outputs = GetParam().run(with(leaves, copies));
    copies[changed].add_(1);
    at::Tensor sum = at::zeros({});
    for (const at::Tensor& output : outputs) sum = sum + output.sum();
    EXPECT_THROW(sum.backward(), c10::Error) << name;
  }
}

TEST_P(AutogradProperties, ASecondBackwardThroughAFreedGraphIsRejected) {
  const at::Tensor loss = GetParam().run(requiring_grad(problem_of(GetParam())))[0].sum();
  loss.backward();
  EXPECT_THROW(loss.backward(), c10::Error);
}

}  // namespace lltm_test
