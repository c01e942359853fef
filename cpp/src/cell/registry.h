// Finds cells by built-in name (cells.h) or serialized cell, which is parsed once per process.
#pragma once

#include "cell/cell.h"

#include <string_view>

namespace lltm {

struct CellText;
// Never deleted. Throws std::invalid_argument.
const CellText& custom_cell(std::string_view text);

// With programs, also of a built-in cell. Null if unknown. Throws if a serialized cell is invalid.
const CellInfo* find_cell(std::string_view name);

class CellName {
 public:
  CellName(std::string_view name) : name_(name), cell_(find_cell(name)) {}
  CellName(const CellInfo& cell) : name_(cell.name), cell_(&cell) {}  // as found

  std::string_view name() const { return name_; }
  // Null if unknown; the checks report it.
  const CellInfo* find() const { return cell_; }
  const CellInfo* operator->() const { return cell_; }
  const CellInfo& operator*() const { return *cell_; }

 private:
  std::string_view name_;
  const CellInfo* cell_;
};

// Throws if unknown; the message begins with `op`.
const CellInfo& get_cell(const char* op, const CellName& name);

}  // namespace lltm
