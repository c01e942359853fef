// A tensor as the pages of cells (cell.h) see a number. ATen's own operators would compute `1 - x`
// in place, which a graph that is being traced must not have.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>

namespace lltm::composite {

struct Value {
  at::Tensor tensor;
};

inline Value operator+(const Value& a, const Value& b) {
  return {at::add(a.tensor, b.tensor)};
}
inline Value operator+(const Value& a, int b) {
  return {at::add(a.tensor, b)};
}
inline Value operator-(const Value& a, const Value& b) {
  return {at::sub(a.tensor, b.tensor)};
}
inline Value operator-(int a, const Value& b) {
  return {at::rsub(b.tensor, a)};
}
inline Value operator*(const Value& a, const Value& b) {
  return {at::mul(a.tensor, b.tensor)};
}
inline at::Tensor operator>(const Value& a, int b) {
  return at::gt(a.tensor, b);
}

inline Value sigmoid(const Value& x) {
  return {at::sigmoid(x.tensor)};
}
inline Value tanh(const Value& x) {
  return {at::tanh(x.tensor)};
}
inline Value elu(const Value& x) {
  return {at::elu(x.tensor)};
}
// A tensor of ones, since Core ATen selects between tensors only; no page selects another number.
inline Value where(const at::Tensor& condition, int one, const Value& b) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(one == 1);
  (void)one;
  return {at::where(condition, at::ones_like(b.tensor), b.tensor)};
}

}  // namespace lltm::composite
