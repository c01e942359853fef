// Converts states between the users' form (a list, h first) and the operators' form; omitted
// initial states.
#pragma once

#include "cell/cell.h"

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace lltm {

// h, and the other states concatenated, or undefined if there are none.
struct ConcatenatedState {
  at::Tensor h, c;
};
ConcatenatedState concatenate(const CellInfo& cell, at::TensorList states);

// at::cat, which autocast leaves to the operators: its own cat raises an error for the 16-bit dtype
// that is not autocast's.
at::Tensor cat_without_autocast(at::TensorList tensors, int64_t dim);
std::vector<at::Tensor> split(const CellInfo& cell, at::Tensor h, at::Tensor c);

using StateShape = c10::SmallVector<c10::SymInt, 3>;

// Zeros, or the cell's initial values: (*rows, H) each.
ConcatenatedState first_state(
    const CellInfo& cell, const at::Tensor& input, StateShape rows, int64_t hidden);

// Checks number and shapes: h (*rows, size_of_h), the others (*rows, hidden). States that are
// concatenated (several in addition to h, or a projected h) must also have the input's dtype and
// device. Messages call the states h, c, ... with the suffix.
void check_states(
    const CellInfo& cell,
    const char* where,
    const at::Tensor& input,
    at::TensorList states,
    const char* suffix,
    StateShape rows,
    int64_t size_of_h,
    int64_t hidden);

// Concatenates the states for an operator, which checks all that remain separate. Concatenated
// states must have equal shapes and the input's dtype and device.
ConcatenatedState concatenate_checked(
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

// states.select(0, k) for (L*D, B, H), and state.unsqueeze(0) for a new tensor (B, H) without other
// references; without the dispatcher if the call is unobserved.
at::Tensor select_state(const at::Tensor& states, int64_t k, bool unobserved);
at::Tensor unsqueeze_state(at::Tensor state, bool unobserved);

}  // namespace lltm
