// Prints the cells of cell_program.h as C++ cell definitions, for host tests.
#include "cell/registry.h"
#include "cell_program.h"
#include "cuda/kernel/program_source.h"

#include <iostream>
#include <string>

int main() {
  std::cout << "#pragma once\n\n#include \"cell/definition.h\"\n\n#include <stdexcept>\n\n";
  std::string cases;
  for (const std::string& text : lltm_test::kCellTexts) {
    const lltm::CellInfo& cell = *lltm::find_cell(text);
    const std::string definition = std::string("Definition_") + cell.title();
    std::cout << lltm::cuda::print_definition(cell, definition) << '\n';
    cases += "    case " + std::to_string(cell.programs->hash) +
             "ULL:\n      return body(lltm::" + definition + "{});\n";
  }
  std::cout << "namespace lltm_test {\n\n"
            << "// Calls body with the definition of a cell of kCellTexts.\n"
            << "template <typename Body>\n"
            << "void visit_custom_definition(const lltm::CellInfo& cell, const Body& body) {\n"
            << "  switch (cell.programs->hash) {\n"
            << cases << "  }\n"
            << "  throw std::logic_error(\"a cell that is not among kCellTexts\");\n"
            << "}\n\n}  // namespace lltm_test\n";
}
