// The checks of modules, of what the operators do not see. `where` is the module's class.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <vector>

namespace lltm {

// Sizes up to here can be multiplied with each other and with the size of an element.
constexpr int64_t kLargestSize = int64_t{1} << 27;

void check_size(const char* where, const char* name, int64_t value, int64_t largest);
void check_probability(const char* where, const char* name, double value);

// A strided tensor; and of this shape.
void check_tensor(const char* where, const char* name, const at::Tensor& tensor);
void check_shape(
    const char* where,
    const char* name,
    const at::Tensor& tensor,
    const std::vector<c10::SymInt>& expected);

// True if autocast changes tensors on the device of this one.
bool autocasts(const at::Tensor& tensor);

// On the device and, unless autocast `casts`, of the dtype of another tensor, `whose` in messages.
void check_kind(
    const char* where,
    const char* name,
    const at::Tensor& tensor,
    const at::Tensor& other,
    const char* whose,
    bool casts);
// The input, of the kind of the parameters: the operators could blame a parameter, but the caller
// has passed only the input.
void check_kind(const char* where, const at::Tensor& input, const at::Tensor& parameter);
// A tensor that is concatenated with others: at::cat would promote another dtype, and under
// autocast integers too.
void check_joined_kind(
    const char* where, const char* name, const at::Tensor& tensor, const at::Tensor& input);

}  // namespace lltm
