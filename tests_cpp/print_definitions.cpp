// Prints the cells of cell_program.h as C++ cell definitions, for host tests.
#include "cell/registry.h"
#include "cell_program.h"
#include "cuda/kernel/program_source.h"

#include <iostream>
#include <string>

int main() {
  std::cout << "#pragma once\n\n#include \"cell/definition.h\"\n#include "
               "\"cuda/kernel/elementwise_kernels.h\"\n\n#include <stdexcept>\n\n";
  std::string cases;
  for (const std::string& text : lltm_test::kCellTexts) {
    const lltm::CellInfo& cell = *lltm::find_cell(text);
    const std::string definition = std::string("Definition_") + cell.title();
    std::cout << lltm::cuda::print_definition(cell, definition) << '\n';
    cases += "    case " + std::to_string(cell.programs->hash) +
             "ULL:\n      return body(lltm::" + definition + "{});\n";
  }
  const lltm::CellInfo& staged = *lltm::find_cell(lltm_test::kStagedText);
  std::string stages;
  for (const bool backward : {false, true}) {
    const lltm::Pass& pass = backward ? staged.programs->backward : staged.programs->forward;
    for (int k = 0; k < pass.count; ++k) {
      const int number = k + (backward ? 100 : 0);
      const std::string name = "Stage_" + std::to_string(number);
      std::cout << lltm::cuda::print_stage(staged, pass.stages[k], backward, name) << '\n';
      stages +=
          "    case " + std::to_string(number) + ":\n      return body(lltm::" + name + "{});\n";
    }
  }
  std::cout << "namespace lltm_test {\n\n"
            << "// Calls body with a stage of kStagedText; backward counts from 100.\n"
            << "template <typename Body>\nvoid visit_stage(int number, const Body& body) {\n"
            << "  switch (number) {\n"
            << stages << "  }\n  throw std::logic_error(\"a stage of another cell\");\n}\n\n"
            << "// Calls body with the definition of a cell of kCellTexts.\n"
            << "template <typename Body>\n"
            << "void visit_custom_definition(const lltm::CellInfo& cell, const Body& body) {\n"
            << "  switch (cell.programs->hash) {\n"
            << cases << "  }\n"
            << "  throw std::logic_error(\"a cell that is not among kCellTexts\");\n"
            << "}\n\n}  // namespace lltm_test\n";
}
