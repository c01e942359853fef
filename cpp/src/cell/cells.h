// To add a built-in cell, include its definition and append it to Cells.
#pragma once

#include "cell/gru.h"
#include "cell/lltm.h"
#include "cell/lstm.h"
#include "cell/rnn.h"

namespace lltm {
namespace {

template <typename... Pages>
struct CellList {
  static constexpr int kCount = sizeof...(Pages);
  static constexpr const CellInfo* kInfos[] = {&Pages::kCell...};

  static constexpr bool ids_are_places() {
    int place = 0;
    return ((Pages::kCell.id == place++) && ...);
  }

  template <typename Body>
  static constexpr void for_each(const Body& body) {
    (body(Pages{}), ...);
  }
};

using Cells = CellList<Lltm, Lstm, Gru, RnnTanh, RnnRelu>;
static_assert(Cells::ids_are_places(), "the id of a cell is its place in Cells");

constexpr const auto& kCells = Cells::kInfos;
constexpr int kProgramId = Cells::kCount;

template <typename Body, typename Page, typename... Others>
decltype(auto) visit_one_of(CellList<Page, Others...>, const CellInfo& cell, const Body& body) {
  if constexpr (sizeof...(Others) > 0) {
    if (cell.id != Page::kCell.id) return visit_one_of(CellList<Others...>(), cell, body);
  }
  return body(Page{});
}

template <typename Body>
decltype(auto) visit_cell(const CellInfo& cell, const Body& body) {
  return visit_one_of(Cells(), cell, body);
}

}  // namespace
}  // namespace lltm
