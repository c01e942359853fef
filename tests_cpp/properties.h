// What has to hold in whatever form a step or a sequence is computed: by the operators, with
// checkpoints, with prepacked weights, by a module, by the CUDA engines. properties.cpp says each
// property once. A program names its forms, and with each gets the tests:
//
//     INSTANTIATE_TEST_SUITE_P(Sequence, Properties, each_case(form, kDtypes), case_name);
//
// What is said of one form only stands in that form's file.
#pragma once

#include "testing.h"

#include <array>
#include <memory>
#include <tuple>
#include <vector>

namespace lltm_test {

struct Form {
  const char* name;
  Function run;
  Function baseline;  // what it is judged by
  std::string_view cell = "lltm";
  bool step = false;        // one step: no T, no packed rows, no direction
  bool has_reverse = true;  // of a sequence
  bool any_size = true;     // else I and H have to be positive
  // Values and gradients are tested, by the statement of accuracy; else values alone, up to
  // `tolerance` and so many eps of the dtype.
  bool differentiable = true;
  double tolerance = 0;
  double roundings = 0;
  // Of a problem that is cut up in some way, and which arguments are changed at a time: the last
  // are all that may be.
  Sizes sizes = {3, 9, 17, 19};
  std::vector<std::vector<size_t>> positions = kPositions;
  // Holds while a test runs, for what is switched on.
  std::shared_ptr<void> (*setting)() = nullptr;
};
void PrintTo(const Form& form, std::ostream* stream);

// Problems at which every form is compared with the oracle. Those of a packed sequence have the
// hidden sizes in turn.
inline const std::vector<Sizes> kSomeSizes = {
    {1, 1, 1, 1}, {5, 3, 5, 7}, {7, 2, 3, 16}, {3, 17, 9, 33}};
inline const std::vector<std::vector<int64_t>> kSomeLengths = {
    {5}, {3, 3, 3}, {7, 6, 5, 4, 3, 2, 1}, {9, 1, 1, 1}, {4, 4, 4, 4, 2, 2, 1}};
constexpr std::array<int64_t, 2> kSomeHiddenSizes = {7, 16};

// Of weights in int8.
constexpr std::array<at::ScalarType, 3> kDtypesOfInt8 = {at::kFloat, at::kBFloat16, at::kHalf};

// A form, a dtype, and whether in reverse.
using Case = std::tuple<Form, at::ScalarType, bool>;

// Of every four that follow each other, whatever the form, the dtypes differ, and so do they from
// form to form and in reverse: a fourth of the tests (CMakeLists.txt) has some of each.
template <typename Dtypes>
auto each_case(const std::vector<Form>& forms, const Dtypes& dtypes) {
  std::vector<Case> cases;
  for (size_t form = 0; form < forms.size(); ++form) {
    for (const bool reverse : {false, true}) {
      if (reverse && (forms[form].step || !forms[form].has_reverse)) continue;
      for (size_t k = 0; k < std::size(dtypes); ++k) {
        const size_t dtype = (k + form + (reverse ? 2 : 0)) % std::size(dtypes);
        cases.emplace_back(forms[form], dtypes[dtype], reverse);
      }
    }
  }
  return testing::ValuesIn(cases);
}
template <typename Dtypes>
auto each_case(const Form& form, const Dtypes& dtypes) {
  return each_case(std::vector{form}, dtypes);
}
std::string case_name(const testing::TestParamInfo<Case>& info);
// With the form's name, where there are several.
std::string form_case_name(const testing::TestParamInfo<Case>& info);

class FormTest : public testing::TestWithParam<Case> {
 protected:
  FormTest();

  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  Problem dense(const Sizes& sizes, bool bias = true) const;
  Problem packed(const std::vector<int64_t>& lengths, int64_t I, int64_t H) const;
  // Of the form's sizes, as far as it takes them: dense and packed.
  std::vector<Problem> problems() const;

  // Against the baseline, or another one.
  void check(const Problem& problem, const OutputGradients& gradients = kRandom) const;
  void check(
      const Function& baseline,
      const Problem& problem,
      const OutputGradients& gradients = kRandom) const;

  const Form form_;

 private:
  std::shared_ptr<void> setting_;
};

class Properties : public FormTest {};          // of every form
class SequenceProperties : public FormTest {};  // of those that are not one step
class GradientProperties : public FormTest {};  // of those that are differentiable
class HostProperties : public FormTest {};      // of those whose arguments stay where they are

// Of derivatives of any order by autograd.
enum class Kind { kDense, kWithoutBias, kPacked };
using DerivativeCase = std::tuple<Form, Kind, bool>;
std::string derivative_name(const testing::TestParamInfo<DerivativeCase>& info);

class DerivativeProperties : public testing::TestWithParam<DerivativeCase> {
 protected:
  DerivativeProperties();
  Scalar function() const { return weighted_sum(form_.run, arguments_); }
  Tensors point() const { return weighted_sum_point(form_.run, arguments_, 2); }

  const Form form_;
  Arguments arguments_;  // float64
};

// Of what autograd keeps.
class AutogradProperties : public testing::TestWithParam<Form> {};

}  // namespace lltm_test
