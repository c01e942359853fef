// A recurrent cell that a user has written. It is written and traced in Python (lltm.cell), which
// saves it as a text; here modules run that text, between their GEMMs, without Python.
//
//     const lltm::Cell cifg = lltm::Cell::load("cifg.cell");  // cifg.save("cifg.cell") in Python
//     lltm::CustomLayer layer(lltm::CustomLayerOptions(cifg, 32, 128));  // lltm/nn.h
#pragma once

#include <lltm/export.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lltm {

struct CellData;

/// A cell that a user has written: a handle of what its text says, cheap to copy and never changed.
/// Several threads may use it.
class LLTM_API Cell {
 public:
  /// Reads a file that save or, in Python, Cell.save has written. Throws c10::ValueError, naming
  /// the file, if it cannot be read or is not the text of a cell. The file need not be trusted.
  static Cell load(const std::string& path);

  /// The cell of a text. Throws c10::ValueError, naming the line, if it is not the text of a cell.
  static Cell parse(std::string_view text);

  /// Writes the text. Throws c10::ValueError, naming the file, if it cannot be written.
  void save(const std::string& path) const;

  const std::string& name() const;
  const std::string& text() const;

  /// Names of the gates, in the order of the blocks of rows of weight_ih; behind them those that h
  /// alone has a part in.
  const std::vector<std::string>& gates() const;
  /// Names of the states besides h: 0 to 3.
  const std::vector<std::string>& states() const;
  /// Names of the cell's own parameters, learned, one number a unit.
  const std::vector<std::string>& parameters() const;

 private:
  explicit Cell(std::shared_ptr<const CellData> data);
  friend const CellData& data_of(const Cell& cell);

  std::shared_ptr<const CellData> data_;
};

}  // namespace lltm
