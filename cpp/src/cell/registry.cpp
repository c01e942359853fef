#include "cell/registry.h"

#include "cell/cells.h"
#include "cell/program_text.h"
#include "cell/record_page.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lltm {
namespace {

// FNV-1a: the same on every machine, since packed weights are saved.
uint64_t hash(std::string_view text) {
  uint64_t sum = 0xcbf29ce484222325;
  for (const char c : text) sum = (sum ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return sum;
}

// A cell that a user has written, and what its descriptor points into.
class UserCell {
 public:
  explicit UserCell(std::string_view text) : text_(text), parsed_(parse_cell(text)) {
    layer_class_ = parsed_->name + ".Layer";
    step_class_ = parsed_->name + ".Cell";
    for (const auto& [name, initial] : parsed_->states) {
      cell_.state_names[initial_states_.size()] = name.c_str();
      initial_states_.push_back(initial);
    }
    for (const auto& parameter : parsed_->parameters) {
      cell_.parameter_names[cell_.parameters++] = parameter.name.c_str();
    }
    programs_ = {
        parsed_->programs.forward,
        parsed_->programs.backward,
        parsed_->name.c_str(),
        hash(text_),
        initial_states_.data()};
    cell_.name = text_.c_str();
    cell_.layer_class = layer_class_.c_str();
    cell_.step_class = step_class_.c_str();
    cell_.id = kProgramId;
    cell_.slots = static_cast<int>(parsed_->gates.size());
    cell_.saved = static_cast<int>(parsed_->saved.size());
    cell_.x = parsed_->x;
    cell_.h = parsed_->h;
    std::copy_n(parsed_->x_blocks, CellInfo::kMostSlots, cell_.x_blocks);
    std::copy_n(parsed_->h_blocks, CellInfo::kMostSlots, cell_.h_blocks);
    cell_.states = static_cast<int>(parsed_->states.size());
    cell_.reads_h = parsed_->reads_h;
    cell_.forgets = parsed_->forgets;
    cell_.bounded = parsed_->bounded;
    cell_.own_gradient = parsed_->own_gradient;
    cell_.programs = &programs_;
  }
  UserCell(const UserCell&) = delete;
  UserCell& operator=(const UserCell&) = delete;

  const std::string& text() const { return text_; }
  const CellInfo& cell() const { return cell_; }

 private:
  const std::string text_;
  const std::unique_ptr<const CellText> parsed_;
  std::string layer_class_, step_class_;
  std::vector<double> initial_states_;
  CellPrograms programs_ = {};
  CellInfo cell_ = {};
};

// The cells of all texts so far, for as long as the process lasts: graphs and packed weights refer
// to them.
const CellInfo& user_cell(std::string_view text) {
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  using Cells =
      std::unordered_map<std::string, std::unique_ptr<const UserCell>, Hash, std::equal_to<>>;
  // A call finds its cell several times, and the next call as a rule the same: to compare the text
  // takes a tenth of the time that its hash takes.
  thread_local const UserCell* last = nullptr;
  if (last != nullptr && last->text() == text) return last->cell();
  static std::mutex mutex;
  static Cells& cells = *new Cells;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = cells.find(text);
  if (found == cells.end()) {
    found = cells.emplace(text, std::make_unique<const UserCell>(text)).first;
  }
  last = found->second.get();
  return last->cell();
}

}  // namespace

const CellInfo* find_cell(std::string_view name) {
  for (const CellInfo* cell : kCells) {
    if (name == cell->name) return cell;
  }
  if (!name.starts_with("lltm-cell")) return nullptr;
  try {
    return &user_cell(name);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, "lltm::", error.what());
  }
}

const CellInfo& get_cell(const char* op, const CellName& name) {
  if (name.find() != nullptr) return *name;
  std::ostringstream names;
  for (const CellInfo* known : kCells) names << (known == kCells[0] ? "" : ", ") << known->name;
  TORCH_CHECK_VALUE(
      false,
      op,
      ": expected cell to be one of ",
      names.str(),
      " or the text of a cell's program, got '",
      name.name().substr(0, 60),
      "'");
}

const CellPrograms& programs_of(const CellInfo& cell) {
  if (cell.programs != nullptr) return *cell.programs;
  return visit_cell(cell, [](auto page) -> const CellPrograms& {
    static const RecordedPage& of_page = *new RecordedPage(page);
    return of_page.programs();
  });
}

}  // namespace lltm
