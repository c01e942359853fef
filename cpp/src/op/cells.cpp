#include "cell/cells.h"

#include "op/operator_args.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace lltm {

const Cell* find_cell(std::string_view name) {
  for (const Cell* cell : kCells) {
    if (name == cell->name) return cell;
  }
  return nullptr;
}

const Cell& get_cell(const char* op, std::string_view name) {
  if (const Cell* const cell = find_cell(name)) return *cell;
  std::ostringstream names;
  for (const Cell* known : kCells) names << (known == kCells[0] ? "" : ", ") << known->name;
  TORCH_CHECK_VALUE(false, op, ": expected cell to be one of ", names.str(), ", got '", name, "'");
}

}  // namespace lltm
