#include "cell/registry.h"

#include "cell/cells.h"
#include "cell/program_text.h"
#include "cell/record_definition.h"

#include <c10/util/Exception.h>

#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace lltm {
namespace {

// A definition's descriptor with its programs.
struct BuiltIn {
  template <typename Definition>
  explicit BuiltIn(Definition definition) : recorded(definition), info(Definition::kCell) {
    info.programs = &recorded.programs();
    info.native = Cells::native<Definition>();
  }

  RecordedDefinition recorded;
  CellInfo info;
};

const std::vector<const CellInfo*>& built_ins() {
  static const auto& cells = *new std::vector<const CellInfo*>([] {
    std::vector<const CellInfo*> all;
    Cells::for_each([&](auto definition) { all.push_back(&(new BuiltIn(definition))->info); });
    return all;
  }());
  return cells;
}

}  // namespace

// Never deleted: graphs and packed weights refer to cells.
const CellText& custom_cell(std::string_view text) {
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  using Cells =
      std::unordered_map<std::string, std::unique_ptr<const CellText>, Hash, std::equal_to<>>;
  // A call looks up its cell several times. Comparing the text takes a tenth of the time of hashing
  // it.
  thread_local const CellText* last = nullptr;
  if (last != nullptr && last->text == text) return *last;
  static std::mutex mutex;
  static Cells& cells = *new Cells;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = cells.find(text);
  if (found == cells.end()) {
    found = cells.emplace(text, parse_cell(text)).first;
  }
  last = found->second.get();
  return *last;
}

const CellInfo* find_cell(std::string_view name) {
  for (const CellInfo* const cell : built_ins()) {
    if (name == cell->name) return cell;
  }
  if (!name.starts_with("lltm-cell")) return nullptr;
  try {
    return &custom_cell(name).info;
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
      " or a serialized cell, got '",
      name.name().substr(0, 60),
      "'");
}

}  // namespace lltm
