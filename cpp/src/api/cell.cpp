// lltm::Cell: reads and writes serialized cells.
#include "api/cell.h"

#include "cell/registry.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <ios>
#include <stdexcept>
#include <utility>

namespace lltm {
namespace {

// Returns gate names in the order of Cell::gates: first the blocks of weight_ih, which the
// pre-activations have in another order.
std::vector<std::string> gates_of(const CellText& cell) {
  std::vector<std::string> gates = cell.gates;
  for (int slot = cell.info.x.begin; slot < cell.info.x.end; ++slot) {
    gates[cell.info.x_blocks[slot]] = cell.gates[slot];
  }
  return gates;
}

// Error messages begin with `where`.
std::shared_ptr<const CellData> read(const std::string& where, std::string_view text) {
  try {
    const CellText& cell = custom_cell(text);
    return std::make_shared<const CellData>(CellData{cell, gates_of(cell)});
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, where, ": ", error.what());
  }
}

}  // namespace

Cell::Cell(std::shared_ptr<const CellData> data) : data_(std::move(data)) {}

Cell Cell::parse(std::string_view text) {
  return Cell(read("lltm::Cell::parse", text));
}

Cell Cell::load(const std::string& path) {
  const std::string where = "lltm::Cell::load: ";
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text(CellText::kMostBytes + 1, '\0');  // exceeds the parser's limit by 1
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  TORCH_CHECK_VALUE(
      file.is_open() && !file.bad(), where, "cannot read ", path, ": ", std::strerror(errno));
  text.resize(file.gcount());
  return Cell(read(where + path, text));
}

void Cell::save(const std::string& path) const {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file << text();
  file.close();
  TORCH_CHECK_VALUE(
      file.good(), "lltm::Cell::save: cannot write ", path, ": ", std::strerror(errno));
}

const std::string& Cell::name() const {
  return data_->cell.name;
}
const std::string& Cell::text() const {
  return data_->cell.text;
}
const std::vector<std::string>& Cell::gates() const {
  return data_->gates;
}
const std::vector<std::string>& Cell::states() const {
  return data_->cell.states;
}
const std::vector<std::string>& Cell::parameters() const {
  return data_->cell.parameters;
}

}  // namespace lltm
