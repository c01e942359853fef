#include "cuda/kernel/program_source.h"

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

// The matrix in StageArgs and the block of a stage's value.
struct Source {
  const char* matrix;
  int block;
};
Source source_of(const CellInfo& cell, const Port& port, bool is_output) {
  const int k = port.index;
  switch (port.place) {
    case Place::kGate:
      return {"gates", k};
    case Place::kParameter:
      return is_output ? Source{"gates", cell.slots + k} : Source{"bias_ih", cell.x.count() + k};
    case Place::kState:
      return {is_output ? "next_states" : "states", k};
    case Place::kH:
      return {"h", 0};
    case Place::kSaved:
      return {"saved", k};
    case Place::kOperand:
      return {"operands", k};
    case Place::kMean:
      return {is_output ? "terms" : "means", k};
    default:
      return {"kept", k};
  }
}

// A cell definition for persistent_kernels.h.
std::string print_definition(const CellInfo& cell) {
  std::ostringstream to = new_stream();
  to << "namespace lltm {\nnamespace {\n\nstruct Definition {\n"
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

// The same for a stage: run<kWidth>(args, n) computes the n-th piece of kWidth hidden units.
std::string print_stage(const CellInfo& cell, const Stage& stage) {
  const int inputs = stage.program.inputs, outputs = stage.program.outputs;
  std::ostringstream to = new_stream();
  const auto move = [&](const char* function, const Source& source, const char* values, int k) {
    to << "    " << function << "(args." << source.matrix << ", at, " << source.block << ", "
       << values << "[" << k << "]);\n";
  };
  to << "namespace lltm::cuda {\nnamespace {\n\nstruct Definition {\n";
  print_program(to, stage.program, "compute");
  to << "\n  template <int kWidth, typename Args>\n"
     << "  static LLTM_CELL_INLINE void run(const Args& args, std::int64_t n) {\n"
     << "    Position at = position(n, args.hidden / kWidth);\n    at.col *= kWidth;\n"
     << "    typename Args::V in[" << std::max(inputs, 1) << "][kWidth], out[" << outputs
     << "][kWidth];\n";
  for (int k = 0; k < inputs; ++k) {
    const auto [place, index] = stage.ports[k];
    const bool is_of_row = place == Place::kMean ||
                           (place == Place::kSaved && (cell.programs->per_row >> index & 1) != 0);
    move(is_of_row ? "load_of_row" : "load", source_of(cell, stage.ports[k], false), "in", k);
    if (place == Place::kGate && cell.x.contains(index)) {
      move("add", {"bias_ih", cell.x_blocks[index]}, "in", k);
    }
    if (place == Place::kGate && cell.h.contains(index)) {
      move("add", {"bias_hh", cell.h_blocks[index]}, "in", k);
    }
    if (place == Place::kH) move("add", {"h_of_gemm", 0}, "in", k);
    if (place == Place::kH && cell.reads_h) move("add", {"states", 0}, "in", k);
  }
  to << "    compute_each<Definition>(in, out);\n";
  for (int k = 0; k < outputs; ++k) {
    const Port& port = stage.ports[inputs + k];
    move("store", source_of(cell, port, true), "out", k);
    if (port.place == Place::kH) move("store", {"h_of_gemm", 0}, "out", k);
    if (port.place == Place::kH && cell.reads_h) move("store", {"next_states", 0}, "out", k);
  }
  to << "  }\n};\n\n}  // namespace\n}  // namespace lltm::cuda\n";
  return to.str();
}

}  // namespace

const char* kernel_name(const KernelForm& form) {
  if (form.is_persistent()) {
    return form.backward ? "lltm_persistent_backward" : "lltm_persistent_forward";
  }
  return form.backward ? "lltm_backward" : "lltm_forward";
}

std::string print_kernel(const KernelForm& form) {
  constexpr const char* kTypes[] = {"double", "float", "Half", "BFloat16"};
  const char* const tensor = kTypes[static_cast<int>(form.tensor)];
  std::ostringstream to = new_stream();
  if (!form.is_persistent()) {
    to << "#include \"cuda/kernel/program_gpu.h\"\n\n"
       << print_stage(*form.cell, *form.stage)
       << "\nnamespace lltm::cuda {\nusing Args = StageArgs<" << tensor << ", "
       << kTypes[static_cast<int>(form.state)] << ", " << (form.backward ? "true" : "false")
       << ">;\nLLTM_STAGE_KERNEL(" << kernel_name(form) << ", " << form.width << ")\n}\n";
    return to.str();
  }
  to << "#include \"cuda/kernel/persistent_kernels.h\"\n\n"
     << print_definition(*form.cell)
     << "\nnamespace lltm::cuda {\nusing Args = " << (form.directions > 1 ? "DirectionArgs<" : "")
     << "Persistent" << (form.backward ? "Backward" : "Forward") << "Args<" << tensor
     << (form.directions > 1 ? ">" : "") << ">;\nLLTM_PERSISTENT_KERNEL(" << kernel_name(form)
     << ", " << form.units << ", " << form.shared_units << ", " << form.tiles << ", " << form.tf32
     << ", " << form.heads << ")\n}\n";
  return to.str();
}

}  // namespace lltm::cuda
