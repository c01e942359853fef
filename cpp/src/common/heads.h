// Recurrent weights with heads, (heads, Gh * H/heads, H/heads): consecutive units share a head and
// read only its part of h. choose_engine.cpp chooses between products per head, which
// packed_weights.cpp and blocked_backward.cpp pack, and a matrix with zeros.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/diag_embed.h>

namespace lltm {

inline bool has_heads(const at::Tensor& weight_hh) {
  return weight_hh.defined() && weight_hh.dim() == 3;
}
inline int64_t heads_of(const at::Tensor& weight_hh) {
  return has_heads(weight_hh) ? weight_hh.size(0) : 1;
}
// The rows of all heads, (heads * Gh * H/heads, H/heads).
inline at::Tensor rows_of_heads(const at::Tensor& weight_hh) {
  return has_heads(weight_hh) ? weight_hh.flatten(0, 1) : weight_hh;
}
// (Gh * H, H), with zeros between heads.
inline at::Tensor without_heads(const at::Tensor& weight_hh) {
  if (!has_heads(weight_hh)) return weight_hh;
  const c10::SymInt heads = weight_hh.sym_size(0), units = weight_hh.sym_size(2);
  const c10::SymInt gates = weight_hh.sym_size(1) / units;
  const at::Tensor last =
      weight_hh.reshape_symint({heads, gates, units, units}).permute({1, 2, 3, 0});
  return at::diag_embed(last, 0, 1, 3).reshape_symint({gates * heads * units, heads * units});
}
// The gradient of weight_hh from that of without_heads(weight_hh).
inline at::Tensor with_heads(const at::Tensor& gradient, const at::Tensor& weight_hh) {
  if (!gradient.defined() || !has_heads(weight_hh)) return gradient;
  const c10::SymInt heads = weight_hh.sym_size(0), units = weight_hh.sym_size(2);
  const c10::SymInt gates = weight_hh.sym_size(1) / units;
  return gradient.reshape_symint({gates, heads, units, heads, units})
      .diagonal(0, 1, 3)
      .permute({3, 0, 1, 2})
      .reshape_symint({heads, gates * units, units});
}

}  // namespace lltm
