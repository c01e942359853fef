#include "op/check.h"

#include "cell/cells.h"
#include "common/checkpoints.h"
#include "common/tensor_steps.h"
#include "common/weights.h"
#include "op/argument_checks.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace lltm {
namespace {

using at::Tensor;
using c10::str;
using c10::SymInt;

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

const CellInfo& cell_of(const char* op, const CellName& name) {
  return name.find() != nullptr ? *name : get_cell(str("lltm::", op).c_str(), name);
}

// Fails if torch.vmap maps over batch_sizes, at any level.
std::vector<int64_t> values_of_batch_sizes(const char* op, const Tensor& sizes) {
  try {
    return read_batch_sizes(sizes);
  } catch (const c10::Error&) {
    TORCH_CHECK(
        false,
        expected(op, "the same batch_sizes for all samples of vmap", "batch_sizes per sample"));
  }
}

// ---- symbolic shapes ---------------------------------------------------------

// The symbols of lltm/ops.h, and K, the number of activation checkpoints.
enum Letter : uint8_t { kSteps, kBatch, kRows, kInput, kHidden, kCheckpoints, kLetters };
constexpr char kLetterTexts[] = "TBNIHK";

// A multiple of a symbol or, for the columns of the input weights, I plus a multiple of H.
struct Size {
  Letter letter;
  int times = 1;
  int plus_hidden = 0;
};

class Shape {
 public:
  constexpr Shape(std::initializer_list<Size> sizes) : rank_(sizes.size()) {
    std::copy(sizes.begin(), sizes.end(), sizes_);
  }

  const Size* begin() const { return sizes_; }
  const Size* end() const { return sizes_ + rank_; }
  size_t rank() const { return rank_; }

 private:
  Size sizes_[3] = {};
  size_t rank_;
};

constexpr Shape kState = {{kBatch}, {kHidden}};
constexpr Shape kPairWeights = {{kHidden, Lltm::kSlots}, {kInput, 1, /*plus_hidden=*/1}};

// Such as "(3H, H+I)".
std::string text_of(const Shape& shape) {
  std::ostringstream text;
  for (const auto& [letter, times, plus_hidden] : shape) {
    text << (text.tellp() > 0 ? ", " : "(") << (plus_hidden > 0 ? "H+" : "");
    if (times != 1) text << times;
    text << kLetterTexts[letter];
    if (plus_hidden < -1) text << plus_hidden << 'H';
    if (plus_hidden == -1) text << "-H";
  }
  text << (shape.rank() == 1 ? ",)" : ")");
  return text.str();
}

class Sizes {
 public:
  // Empty while no argument has stated it.
  using Value = std::optional<SymInt>;

  const Value& operator[](Letter letter) const { return values_[letter]; }
  Value& operator[](Letter letter) { return values_[letter]; }

  // True if `actual` agrees with the known symbols. Stores the symbol that it states.
  bool agree(const Size& size, const SymInt& actual) {
    if (size.plus_hidden != 0) {
      const Value& hidden = values_[kHidden];
      if (!hidden.has_value()) return true;  // of no gate
      const SymInt symbol = actual - *hidden * size.plus_hidden;
      return symbol >= 0 && agree({size.letter}, symbol);
    }
    Value& value = values_[size.letter];
    if (value.has_value()) {
      return size.times == 1 ? equal(actual, *value) : equal(actual, *value * size.times);
    }
    if (size.times == 1) {
      value = actual;
      return true;
    }
    if (size.times == 0) return equal(actual, 0);
    if (!equal(actual % size.times, 0)) return false;
    value = actual / size.times;
    return true;
  }

  bool knows(const Size& size) const {
    return values_[size.letter].has_value() &&
           (size.plus_hidden == 0 || values_[kHidden].has_value());
  }
  // The symbols are known.
  SymInt of(const Size& size) const {
    const SymInt& symbol = *values_[size.letter];
    const SymInt value = size.times == 1 ? symbol : symbol * size.times;
    return size.plus_hidden == 0 ? value : value + *values_[kHidden] * size.plus_hidden;
  }

 private:
  std::array<Value, kLetters> values_;
};

// ---- the arguments of a call -------------------------------------------------

// weight_hh, or a view with the shape that weights with heads have as a single matrix.
Tensor dense_form(const char* op, const CellInfo& cell, const Tensor& weight_hh) {
  if (!has_heads(weight_hh)) return weight_hh;
  check_memory(op, "weight_hh", weight_hh);
  const SymInt heads = weight_hh.sym_size(0), units = weight_hh.sym_size(2);
  const int gates = cell.h.count();
  TORCH_CHECK_VALUE(
      heads > 1 && units > 0 && weight_hh.sym_size(1) == units * gates,
      expected(
          op,
          str("weight_hh of shape (",
              gates,
              "H, H), or of several heads (heads, ",
              gates,
              "H/heads, H/heads)"),
          shape_text(weight_hh.sym_sizes())));
  if (gates == 0) return weight_hh.new_empty_symint({0, heads * units});
  const Tensor one = weight_hh.select(0, 0).select(0, 0).narrow(0, 0, 1);
  return one.expand_symint({heads * units * gates, heads * units});
}

// The tensors of a call. The weights come first: calls of a module differ in the other arguments.
class Arguments {
 public:
  // For external loops, dtypes may differ: states and pre-activations have the compute dtype.
  Arguments(const char* op, const CellName& name, bool one_dtype = true)
      : op_(op), cell_(cell_of(op, name)), one_dtype_(one_dtype) {}
  Arguments(const Arguments&) = delete;  // refers to its member
  Arguments& operator=(const Arguments&) = delete;

  const CellInfo& cell() const { return cell_; }

  void add(const Tensor& tensor, const char* name, const Shape& shape, bool optional = false) {
    if (!optional) check_defined(op_, name, tensor);
    if (tensor.defined()) all_.push_back({tensor, name, shape});
  }
  void add_c(const Tensor& c, const char* name) {
    TORCH_CHECK_VALUE(
        cell_.has_c() || !c.defined(),
        expected(
            op_, str("no ", name, ", since the cell ", cell_.title(), " has none"), "a tensor"));
    add(c, name, {{kBatch}, {kHidden, cell_.states}}, /*optional=*/!cell_.has_c());
  }
  // A cell without c accepts any gradient, because its c' is empty.
  void add_grad_c(const Tensor& grad, const char* name) {
    if (cell_.has_c()) add(grad, name, {{kBatch}, {kHidden, cell_.states}}, /*optional=*/true);
  }
  void add_weights(const Tensor& weight_ih, const Tensor& weight_hh) {
    const bool concatenated = !weight_hh.defined();
    if (concatenated && !cell_.concatenated) check_concatenated_weights(weight_ih);
    dense_ = dense_form(op_, cell_, weight_hh);
    if (has_rows(concatenated)) add_weight_ih(weight_ih, concatenated);
    add(dense_, "weight_hh", {{kHidden, cell_.h.count()}, {kHidden}}, /*optional=*/true);
  }
  // Follows the states, which then state H.
  void add_weight_ih_without_rows(const Tensor& weight_ih, const Tensor& weight_hh) {
    const bool concatenated = !weight_hh.defined();
    if (!has_rows(concatenated)) add_weight_ih(weight_ih, concatenated);
  }
  Shape concatenated_shape() const {
    return {{kHidden, cell_.concatenated_blocks()}, {kInput, 1, /*plus_hidden=*/1 - cell_.given}};
  }
  // A custom cell's parameters are appended to bias_ih.
  void add_biases(const SequenceInputs& args) {
    add_parameters(args.bias_ih, "bias_ih", cell_.x.count() + cell_.parameters);
    add(args.bias_hh, "bias_hh", {{kHidden, cell_.h.count()}}, /*optional=*/true);
  }

  void add_parameters(const Tensor& tensor, const char* name, int blocks) {
    add(tensor, name, {{kHidden, blocks}}, /*optional=*/cell_.parameters == 0);
  }

  // Checks for tensors with elements, the first argument's device and dtype, and consistent shapes.
  // An error names the first argument that disagrees with the arguments before it. `derive`
  // sets sizes that no argument states, and is called after each argument.
  template <typename Derive>
  Sizes check(const Derive& derive) const {
    const Tensor& first = all_.front().tensor;
    for (const auto& [tensor, name, shape] : all_) {
      check_memory(op_, name, tensor);
      if (one_dtype_ && &tensor != &first) {
        check_dtype(op_, name, tensor, first.scalar_type());
      } else {
        TORCH_CHECK_TYPE(
            is_supported(tensor.scalar_type()),
            expected(
                op_,
                str(name, " of dtype float64, float32, bfloat16 or float16"),
                dtype_text(tensor.scalar_type())));
      }
      check_device(op_, name, tensor, first.device());
    }
    Sizes sizes;
    for (const Argument& a : all_) {
      const c10::SymIntArrayRef actual = a.tensor.sym_sizes();
      const auto agree = [&](const SymInt& n, const Size& size) { return sizes.agree(size, n); };
      const bool fits =
          std::equal(actual.begin(), actual.end(), a.shape.begin(), a.shape.end(), agree);
      TORCH_CHECK_VALUE(
          fits,
          expected(op_, str(a.name, " of shape ", text_of(a.shape, sizes)), shape_text(actual)));
      derive(sizes);
    }
    return sizes;
  }
  void check() const {
    check([](const Sizes&) {});
  }

 private:
  struct Argument {
    const Tensor& tensor;
    const char* name;
    Shape shape;
  };

  // With numbers, if all are known.
  static std::string text_of(const Shape& shape, const Sizes& sizes) {
    std::vector<SymInt> numbers;
    for (const Size& size : shape) {
      if (!sizes.knows(size)) return lltm::text_of(shape);
      numbers.push_back(sizes.of(size));
    }
    return shape_text(c10::SymIntArrayRef(numbers));
  }

  // A cell with two matrices also accepts a concatenated matrix. The message names weight_hh, whose
  // absence is more likely.
  void check_concatenated_weights(const Tensor& weight_ih) const {
    if (!weight_ih.defined() || weight_ih.dim() != 2) return;
    const auto what = [&] {
      const std::string shape = lltm::text_of(concatenated_shape());
      return str("weight_hh, or weight_ih of shape ", shape, ", the concatenated matrix");
    };
    TORCH_CHECK_VALUE(
        weight_ih.sym_size(1) * cell_.concatenated_blocks() >= weight_ih.sym_size(0),
        expected(op_, what(), str("only weight_ih of shape ", shape_text(weight_ih.sym_sizes()))));
  }

  // False if all gates that depend on x are given.
  bool has_rows(bool concatenated) const {
    return (concatenated ? cell_.concatenated_blocks() : cell_.x.count()) > 0;
  }
  void add_weight_ih(const Tensor& weight_ih, bool concatenated) {
    const Shape shape = {{kHidden, cell_.x.count()}, {kInput, 1, /*plus_hidden=*/-cell_.given}};
    add(weight_ih, "weight_ih", concatenated ? concatenated_shape() : shape);
  }

  const char* op_;
  const CellInfo& cell_;
  const bool one_dtype_;
  Tensor dense_;
  c10::SmallVector<Argument, 14> all_;
};

// A row of `columns` for each row of the input.
Shape rows_of(const SequenceInputs& args, const Size& columns) {
  if (args.is_step()) return {{kBatch}, columns};
  if (args.batch_sizes.defined()) return {{kRows}, columns};
  return {{kSteps}, {kBatch}, columns};
}

void add_inputs(Arguments& arguments, const SequenceInputs& args, bool prepacked = false) {
  const bool step = args.is_step();
  if (!prepacked) arguments.add_weights(args.weight_ih, args.weight_hh);
  arguments.add(args.input, "input", rows_of(args, {kInput}));
  arguments.add(args.h_0, step ? "h" : "h_0", kState);
  if (!prepacked) arguments.add_weight_ih_without_rows(args.weight_ih, args.weight_hh);
  arguments.add_c(args.c_0, step ? "c" : "c_0");
  arguments.add(args.recurrent_mask, "recurrent_mask", kState, /*optional=*/true);
  arguments.add_biases(args);
}

// checkpoint_steps: 0 without checkpoints.
void check_sizes(
    const char* op,
    const Arguments& arguments,
    const SequenceInputs& args,
    int64_t checkpoint_steps = 0) {
  const Tensor& batch_sizes = args.batch_sizes;
  const bool step = args.is_step();
  if (step && checkpoint_steps == 0) return arguments.check();
  const Sizes sizes = arguments.check([&](Sizes& s) {
    if (batch_sizes.defined()) s[kSteps] = batch_sizes.sym_numel();
    if (step) s[kSteps] = 1;
    if (!s[kSteps].has_value()) return;
    if (!s[kRows].has_value() && s[kBatch].has_value()) s[kRows] = *s[kSteps] * *s[kBatch];
    if (checkpoint_steps > 0 && !s[kCheckpoints].has_value()) {
      s[kCheckpoints] = checkpoint_count(*s[kSteps], checkpoint_steps);
    }
  });
  if (batch_sizes.defined()) {
    check_batch_sizes(op, batch_sizes, *sizes[kBatch], *sizes[kRows], args.input->device());
  }
}

// The backend that packed the weights reads dtype and sizes from their header.
void check_takes_prepacked(const char* op, const SequenceArgs& args) {
  const c10::Device device = args.input->device();
  TORCH_CHECK_NOT_IMPLEMENTED(
      !args.save, expected(op, "unpacked weight_ih to compute gradients", "prepacked weights"));
  check_memory(op, "weight_ih", args.weight_ih);
  check_device(op, "weight_ih", args.weight_ih, device);
  TORCH_CHECK(
      device.is_cpu() || device.is_meta(),
      expected(op, str("weight_ih prepacked on device ", device), "weights prepacked on the CPU"));
  for (const auto& [tensor, name] :
       {std::pair{&args.weight_hh, "weight_hh"}, {&args.recurrent_mask, "recurrent_mask"}}) {
    TORCH_CHECK_VALUE(
        !tensor->defined(), expected(op, str("no ", name, " with prepacked weights"), "a tensor"));
  }
}

}  // namespace

void check(const SequenceArgs& args) {
  const bool step = args.is_step();
  const char* const op = step ? "step" : "sequence";
  Arguments arguments(op, args.cell);
  const bool prepacked = !step && args.prepacked();
  add_inputs(arguments, args, prepacked);
  if (prepacked) check_takes_prepacked(op, args);
  check_sizes(op, arguments, args);
  if (args.reset.defined()) check_reset(op, args.input, args.reset);
  check_checkpoint_steps(op, args.checkpoint_steps);
}

namespace {

Shape shape_of_output(const CellInfo& cell, const SequenceInputs& args) {
  if (args.is_step()) return {{kHidden, 0}};
  return rows_of(args, {kHidden, cell.output_columns()});
}

void add_saved(Arguments& arguments, const SequenceBackwardArgs& args) {
  const CellInfo& cell = arguments.cell();
  arguments.add(args.output, "output", shape_of_output(cell, args));
  const Shape activations = {{args.is_step() ? kBatch : kRows}, {kHidden, cell.saved}};
  const Shape checkpoints = {{kCheckpoints}, {kBatch}, {kHidden, cell.state_columns()}};
  arguments.add(args.saved, "saved", args.checkpoint_steps > 0 ? checkpoints : activations);
}

}  // namespace

void check(const SequenceBackwardArgs& args) {
  constexpr const char* op = "sequence_backward";
  check_checkpoint_steps(op, args.checkpoint_steps);
  Arguments arguments(op, args.cell);
  add_inputs(arguments, args);
  add_saved(arguments, args);
  const Shape output = shape_of_output(arguments.cell(), args);
  arguments.add(args.grad_output, "grad_output", output, /*optional=*/true);
  arguments.add(args.grad_h_n, "grad_h_n", kState, /*optional=*/true);
  arguments.add_grad_c(args.grad_c_n, "grad_c_n");
  check_sizes(op, arguments, args, args.checkpoint_steps);
  check_reset(op, args.input, args.reset);
}

void check_batch_sizes(
    const char* where,
    const Tensor& batch_sizes,
    const std::optional<SymInt>& batch,
    const SymInt& rows,
    const at::Device& device) {
  check_dtype(where, "batch_sizes", batch_sizes, at::kLong);
  if (!device.is_meta()) check_device(where, "batch_sizes", batch_sizes, at::kCPU);
  check_memory(where, "batch_sizes", batch_sizes);
  TORCH_CHECK_VALUE(
      batch_sizes.dim() == 1,
      expected(where, "batch_sizes of shape (T,)", shape_text(batch_sizes.sym_sizes())));
  if (device.is_meta()) return;

  const std::vector<int64_t> values = values_of_batch_sizes(where, batch_sizes);
  TORCH_CHECK_VALUE(
      !batch.has_value() || values.empty() || equal(*batch, values[0]),
      expected(
          where, str("batch_sizes to begin with ", *batch, ", the batch size of h_0"), values[0]));
  int64_t sum = 0;
  for (size_t t = 0; t < values.size(); ++t) {
    const int64_t size = values[t];
    TORCH_CHECK_VALUE(
        size >= 0 && (t == 0 || size <= values[t - 1]),
        expected(
            where,
            "batch_sizes without negative or increasing values",
            t == 0 ? str(size) : str(size, " after ", values[t - 1])));
    TORCH_CHECK_VALUE(
        !__builtin_add_overflow(sum, size, &sum),
        "lltm::",
        where,
        ": expected batch_sizes with a sum below 2^63");
  }
  TORCH_CHECK_VALUE(
      rows == sum,
      expected(
          where,
          str("batch_sizes with the sum ", rows, ", the number of input rows"),
          str("the sum ", sum)));
}

void check_reset(const char* where, const Tensor& input, const Tensor& reset) {
  if (!reset.defined()) return;
  check_dtype(where, "reset", reset, at::kBool);
  check_device(where, "reset", reset, input.device());
  check_memory(where, "reset", reset);
  check_shape(where, "reset", reset, input.sym_sizes().slice(0, input.dim() - 1));
}

void check_prepack(
    const CellName& name,
    const Tensor& weight_ih,
    const Tensor& weight_hh,
    std::optional<at::ScalarType> dtype) {
  Arguments arguments("prepack", name);
  arguments.add_weights(weight_ih, weight_hh);
  arguments.add_weight_ih_without_rows(weight_ih, weight_hh);
  arguments.check();
  TORCH_CHECK_TYPE(
      !dtype.has_value() || dtype == at::kQInt8,
      expected("prepack", "dtype to be qint8 or None", dtype_text(*dtype)));
}

void check_prepack_int8(
    const Tensor& rows_ih,
    const Tensor& rows_hh,
    const Tensor& scales_ih,
    const Tensor& scales_hh) {
  constexpr const char* kOp = "_prepack_int8";
  const auto check =
      [&](const char* of_rows, const Tensor& rows, const char* name, const Tensor& scales) {
        check_tensor(kOp, of_rows, rows);
        check_dtype(kOp, of_rows, rows, at::kChar);
        TORCH_CHECK_VALUE(
            rows.dim() >= 2, expected(kOp, str(of_rows, " of at least 2 dimensions"), rows.dim()));
        check_tensor(kOp, name, scales);
        check_dtype(kOp, name, scales, at::kFloat);
        check_device(kOp, name, scales, rows.device());
        check_shape(kOp, name, scales, rows.sym_sizes().slice(0, rows.dim() - 1));
      };
  check("rows_ih", rows_ih, "scales_ih", scales_ih);
  check("rows_hh", rows_hh, "scales_hh", scales_hh);
}

void check_unpack(const CellName& name, const Tensor& concatenated) {
  Arguments arguments("_unpack", name);
  arguments.add(concatenated, "packed", arguments.concatenated_shape());
  arguments.check();
}

void check_sequence_operands(const SequenceInputs& args) {
  Arguments arguments("_sequence_operands", args.cell);
  arguments.add_weights(args.weight_ih, args.weight_hh);
  arguments.add_weight_ih_without_rows(args.weight_ih, args.weight_hh);
  arguments.add_biases(args);
  arguments.check();
}

namespace {

// A row of `values` for each row of h. c begins with h if the cell reads h.
void check_loop_step(
    Arguments& arguments,
    const char* op,
    const LoopStep& step,
    std::pair<const char*, const Tensor&> values,
    int columns,
    std::pair<const char*, const Tensor&> h,
    std::pair<const char*, const Tensor&> c) {
  const CellInfo& cell = arguments.cell();
  arguments.add(step.weight_h, "weight_h", {{kHidden, cell.h.count()}, {kHidden}});
  arguments.add(values.second, values.first, {{kBatch}, {kHidden, columns}});
  arguments.add(h.second, h.first, kState);
  arguments.add(c.second, c.first, {{kBatch}, {kHidden, cell.state_columns()}});
  arguments.add(step.bias_h, "bias_h", {{kHidden, cell.h.count()}}, /*optional=*/true);
  arguments.add_parameters(step.parameters, "parameters", cell.parameters);
  arguments.add(step.recurrent_mask, "recurrent_mask", kState, /*optional=*/true);
  arguments.check();
  check_reset(op, h.second, step.reset);
}

}  // namespace

void check_sequence_step(
    const LoopStep& step, const Tensor& z_x, const Tensor& h, const Tensor& c) {
  constexpr const char* kOp = "_sequence_step";
  Arguments arguments(kOp, step.cell, /*one_dtype=*/false);
  const CellInfo& cell = arguments.cell();
  check_loop_step(
      arguments, kOp, step, {"z_x", z_x}, cell.x.count() + cell.given, {"h", h}, {"c", c});
}

void check_sequence_step_backward(
    const LoopStep& step, const Tensor& activations, const Tensor& dh, const Tensor& dc) {
  constexpr const char* kOp = "_sequence_step_backward";
  Arguments arguments(kOp, step.cell, /*one_dtype=*/false);
  check_loop_step(
      arguments,
      kOp,
      step,
      {"activations", activations},
      arguments.cell().saved,
      {"dh", dh},
      {"dc", dc});
}

void check_sequence_gradients(
    const SequenceBackwardArgs& args, const Tensor& dz, const Tensor& dh, const Tensor& dc) {
  constexpr const char* kOp = "_sequence_gradients";
  Arguments arguments(kOp, args.cell, /*one_dtype=*/false);
  const CellInfo& cell = arguments.cell();
  add_inputs(arguments, args);
  add_saved(arguments, args);
  arguments.add(dz, "dz", rows_of(args, {kHidden, cell.grad_columns()}));
  arguments.add(dh, "dh", kState);
  arguments.add(dc, "dc", {{kBatch}, {kHidden, cell.state_columns()}});
  check_sizes(kOp, arguments, args);
  check_reset(kOp, args.input, args.reset);
}

void check_pair_forward(
    const Tensor& input,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const Tensor& old_h,
    const Tensor& old_cell) {
  Arguments arguments("forward", *find_cell(Lltm::kCell.name));
  arguments.add(weights, "weights", kPairWeights);
  arguments.add(input, "input", {{kBatch}, {kInput}});
  arguments.add(or_undefined(bias), "bias", {{kHidden, Lltm::kSlots}}, /*optional=*/true);
  arguments.add(old_h, "old_h", kState);
  arguments.add(old_cell, "old_cell", kState);
  arguments.check();
}

void check_pair_backward(
    const std::array<Tensor, 6>& states,
    const Tensor& X,
    const Tensor& gate_weights,
    const Tensor& weights) {
  constexpr const char* kNames[] = {
      "grad_h", "grad_cell", "new_cell", "input_gate", "output_gate", "candidate_cell"};
  Arguments arguments("backward", *find_cell(Lltm::kCell.name));
  arguments.add(weights, "weights", kPairWeights);
  arguments.add(X, "X", {{kBatch}, {kInput, 1, /*plus_hidden=*/1}});
  for (size_t k = 0; k < states.size(); ++k) arguments.add(states[k], kNames[k], kState);
  arguments.add(gate_weights, "gate_weights", {{kBatch}, {kHidden, Lltm::kSlots}});
  arguments.check();
}

}  // namespace lltm
