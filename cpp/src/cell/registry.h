// Cells by the names that operators are called with: built-in ones (cells.h) and custom ones, whose
// name is the text of a program. A text is parsed once in a process.
#pragma once

#include "cell/cell.h"

#include <string_view>

namespace lltm {

// The cell of this name, or null. A text that is no program throws.
const CellInfo* find_cell(std::string_view name);

// The cell of a call, by its name.
class CellName {
 public:
  CellName(std::string_view name) : name_(name), cell_(find_cell(name)) {}
  CellName(const CellInfo& cell) : name_(cell.name), cell_(&cell) {}

  std::string_view name() const { return name_; }
  // Null where there is none of this name, which the checks report.
  const CellInfo* find() const { return cell_; }
  const CellInfo* operator->() const { return cell_; }
  const CellInfo& operator*() const { return *cell_; }

 private:
  std::string_view name_;
  const CellInfo* cell_;
};

// The cell. Throws where there is none; the message begins with `op`.
const CellInfo& get_cell(const char* op, const CellName& name);

// The programs of a cell; those of a built-in one are recorded from its page.
const CellPrograms& programs_of(const CellInfo& cell);

}  // namespace lltm
