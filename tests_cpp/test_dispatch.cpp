// Results and errors of operators in C++. Python tests cover other devices, autocast and
// messages (test_opcheck.py, test_properties.py, test_errors.py).
#include "testing.h"

#include <ATen/ATen.h>

namespace lltm_test {
namespace {

TEST(Dispatch, ACellWithoutCReturnsAnEmptyOne) {
  for (const char* const name : kCells) {
    const Arguments a = cell_problem({1, 4, 3, 5}, at::kFloat, 1, /*bias=*/true, name);
    const Arguments s = sequence_problem({2, 4, 3, 5}, at::kFloat, 1, /*bias=*/true, name);
    const std::vector<int64_t> of_c = a.c.defined() ? a.c.sizes().vec() : std::vector<int64_t>{0};
    EXPECT_EQ(call("lltm::step", step_stack(a))[1].toTensor().sizes(), of_c) << name;
    EXPECT_EQ(call("lltm::sequence", sequence_stack(s))[2].toTensor().sizes(), of_c) << name;
  }
}

// Without storage, so that the first ATen operation fails.
TEST(Dispatch, ADeviceWithoutKernelsWarnsOnce) {
  const auto on_xpu = [](const at::Tensor& like) {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::DispatchKeySet(c10::DispatchKey::XPU), like.dtype(), c10::Device(c10::kXPU, 0));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
    return tensor;
  };
  Arguments a = sequence_problem({2, 4, 3, 5}, at::kFloat, 1, /*bias=*/false, "lstm");
  for (at::Tensor* tensor : {&a.input, &a.h, &a.c, &a.weights}) *tensor = on_xpu(*tensor);
  a.weight_hh = on_xpu(*a.weight_hh);
  Warnings warnings;
  for (int call = 0; call < 2; ++call) EXPECT_THROW(sequence(a), c10::Error);
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_NE(warnings.texts[0].find("on XPU, the cell lstm runs as"), std::string::npos);
  EXPECT_NE(warnings.texts[0].find("(this build has no kernels for the"), std::string::npos);
}

}  // namespace
}  // namespace lltm_test
