// The states of a call as users pass and get them, h first, and as the operators take them; the
// ones that a sequence begins with where none are given.
#pragma once

#include "cell/cell.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <vector>

namespace lltm {

// h and, for the operators, the other states side by side; undefined where there are none.
struct JoinedState {
  at::Tensor h, c;
};
JoinedState join(const CellInfo& cell, at::TensorList states);
std::vector<at::Tensor> split(const CellInfo& cell, at::Tensor h, at::Tensor c);

// Zeros, or the initial values that the cell gives its states: (*rows, H) each.
JoinedState first_state(
    const CellInfo& cell, const at::Tensor& input, std::vector<c10::SymInt> rows, int64_t hidden);

// Checks the number of states. Messages call them h, c, ... with the suffix.
void check_state_count(
    const CellInfo& cell, const char* where, at::TensorList states, const char* suffix);

// Checks the number and the shapes of states: h (*rows, size_of_h), the others (*rows, hidden). If
// the cell has several states besides h, which are joined, they need the input's dtype and device.
void check_states(
    const CellInfo& cell,
    const char* where,
    const at::Tensor& input,
    at::TensorList states,
    const char* suffix,
    std::vector<c10::SymInt> rows,
    int64_t size_of_h,
    int64_t hidden);

// Checks states that are joined: the shape of h, the input's dtype and device.
void check_joined_states(
    const CellInfo& cell,
    const char* where,
    const at::Tensor& input,
    at::TensorList states,
    const char* suffix);

template <typename Change>
std::vector<at::Tensor> map_states(at::TensorList states, const Change& change) {
  std::vector<at::Tensor> changed;
  changed.reserve(states.size());
  for (const at::Tensor& state : states) changed.push_back(change(state));
  return changed;
}

// states.select(0, k) of (L*D, B, H), and state.unsqueeze(0) of a new tensor (B, H) without other
// references: without the dispatcher if the call is unobserved.
at::Tensor select_state(const at::Tensor& states, int64_t k, bool unobserved);
at::Tensor unsqueeze_state(at::Tensor state, bool unobserved);

}  // namespace lltm
