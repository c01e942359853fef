#include "ptx.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iterator>
#include <string_view>
#include <utility>

namespace ptx {
namespace {

constexpr std::pair<const char*, int> kWidths[] = {
    {"pred", 1}, {"b16", 16}, {"b32", 32}, {"f32", 32}, {"b64", 64}, {"f64", 64}};
constexpr std::pair<const char*, SpecialRegister> kSpecialRegisters[] = {
    {"%tid.x", kTidX}, {"%ctaid.x", kCtaidX}, {"%ctaid.y", kCtaidY}, {"%ctaid.z", kCtaidZ}};

std::string_view trim(std::string_view text) {
  const auto is_blank = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

// The text before the first of `ends`, which is removed together with it.
std::string_view take(std::string_view& text, std::string_view ends) {
  const auto end = std::min(text.find_first_of(ends), text.size());
  const std::string_view taken = trim(text.substr(0, end));
  text = trim(text.substr(std::min(end + 1, text.size())));
  return taken;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (text = trim(text); !text.empty();) parts.push_back(take(text, {&separator, 1}));
  return parts;
}

class Parser {
 public:
  Kernel parse(std::string_view text) {
    const auto entry = text.find(".entry");
    if (entry == std::string_view::npos) throw Error("PTX without a kernel");
    kernel_.registers = kFirstParameter;
    add_shared(text.substr(0, entry));
    text.remove_prefix(entry);
    take(text, " \t");
    kernel_.name = take(text, "(");
    for (const auto parameter : split(take(text, ")"), ',')) add_parameter(parameter);
    take(text, "{");
    while (!text.empty()) add_statement(text);
    for (const auto& [instruction, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) throw Error("no label " + label);
      kernel_.code[instruction].target = found->second;
    }
    return std::move(kernel_);
  }

 private:
  struct Register {
    int number, width;
  };

  void add_shared(std::string_view declarations) {
    for (const auto line : split(declarations, '\n')) {
      if (line.find(".shared") == std::string_view::npos) continue;
      const auto name = line.substr(line.rfind(' ') + 1);
      registers_[std::string(name.substr(0, name.find_first_of("[;")))] = {kSharedBase, 64};
    }
  }

  // `.param .align 8 .b8 name[bytes]` or `.param .u64 name`.
  void add_parameter(std::string_view text) {
    std::string_view name = text.substr(text.rfind(' ') + 1);
    const std::string symbol(take(name, "["));
    const std::uint64_t bytes =
        name.empty() ? 8 : std::strtoull(std::string(name).c_str(), nullptr, 10);
    if (name.empty() && text.find(".u64") == std::string_view::npos) {
      throw Error("unknown parameter " + std::string(text));
    }
    kernel_.parameters.push_back(bytes);
    registers_[symbol] = {kernel_.registers++, 64};
  }

  // A label, declaration or instruction, or a brace: asm statements have blocks.
  void add_statement(std::string_view& text) {
    if (text.starts_with("//")) {
      take(text, "\n");
    } else if (text[0] == '{' || text[0] == '}' || text[0] == ';') {
      text = trim(text.substr(1));
    } else if (text.starts_with("$")) {
      labels_[std::string(take(text, ":"))] = static_cast<int>(kernel_.code.size());
    } else if (std::string_view statement = take(text, ";"); statement[0] != '.') {
      add_instruction(statement);
    } else if (statement.starts_with(".reg")) {
      add_registers(statement);
    } else if (!statement.starts_with(".pragma") && statement[0] == '.') {
      const auto reg = statement.find(".reg");  // after .maxntid and .minnctapersm
      if (reg == std::string_view::npos) {
        throw Error("unknown declaration " + std::string(statement));
      }
      add_registers(statement.substr(reg));
    }
  }

  // `.reg .b32 %r<10>` or `.reg .b32 name`
  void add_registers(std::string_view statement) {
    take(statement, " \t");
    const auto type = take(statement, " \t").substr(1);
    const auto* const width =
        std::find_if(std::begin(kWidths), std::end(kWidths), [&](const auto& known) {
          return type == known.first;
        });
    if (width == std::end(kWidths)) throw Error("unknown type of register " + std::string(type));
    const std::string name(take(statement, "<"));
    if (statement.empty()) registers_[name] = {kernel_.registers++, width->second};
    const int count = std::atoi(std::string(statement).c_str());
    for (int n = 0; n < count; ++n) {
      registers_[name + std::to_string(n)] = {kernel_.registers++, width->second};
    }
  }

  void add_instruction(std::string_view statement) {
    Instruction instruction;
    instruction.text = statement;
    std::replace(instruction.text.begin(), instruction.text.end(), '\t', ' ');
    if (statement[0] == '@') {
      instruction.is_negated = statement[1] == '!';
      const auto predicate = take(statement, " \t").substr(instruction.is_negated ? 2 : 1);
      instruction.predicate = find(std::string(predicate), 1);
    }
    std::string name(take(statement, " \t"));
    if (name.starts_with("mov") && statement.find('{') != std::string_view::npos) {
      name += statement[0] == '{' ? " unpack" : " pack";
    }
    instruction.opcode = find_opcode(name);
    if (instruction.opcode == nullptr) throw Error("unknown instruction " + instruction.text);
    if (instruction.opcode->control == Control::kBranch) {
      branches_.emplace_back(kernel_.code.size(), statement);
    } else {
      add_operands(instruction, statement);
    }
    kernel_.code.push_back(instruction);
  }

  // A value, `[address+offset]`, `{a, b}` or `a|b`.
  void add_operands(Instruction& instruction, std::string_view text) {
    const Opcode& opcode = *instruction.opcode;
    size_t operand = 0;
    for (; !text.empty(); ++operand) {
      std::vector<std::string_view> values;
      if (text[0] == '{') {
        text.remove_prefix(1);
        values = split(take(text, "}"), ',');
        take(text, ",");
      } else if (text[0] == '[') {
        text.remove_prefix(1);
        std::string_view address = take(text, "]");
        values = {take(address, "+")};
        instruction.offset = std::atoll(std::string(address).c_str());
        take(text, ",");
      } else {
        values = split(take(text, ","), '|');
      }
      if (operand >= opcode.counts.size() || opcode.counts[operand] != std::ssize(values)) {
        throw Error("unexpected operands of " + instruction.text);
      }
      for (const auto value : values) {
        instruction.registers.push_back(find(std::string(value), opcode.widths[operand]));
        if (instruction.registers.size() == 1) instruction.width = width_;
      }
    }
    if (operand != opcode.counts.size()) throw Error("missing operands of " + instruction.text);
  }

  // Constants become registers.
  int find(const std::string& value, int width) {
    const auto found = registers_.find(value);
    if (found != registers_.end()) {
      width_ = found->second.width;
      if (width != 0 && width != width_) throw Error("another width than of " + value);
      return found->second.number;
    }
    for (const auto& [name, number] : kSpecialRegisters) {
      if (value == name) return number;
    }
    const bool is_float = value.size() > 9 && value[0] == '0' && std::tolower(value[1]) != 'x';
    char* end = nullptr;
    std::uint64_t bits = is_float          ? std::strtoull(value.c_str() + 2, &end, 16)
                         : value[0] == '-' ? std::strtoll(value.c_str(), &end, 0)
                                           : std::strtoull(value.c_str(), &end, 0);
    if (value.empty() || *end != '\0') throw Error("unknown operand " + value);
    if (width != 0 && width < 64) bits &= (std::uint64_t{1} << width) - 1;
    kernel_.constants.emplace_back(kernel_.registers, bits);
    return kernel_.registers++;
  }

  Kernel kernel_;
  std::map<std::string, Register> registers_;
  std::map<std::string, int> labels_;
  std::vector<std::pair<size_t, std::string>> branches_;
  int width_ = 0;  // of the last register
};

}  // namespace

Kernel parse(const std::string& text) {
  return Parser().parse(text.substr(0, text.find('\0')));
}

}  // namespace ptx
