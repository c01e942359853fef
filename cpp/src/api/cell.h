// Private data of lltm::Cell, which the modules use.
#pragma once

#include "cell/program_text.h"

#include <lltm/cell.h>

#include <string>
#include <vector>

namespace lltm {

struct CellData {
  const CellText& cell;            // never deleted
  std::vector<std::string> gates;  // as in Cell::gates
};

inline const CellData& data_of(const Cell& cell) {
  return *cell.data_;
}

}  // namespace lltm
