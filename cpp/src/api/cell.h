// Private data of lltm::Cell, which the modules use.
#pragma once

#include "cell/cell.h"

#include <lltm/cell.h>

#include <string>
#include <vector>

namespace lltm {

struct CellData {
  std::string name, text;
  std::vector<std::string> gates, states, parameters;
  std::vector<double> initial_parameters;
  const CellInfo& info;  // never deleted
};

inline const CellData& data_of(const Cell& cell) {
  return *cell.data_;
}

}  // namespace lltm
