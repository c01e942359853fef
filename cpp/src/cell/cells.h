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
  static constexpr int kCount = sizeof...(Definitions);
  static constexpr const CellInfo* kInfos[] = {&Definitions::kCell...};

  static constexpr bool ids_are_places() {
    int place = 0;
    return ((Definitions::kCell.id == place++) && ...);
  }

  template <typename Body>
  static constexpr void for_each(const Body& body) {
    (body(Definitions{}), ...);
  }
};

using Cells = CellList<Lltm, Lstm, Gru, RnnTanh, RnnRelu>;
static_assert(Cells::ids_are_places(), "the id of a cell is its place in Cells");

constexpr const auto& kCells = Cells::kInfos;
constexpr int kProgramId = Cells::kCount;
constexpr bool is_built_in(const CellInfo& cell) {
  return cell.id != kProgramId;
}

template <typename Body, typename Definition, typename... Others>
decltype(auto) visit_one_of(
    CellList<Definition, Others...>, const CellInfo& cell, const Body& body) {
  if constexpr (sizeof...(Others) > 0) {
    if (cell.id != Definition::kCell.id) return visit_one_of(CellList<Others...>(), cell, body);
  }
  return body(Definition{});
}

template <typename Body>
decltype(auto) visit_cell(const CellInfo& cell, const Body& body) {
  return visit_one_of(Cells(), cell, body);
}

}  // namespace
}  // namespace lltm
