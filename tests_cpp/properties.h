// Properties of every form of a step or sequence, such as operators, prepacked weights, modules,
// CUDA engines. To instantiate:
//
//     LLTM_EACH_CASE(Sequence, Properties, form, kDtypes);
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
  Function baseline;  // accuracy baseline
  std::string_view cell = "lltm";
  bool step = false;        // one step: no T, packed input or direction
  bool has_reverse = true;  // for sequences
  // Values and gradients must meet the accuracy bound; otherwise values only `tolerance` plus
  // `roundings` eps.
  bool differentiable = true;
  double tolerance = 0;
  double roundings = 0;
  // Sizes with several blocks, and argument positions to change, all in the last entry.
  Sizes sizes = {3, 9, 17, 19};
  std::vector<std::vector<size_t>> positions = kPositions;
  // Active while a test runs.
  std::shared_ptr<void> (*setting)() = nullptr;
};
void PrintTo(const Form& form, std::ostream* stream);

// In float64, PyTorch is the oracle. int8 has no float64.
constexpr std::array<at::ScalarType, 3> kDtypesBelowOracle = {at::kFloat, at::kBFloat16, at::kHalf};

constexpr std::array<at::ScalarType, 2> kSixteenBits = {at::kBFloat16, at::kHalf};

// A form per cell. Only the first cell tests strides of each argument.
std::vector<Form> forms_of_cells(
    Form form, bool weights = true, const std::vector<const char*>& cells = kCells);

// The setting of a form.
template <bool kEnabled>
std::shared_ptr<void> persistent() {
  return std::make_shared<PersistentSetting>(kEnabled);
}

// Form, dtype, reverse.
using Case = std::tuple<Form, at::ScalarType, bool>;

// Rotated: each part of the tests (tests.cmake) has every dtype.
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

#define LLTM_EACH_CASE(prefix, suite, forms, dtypes) \
  INSTANTIATE_TEST_SUITE_P(prefix, suite, each_case(forms, dtypes), case_name)

// The mask for every other seed.
Problem with_resets_and_mask(const Problem& problem);

class FormTest : public testing::TestWithParam<Case> {
 protected:
  FormTest();

  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  Problem dense(const Sizes& sizes, bool bias = true) const;
  Problem packed(const std::vector<int64_t>& lengths, int64_t I, int64_t H) const;
  std::vector<Problem> problems() const;

  void check(const Problem& problem, const OutputGradients& gradients = kRandom) const;
  void check(
      const Function& baseline,
      const Problem& problem,
      const OutputGradients& gradients = kRandom) const;

  const Form form_;

 private:
  std::shared_ptr<void> setting_;
};

class Properties : public FormTest {};          // all forms
class SequenceProperties : public FormTest {};  // sequences
class GradientProperties : public FormTest {};  // differentiable forms
class HostProperties : public FormTest {};      // forms with arguments on the host

class AutogradProperties : public testing::TestWithParam<Form> {};

}  // namespace lltm_test
