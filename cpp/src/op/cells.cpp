#include "cell/cells.h"

#include "op/operator_args.h"

namespace lltm {

const Cell* find_cell(std::string_view name) {
  for (const Cell* cell : kCells) {
    if (name == cell->name) return cell;
  }
  return nullptr;
}

}  // namespace lltm
