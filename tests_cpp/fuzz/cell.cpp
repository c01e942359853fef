// lltm::parse_cell: rejects a text with an error that names its line, or compiles programs that
// match the text and read only initialized registers.
#include "../cell_program.h"
#include "fuzz.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

namespace lltm_fuzz {
namespace {

using lltm_test::kOperations;
using Names = std::vector<std::string>;

std::string number(Random& random) {
  static const Names numbers = {"0.0", "1.0", "-0.0", "-0.5", "2", "1e-05", "inf", "-inf"};
  return random.one_of(numbers);
}

// Assignments of local values, then of `outputs`, with known operands.
std::string assignments(
    const std::string& prefix, const Names& outputs, Names& known, Random& random) {
  std::string text;
  Names targets;
  for (size_t k = random.below(24); k > 0; --k) targets.push_back(prefix + std::to_string(k));
  targets.insert(targets.end(), outputs.begin(), outputs.end());
  for (const std::string& target : targets) {
    // Operations that may be fused.
    using enum lltm::Op;
    static const std::vector<lltm::Op> often = {kNegate, kAdd, kSubtract, kMultiply, kMultiply};
    const lltm::Op op = random.one_in(3) ? static_cast<lltm::Op>(random.below(kOperations.size()))
                                         : random.one_of(often);
    const lltm::OpInfo& info = lltm::info_of(op);
    text += target + " = " + std::string(info.word);
    for (int k = info.operands; k > 0; --k) {
      const bool recent = known.size() > 4 && random.one_in(2);
      text += ' ';
      text += known.empty() || random.one_in(8) ? number(random)
              : recent                          ? known[known.size() - 1 - random.below(4)]
                                                : random.one_of(known);
    }
    text += '\n';
    known.push_back(target);
  }
  return text;
}

std::string random_cell(Random& random) {
  std::string text = "lltm-cell 1\nname cell\n";
  Names gates, next = {"h'"}, known, parameters, gradients;
  std::string of_x = "weight_ih", of_h = "weight_hh";
  for (size_t k = 1 + random.below(5); k > 0; --k) {
    const std::string gate = std::string("g") += std::to_string(k);
    const size_t which = random.below(3);
    if (which != 0) of_x += " " + gate;
    if (which != 1) of_h.insert(random.one_in(2) ? 9 : of_h.size(), " " + gate);
    known.push_back("z." + gate);
    gradients.push_back("d.z." + gate);
  }
  text += of_x + '\n' + of_h + '\n';
  if (random.one_in(2)) text += "bounded\n";
  if (random.one_in(2)) {
    text += "reads_h\n";
    known.push_back("h");
    gradients.push_back("d.h");
  }
  for (size_t k = random.below(4); k > 0; --k) {
    const std::string state = std::string("c") += std::to_string(k);
    text += "state " + state + " 0\n";
    known.push_back(state);
    next.push_back(state + "'");
    gradients.push_back("d." + state);
  }
  for (size_t k = random.below(3); k > 0; --k) {
    const std::string parameter = std::string("p") += std::to_string(k);
    text += "parameter " + parameter + " 0.5\n";
    parameters.push_back(parameter);
    gradients.push_back("d." + parameter);
  }
  const size_t values = known.size();
  known.insert(known.end(), parameters.begin(), parameters.end());
  text += "forward\n" + assignments("v", next, known, random) + "save";
  Names saved;
  for (size_t k = 0; k < known.size() && saved.size() < 12; ++k) {
    const bool parameter = values <= k && k < values + parameters.size();
    if (!parameter && random.one_in(4)) saved.push_back(known[k]);
  }
  for (const std::string& name : saved) text += " " + name;
  saved.insert(saved.end(), parameters.begin(), parameters.end());
  for (const std::string& name : next) saved.push_back("d." + name);
  return text + "\nbackward\n" + assignments("w", gradients, saved, random) + "end\n";
}

}  // namespace

// With products, means and a given gate.
const std::string kStagedText =
    "lltm-cell 2\nname staged\nweight_ih r n o\nweight_hh r n o\ninput m\nreads_h\nforward\n"
    "v = multiply z.r h\nz.n = product v\nz.o = product v\nt = mean z.n\nu = add t z.m\n"
    "w = mean u\nh' = multiply w z.o\nsave h v w z.r z.o\nbackward\nd.z.o = multiply d.h' w\n"
    "a = multiply d.h' z.o\nd.z.m = mean a\nd.z.n = mean d.z.m\ne = product d.z.n d.z.o\n"
    "d.z.r = multiply e h\nd.h = multiply e z.r\nend\n";

// Each port of a stage names a value that exists.
void check_ports(const lltm::CellInfo& cell, const lltm::Pass& pass) {
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
  }
}

std::string first_input(Random& random) {
  if (random.one_in(4)) return kStagedText;
  return random.one_in(4) ? random.one_of(lltm_test::kCellTexts) : random_cell(random);
}

void mutate(std::string& input, Random& random) {
  const auto part = [&](const char* ends) {
    const size_t at = input.find_last_of(ends, random.below(input.size() + 1));
    const size_t begin = at == std::string::npos ? 0 : at + 1;
    return std::pair(begin, std::min(input.find_first_of(ends, begin), input.size()) - begin);
  };
  if (random.one_in(2)) {
    const auto [from, size] = part(" \n");
    const std::string word = random.one_in(4) ? number(random) : input.substr(from, size);
    const auto [at, replaced] = part(" \n");
    input.replace(at, replaced, word);
  } else {
    const auto [from, size] = part("\n");
    const std::string line = input.substr(from, size + 1);
    if (!random.one_in(3)) input.erase(from, size + 1);
    const auto [at, unused] = part("\n");
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
  check_ports(cell->info, cell->programs.forward);
  check_ports(cell->info, cell->programs.backward);
  if (cell->programs.forward.count == 1 && cell->programs.backward.count == 1) {
    // Numbers with few bits, so that some are equal. Some are not finite.
    Random random(input.size());
    const auto next = [&] {
      static const std::vector<double> special = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e300};
      if (random.one_in(16)) return random.one_of(special);
      return (static_cast<double>(random.below(64)) - 32) / 8;
    };
    for (int round = 0; round < 4; ++round) {
      const std::string difference =
          lltm_test::difference_from_text(*cell, std::string(input), next);
      require(difference.empty(), difference);
    }
  }
}

}  // namespace lltm_fuzz
