// Checks of module arguments that the operators do not see. `where` is the module's class.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <vector>

namespace lltm {

// Largest size for which products with other sizes and the element size do not overflow.
constexpr int64_t kLargestSize = int64_t{1} << 27;
constexpr int64_t kMostLayers = int64_t{1} << 16;

void check_size(const char* where, const char* name, int64_t value, int64_t largest);
void check_probability(const char* where, const char* name, double value);

void check_tensor(const char* where, const char* name, const at::Tensor& tensor);
void check_shape(
    const char* where,
    const char* name,
    const at::Tensor& tensor,
    const std::vector<c10::SymInt>& expected);

bool autocasts(const at::Tensor& tensor);

// Checks device and, unless autocast applies (`casts`), dtype against `other`, which messages call
// `whose`.
void check_kind(
    const char* where,
    const char* name,
    const at::Tensor& tensor,
    const at::Tensor& other,
    const char* whose,
    bool casts);
// The operators might report a parameter instead, but the caller has passed only the input.
void check_kind(const char* where, const at::Tensor& input, const at::Tensor& parameter);
// Checks a tensor for concatenation. at::cat would promote another dtype and, under autocast, also
// integers.
void check_kind_of_concatenated(
    const char* where, const char* name, const at::Tensor& tensor, const at::Tensor& input);

}  // namespace lltm
