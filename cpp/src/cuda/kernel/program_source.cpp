#include "cuda/kernel/program_source.h"

#include "cell/cells.h"
#include "cell/program_compiler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <locale>
#include <sstream>

namespace lltm::cuda {
namespace {

std::ostringstream new_stream() {
  std::ostringstream stream;
  stream.imbue(std::locale::classic());
  stream.precision(std::numeric_limits<double>::max_digits10);
  return stream;
}

std::string numbered(const char* before, int number, const char* after = "") {
  std::string text = before;
  text += std::to_string(number);
  return text += after;
}

std::string print_number(double number) {
  if (std::isinf(number)) return number > 0 ? "V(__builtin_inf())" : "V(-__builtin_inf())";
  std::ostringstream stream = new_stream();
  stream << "V(" << number << ")";
  return stream.str();
}

// A statement and a variable per instruction: registers would be reused.
void print_program(std::ostream& to, const Program& program, const char* name) {
  to << "  template <typename V>\n  static LLTM_CELL_INLINE void " << name << "(const V (&in)["
     << std::max(program.inputs, 1) << "], V (&out)[" << program.outputs << "]) {\n";
  std::vector<std::string> registers(program.registers);
  for (int k = 0; k < program.inputs; ++k) registers[k] = numbered("in[", k, "]");
  for (int k = 0; k < program.constant_count; ++k) {
    registers[program.first_constant() + k] = print_number(program.constants[k]);
  }
  for (int k = 0; k < program.size; ++k) {
    const Instruction& i = program.code[k];
    const OpInfo& info = info_of(i.op);
    const unsigned char of[] = {i.a, i.b, i.c};
    const std::string result = numbered("v", k);
    to << "    const V " << result << " = math::" << info.function << "(";
    for (int j = 0; j < info.operands; ++j) to << (j == 0 ? "" : ", ") << registers[of[j]];
    to << ");\n";
    registers[i.y] = result;
  }
  for (int k = 0; k < program.outputs; ++k) {
    to << "    out[" << k << "] = " << registers[program.inputs + k] << ";\n";
  }
  to << "  }\n";
}

void print_slots(std::ostream& to, const char* name, SlotRange slots) {
  to << "      ." << name << " = {" << slots.begin << ", " << slots.end << "},\n";
}

void print_blocks(std::ostream& to, const char* name, int slots, const int* blocks) {
  to << "      ." << name << " = {";
  for (int k = 0; k < slots; ++k) to << (k == 0 ? "" : ", ") << blocks[k];
  to << "},\n";
}

}  // namespace

std::string print_definition(const CellInfo& cell, const std::string& name) {
  std::ostringstream to = new_stream();
  to << "namespace lltm {\nnamespace {\n\nstruct " << name << " {\n"
     << "  static constexpr CellInfo kCell = {\n"
     << "      .name = \"\",\n"
     << "      .slots = " << cell.slots << ",\n      .saved = " << cell.saved << ",\n";
  print_slots(to, "x", cell.x);
  print_slots(to, "h", cell.h);
  print_blocks(to, "x_blocks", cell.slots, cell.x_blocks);
  print_blocks(to, "h_blocks", cell.slots, cell.h_blocks);
  to << "      .states = " << cell.states << ",\n"
     << "      .reads_h = " << (cell.reads_h ? "true" : "false") << ",\n"
     << "      .parameters = " << cell.parameters << "};\n\n";
  print_program(to, cell.programs->forward.program(), "forward");
  to << '\n';
  print_program(to, cell.programs->backward.program(), "backward");
  // h precedes the other states.
  to << "\n  static LLTM_CELL_INLINE double initial(int column) {\n    using V [[maybe_unused]] = "
        "double;\n"
     << "    const double values[] = {";
  if (cell.reads_h) to << "0" << (cell.states > 0 ? ", " : "");
  for (int k = 0; k < cell.states; ++k) {
    to << (k == 0 ? "" : ", ") << print_number(cell.programs->initial_states[k]);
  }
  to << "};\n    return values[column];\n  }\n";
  to << "};\n\n}  // namespace\n}  // namespace lltm\n";
  return to.str();
}

std::string print_stage(
    const CellInfo& cell, const Stage& stage, bool backward, const std::string& name) {
  const int inputs = stage.program.inputs;
  const auto type = [&](const Port& port) {
    constexpr const char* kNames[] = {"T", "D", "V"};
    return kNames[static_cast<int>(value_type(port.place, backward))];
  };
  std::ostringstream to = new_stream();
  const auto load = [&](const char* of_type, const char* from, int block) {
    to << "cuda::load<" << of_type << ">(args." << from << ", ";
    block == 0 ? to << "at)" : to << "cuda::in_block(at, args.hidden, " << block << "))";
  };
  to << "namespace lltm {\nnamespace {\n\nstruct " << name << " {\n";
  print_program(to, stage.program, "compute");
  to << "\n  template <typename T, typename D, typename Args, typename Position>\n"
     << "  static LLTM_CELL_INLINE void run(const Args& args, const Position& at) {\n"
     << "    using V = compute_t<T>;\n    const V in[] = {";
  for (int k = 0; k < inputs; ++k) {
    const auto [place, index] = stage.ports[k];
    load(type(stage.ports[k]), numbered("ports[", k, "]").c_str(), 0);
    if (place == Place::kGate && cell.x.contains(index)) {
      to << " + ";
      load("T", "bias_ih", cell.x_blocks[index]);
    }
    if (place == Place::kGate && cell.h.contains(index)) {
      to << " + ";
      load("T", "bias_hh", cell.h_blocks[index]);
    }
    if (place == Place::kH) {
      to << " + ";
      load("D", "h_of_gemm", 0);
      if (cell.reads_h) {
        to << " + ";
        load("D", "h_of_state", 0);
      }
    }
    to << ",\n        ";
  }
  to << (inputs == 0 ? "V(0)" : "") << "};\n    V out[" << stage.program.outputs
     << "];\n    compute(in, out);\n";
  const auto store = [&](const char* of_type, const std::string& port, int output) {
    to << "    cuda::store<" << of_type << ">(args." << port << ", at, out[" << output << "]);\n";
  };
  for (int k = 0; k < stage.program.outputs; ++k) {
    const Port& port = stage.ports[inputs + k];
    store(type(port), numbered("ports[", inputs + k, "]"), k);
    if (port.place == Place::kH) {
      store("T", "h_of_gemm", k);
      if (cell.reads_h) store("T", "h_of_state", k);
    }
  }
  to << "  }\n};\n\n}  // namespace\n}  // namespace lltm\n";
  return to.str();
}

const char* kernel_name(const KernelForm& form) {
  if (form.stage != nullptr) return "lltm_stage";
  if (form.is_persistent()) {
    return form.backward ? "lltm_persistent_backward" : "lltm_persistent_forward";
  }
  return form.backward ? "lltm_backward" : "lltm_forward";
}

std::string print_kernel(const KernelForm& form) {
  constexpr const char* kTypes[] = {"double", "float", "Half", "BFloat16"};
  const char* const direction = form.backward ? "Backward" : "Forward";
  std::ostringstream to = new_stream();
  to << "#include \"cuda/kernel/" << (form.is_persistent() ? "persistent" : "program")
     << "_gpu.h\"\n\n";
  if (form.stage != nullptr) {
    const Program& program = form.stage->program;
    to << print_stage(*form.cell, *form.stage, form.backward, "Definition")
       << "\nnamespace lltm::cuda {\nusing Args = StageArgs<" << program.inputs + program.outputs
       << ">;\nusing Types = StageTypes<" << kTypes[static_cast<int>(form.tensor)] << ", "
       << kTypes[static_cast<int>(form.state)] << ">;\nLLTM_ELEMENTWISE_KERNEL("
       << kernel_name(form) << ", Types, stage_at, 1)\n}\n";
    return to.str();
  }
  const bool is_custom = !is_built_in(*form.cell);
  if (is_custom) to << print_definition(*form.cell, "Definition") << '\n';
  to << "namespace lltm::cuda {\n";
  if (!is_custom) {
    to << "using Definition = DefinitionRegisters<BuiltIn<" << form.cell->native << ">>;\n";
  }
  to << "using Args = " << (form.directions > 1 ? "DirectionArgs<" : "")
     << (form.is_persistent() ? "Persistent" : "") << direction << "Args<"
     << kTypes[static_cast<int>(form.tensor)];
  if (form.backward && !form.is_persistent()) to << ", " << kTypes[static_cast<int>(form.state)];
  to << (form.directions > 1 ? ">" : "") << ">;\nLLTM_"
     << (form.is_persistent() ? "PERSISTENT" : "ELEMENTWISE") << "_KERNEL(" << kernel_name(form)
     << ", ";
  if (form.is_persistent()) {
    to << form.units << ", " << form.shared_units << ", " << form.tiles << ", " << form.tf32 << ", "
       << form.heads;
  } else {
    to << direction << "Access, " << (form.backward ? "backward" : "forward") << "_at, "
       << form.width;
  }
  to << ")\n}\n";
  return to.str();
}

}  // namespace lltm::cuda
