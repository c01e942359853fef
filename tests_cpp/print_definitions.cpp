// Prints built-in cells and the cells of cell_program.h in C++, for host tests: their stages, and
// of cells with one stage the definitions.
#include "cell/cells.h"
#include "cell/registry.h"
#include "cell_program.h"
#include "cuda/kernel/program_source.h"

#include <iostream>
#include <string>
#include <vector>

int main() {
  std::cout << "#pragma once\n\n#include \"cell/math.h\"\n"
               "#include \"cuda/kernel/elementwise_kernels.h\"\n"
               "#include \"cuda/kernel/program_source.h\"\n\n#include <stdexcept>\n\n";
  std::vector<std::string> names = lltm_test::kCellTexts;
  for (const lltm::CellInfo* const cell : lltm::kCells) names.emplace_back(cell->name);
  std::string definitions[2];  // custom, built-in
  for (const std::string& name : names) {
    const lltm::CellInfo& cell = *lltm::find_cell(name);
    const std::string definition = std::string("Definition_") + cell.title();
    std::cout << lltm::cuda::print_definition(cell, definition) << '\n';
    definitions[lltm::is_built_in(cell)] +=
        "    if (hash == " + std::to_string(cell.programs->hash) +
        "ULL) return body(lltm::" + definition + "{});\n";
  }
  names.push_back(lltm_test::kStagedText);
  std::string stages[2];
  for (const std::string& name : names) {
    const lltm::CellInfo& cell = *lltm::find_cell(name);
    for (const bool backward : {false, true}) {
      const lltm::Pass& pass = backward ? cell.backward() : cell.forward();
      for (int k = 0; k < pass.count; ++k) {
        const std::string number = std::to_string(k);
        const std::string stage =
            std::string(backward ? "Backward_" : "Forward_") + number + "_" + cell.title();
        std::cout << lltm::cuda::print_stage(cell, pass.stages[k], stage) << '\n';
        stages[backward] += "    if (hash == " + std::to_string(cell.programs->hash) +
                            "ULL && number == " + number + ") return body(lltm::cuda::" + stage +
                            "{}), true;\n";
      }
    }
  }
  std::cout << "namespace lltm_test {\n\n"
            << "// Calls body with the stage, or returns false.\n"
            << "template <bool kBackward, typename Body>\n"
            << "bool visit_stage(const lltm::cuda::KernelForm& form, const Body& body) {\n"
            << "  const lltm::CellPrograms& programs = *form.cell->programs;\n"
            << "  const auto hash = programs.hash;\n"
            << "  if constexpr (kBackward) {\n"
            << "    const auto number = form.stage - programs.backward.stages;\n"
            << stages[true] << "  } else {\n"
            << "    const auto number = form.stage - programs.forward.stages;\n"
            << stages[false] << "  }\n  return false;\n}\n\n"
            << "// Calls body with the definition of a cell of kCellTexts, or of a built-in cell.\n"
            << "template <bool kBuiltIn, typename Body>\n"
            << "void visit_definition(const lltm::CellInfo& cell, const Body& body) {\n"
            << "  const auto hash = cell.programs->hash;\n"
            << "  if constexpr (kBuiltIn) {\n"
            << definitions[true] << "  } else {\n"
            << definitions[false] << "  }\n"
            << "  throw std::logic_error(\"a cell whose definition was not printed\");\n"
            << "}\n\n}  // namespace lltm_test\n";
}
