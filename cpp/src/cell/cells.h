// The cells of the library. To add one: its page, and a line in each of the two places below.
#pragma once

#include "cell/gru.h"
#include "cell/lltm.h"
#include "cell/lstm.h"

namespace lltm {
namespace {

// By their ids.
constexpr const CellInfo* kCells[] = {&Lltm::kCell, &Lstm::kCell, &Gru::kCell};
// The id of those that users have written.
constexpr int kProgramId = 3;

// Calls body with a value of the type of the cell's page.
template <typename Body>
decltype(auto) visit_cell(const CellInfo& cell, const Body& body) {
  switch (cell.id) {
    case Lstm::kCell.id:
      return body(Lstm{});
    case Gru::kCell.id:
      return body(Gru{});
    default:
      return body(Lltm{});
  }
}

}  // namespace
}  // namespace lltm
