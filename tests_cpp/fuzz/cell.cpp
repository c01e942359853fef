// lltm::parse_cell: rejects a text with an error that names its line, or compiles programs that
// read only initialized registers and values that exist.
#include "../cell_program.h"
#include "fuzz.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <vector>

namespace lltm_fuzz {
namespace {

const std::vector<std::string> kTexts = [] {
  std::vector<std::string> texts = lltm_test::kCellTexts;
  texts.push_back(lltm_test::kStagedText);
  texts.emplace_back(
      "lltm-cell 2\nname products\nweight_ih r n o\nweight_hh r n o\ninput m\nreads_h\nforward\n"
      "v = multiply z.r h\nz.n = product v\nz.o = product v\nt = mean z.n\nu = add t z.m\n"
      "w = mean u\nh' = multiply w z.o\nsave h v w z.r z.o\nbackward\nd.z.o = multiply d.h' w\n"
      "a = multiply d.h' z.o\nd.z.m = mean a\nd.z.n = mean d.z.m\ne = product d.z.n d.z.o\n"
      "d.z.r = multiply e h\nd.h = multiply e z.r\nend\n");
  return texts;
}();
const std::vector<std::string> kNumbers = {"0.0", "-0.0", "1.0", "-0.5", "1e-05", "inf", "-inf"};

// Each port of a stage names a value that exists. The values include numbers that are not finite.
void check_stages(const lltm::CellInfo& cell, const lltm::Pass& pass) {
  const int most[lltm::kPlaces] = {
      cell.slots,
      cell.parameters,
      cell.state_columns(),
      1,
      cell.saved,
      cell.operands().count,
      pass.means,
      pass.kept};
  for (int k = 0; k < pass.count; ++k) {
    const lltm::Stage& stage = pass.stages[k];
    for (int p = 0; p < stage.program.inputs + stage.program.outputs; ++p) {
      const auto [place, index] = stage.ports[p];
      require(index < most[static_cast<int>(place)], "port ", p, " of stage ", k);
    }
    for (const double value : {0.5, -0.0, HUGE_VAL}) {
      lltm_test::run_program(stage.program, std::vector<double>(stage.program.inputs, value));
    }
  }
}

}  // namespace

std::string first_input(Random& random) {
  return random.one_of(kTexts);
}

void mutate(std::string& input, Random& random) {
  if (random.one_in(2)) {
    const auto [from, size] = part(input, " \n", random);
    const std::string word = random.one_in(4) ? random.one_of(kNumbers) : input.substr(from, size);
    const auto [at, replaced] = part(input, " \n", random);
    input.replace(at, replaced, word);
  } else {
    const auto [from, size] = part(input, "\n", random);
    const std::string line = input.substr(from, size + 1);
    if (!random.one_in(3)) input.erase(from, size + 1);
    const auto [at, unused] = part(input, "\n", random);
    if (!random.one_in(3)) input.insert(std::min(at, input.size()), line);
  }
}

void repair(std::string&, Random&) {}

void run(std::string_view input) {
  std::unique_ptr<const lltm::CellText> cell;
  const Allocations allocations;
  try {
    cell = lltm::parse_cell(input);
  } catch (const std::invalid_argument& error) {
    require_message(error.what(), "cell program, line ");
  }
  const uint64_t most = (1 << 20) + 64 * input.size();
  require(allocations.bytes() <= most, allocations.bytes(), " bytes for a text of ", input.size());
  if (cell == nullptr) return;
  check_stages(cell->info, cell->programs.forward);
  check_stages(cell->info, cell->programs.backward);
}

}  // namespace lltm_fuzz
