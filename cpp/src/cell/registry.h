// Finds cells by the name that operators receive: a built-in name (cells.h), or a serialized custom
// cell. A serialized cell is parsed once per process.
#pragma once

#include "cell/cell.h"

#include <string_view>

namespace lltm {

// Returns the cell with this name, or null. Throws if a serialized cell is invalid.
const CellInfo* find_cell(std::string_view name);

// Cell argument of a call.
class CellName {
 public:
  CellName(std::string_view name) : name_(name), cell_(find_cell(name)) {}
  CellName(const CellInfo& cell) : name_(cell.name), cell_(&cell) {}

  std::string_view name() const { return name_; }
  // Null if no cell has this name, which the checks report.
  const CellInfo* find() const { return cell_; }
  const CellInfo* operator->() const { return cell_; }
  const CellInfo& operator*() const { return *cell_; }

 private:
  std::string_view name_;
  const CellInfo* cell_;
};

// Returns the cell. Throws if there is none; the message begins with `op`.
const CellInfo& get_cell(const char* op, const CellName& name);

// Returns the programs of a cell. For a built-in cell, they are recorded from its definition.
const CellPrograms& programs_of(const CellInfo& cell);

}  // namespace lltm
