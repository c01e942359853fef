// Prints the cells of cell_program.h as C++ cell definitions, for host tests.
#include "cell/registry.h"
#include "cell_program.h"
#include "cuda/kernel/program_source.h"

#include <iostream>
#include <string>

int main() {
  std::cout << "#pragma once\n\n#include \"cell/page.h\"\n\n#include <stdexcept>\n\n";
  std::string cases;
  for (const std::string& text : lltm_test::kCellTexts) {
    const lltm::CellInfo& cell = *lltm::find_cell(text);
    const std::string page = std::string("Page_") + cell.title();
    std::cout << lltm::cuda::print_page(cell, page) << '\n';
    cases += "    case " + std::to_string(cell.programs->hash) +
             "ULL:\n      return body(lltm::" + page + "{});\n";
  }
  std::cout << "namespace lltm_test {\n\n"
            << "// Calls body with the page of a cell of kCellTexts.\n"
            << "template <typename Body>\n"
            << "void visit_custom_page(const lltm::CellInfo& cell, const Body& body) {\n"
            << "  switch (cell.programs->hash) {\n"
            << cases << "  }\n"
            << "  throw std::logic_error(\"a cell that is not among kCellTexts\");\n"
            << "}\n\n}  // namespace lltm_test\n";
}
