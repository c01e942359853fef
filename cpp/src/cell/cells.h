// To add a built-in cell, include its definition and append it to Cells.
#pragma once

#include "cell/gru.h"
#include "cell/lltm.h"
#include "cell/lstm.h"
#include "cell/rnn.h"

namespace lltm {
namespace {

template <typename... Definitions>
struct CellList {
  static constexpr const CellInfo* kInfos[] = {&Definitions::kCell...};
  // Of the kernels of each definition, and at 0 of those that run programs.
  static constexpr int kKernels = 1 + sizeof...(Definitions);

  template <typename Definition>
  static constexpr int native() {
    int k = 0;
    const bool found = ((++k, &Definition::kCell == &Definitions::kCell) || ...);
    return found ? k : 0;
  }

  template <typename Body>
  static constexpr void for_each(const Body& body) {
    (body(Definitions{}), ...);
  }
};

using Cells = CellList<Lltm, Lstm, Gru, RnnTanh, RnnRelu>;

constexpr const auto& kCells = Cells::kInfos;
constexpr bool is_built_in(const CellInfo& cell) {
  return cell.native != 0;
}

}  // namespace
}  // namespace lltm
