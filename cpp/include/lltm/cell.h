// Custom cells. A custom cell is written and traced in Python (lltm.cell), which saves it as a
// serialized cell. The C++ modules run a serialized cell without Python.
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

/// A custom cell: an immutable handle that is cheap to copy. Several threads may use it.
class LLTM_API Cell {
 public:
  /// Reads a serialized cell from a file that save() or, in Python, Cell.save has written. Throws
  /// c10::ValueError, which names the file, if it cannot be read or is not a valid cell. The file
  /// may come from an untrusted source.
  static Cell load(const std::string& path);

  /// Parses a serialized cell, as text() returns it. Throws c10::ValueError, which names the line,
  /// if it is not valid.
  static Cell parse(std::string_view text);

  /// Writes the serialized cell to a file. Throws c10::ValueError, which names the file, if it
  /// cannot be written.
  void save(const std::string& path) const;

  /// Name of the cell.
  const std::string& name() const;
  /// The serialized cell, which lltm::step, lltm::sequence and operators accept as `cell`.
  const std::string& text() const;

  /// Gate names: first the gates with rows in weight_ih, in that order, then the gates that depend
  /// only on h.
  const std::vector<std::string>& gates() const;
  /// Names of the states in addition to h.
  const std::vector<std::string>& states() const;
  /// Names of the cell's parameters: learned, one value per hidden unit, shape (H), or one, (1).
  const std::vector<std::string>& parameters() const;

 private:
  explicit Cell(std::shared_ptr<const CellData> data);
  friend const CellData& data_of(const Cell& cell);

  std::shared_ptr<const CellData> data_;
};

}  // namespace lltm
