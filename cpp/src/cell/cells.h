// The cells of the library. To add one: its page, and a line in each of the two places below.
#pragma once

#include "cell/gru.h"
#include "cell/lltm.h"
#include "cell/lstm.h"

namespace lltm {
namespace {

// By their ids.
constexpr const Cell* kCells[] = {&Lltm::kCell, &Lstm::kCell, &Gru::kCell};

// Calls body with a value of the type of the cell's page.
template <typename Body>
decltype(auto) visit_cell(const Cell& cell, const Body& body) {
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
