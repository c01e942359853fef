#include "op/check.h"

#include "cell/cells.h"
#include "common/checkpoints.h"
#include "common/format.h"
#include "common/steps.h"
#include "common/weights.h"

#include <c10/core/Layout.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace lltm {
namespace {

using at::Tensor;
using c10::SymInt;

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

bool equal(const SymInt& a, const SymInt& b) {
  if (!a.is_heap_allocated() && !b.is_heap_allocated()) {  // numbers
    return a.as_int_unchecked() == b.as_int_unchecked();
  }
  return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

template <typename Where>
void check_strided(const Where& op, const Tensor& tensor, const char* name) {
  TORCH_CHECK(
      tensor.layout() == at::kStrided,
      op,
      ": expected ",
      name,
      " of layout Strided, got ",
      tensor.layout());
}

// Fails if torch.vmap maps over batch_sizes, at any level.
template <typename Where>
std::vector<int64_t> values_of_batch_sizes(const Where& op, const Tensor& sizes) {
  try {
    return read_batch_sizes(sizes);
  } catch (const c10::Error&) {
    TORCH_CHECK(
        false,
        op,
        ": expected the same batch_sizes for all samples of vmap, got batch_sizes per sample");
  }
}

// ---- symbolic shapes ---------------------------------------------------------

// The symbols of lltm/ops.h, and K, the number of activation checkpoints.
enum Letter : uint8_t { kSteps, kBatch, kRows, kInput, kHidden, kCheckpoints, kLetters };
constexpr char kLetterTexts[] = "TBNIHK";

// A size: a symbol, a multiple of a symbol, H + I, or I without the columns of given gates.
struct Size {
  Letter letter;
  int64_t times = 1;
  bool plus_input = false;
  int64_t given = 0;
};
using Shape = std::span<const Size>;

constexpr Size kStepInput[] = {{kBatch}, {kInput}};
constexpr Size kPaddedInput[] = {{kSteps}, {kBatch}, {kInput}};
constexpr Size kPackedInput[] = {{kRows}, {kInput}};
constexpr Size kState[] = {{kBatch}, {kHidden}};
constexpr Size kConcatenated[] = {{kBatch}, {kHidden, 1, /*plus_input=*/true}};

struct CellShapes {
  // `rows`: of the input.
  explicit CellShapes(const CellInfo& cell, Letter rows = kRows)
      : weights{
            {kHidden, cell.concatenated_blocks()}, {kHidden, 1, /*plus_input=*/true, cell.given}},
        weight_ih{{kHidden, cell.x.count()}, {kInput, 1, /*plus_input=*/false, cell.given}},
        weight_hh{{kHidden, cell.h.count()}, {kHidden}},
        bias_ih{{kHidden, cell.x.count() + cell.parameters}},
        bias_hh{{kHidden, cell.h.count()}},
        c{{kBatch}, {kHidden, cell.states}},
        gates_of_step{{kBatch}, {kHidden, cell.slots}},
        activations{{rows}, {kHidden, cell.saved}},
        checkpoints{{kCheckpoints}, {kBatch}, {kHidden, cell.state_columns()}},
        padded_output{{kSteps}, {kBatch}, {kHidden, cell.output_columns()}},
        packed_output{{kRows}, {kHidden, cell.output_columns()}} {}

  Size weights[2], weight_ih[2], weight_hh[2], bias_ih[1], bias_hh[1], c[2];
  Size gates_of_step[2], activations[2], checkpoints[3];
  Size padded_output[3], packed_output[2];
};

// Such as "(3H, H+I)".
std::string text_of(Shape shape) {
  std::ostringstream text;
  text << '(';
  for (size_t d = 0; d < shape.size(); ++d) {
    const auto& [letter, times, plus_input, given] = shape[d];
    if (d > 0) text << ", ";
    if (times != 1) text << times;
    text << kLetterTexts[letter] << (plus_input ? "+I" : "");
    if (given > 0) text << '-' << (given > 1 ? std::to_string(given) : "") << 'H';
  }
  text << (shape.size() == 1 ? ",)" : ")");
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
    Value& value = values_[size.letter];
    const Value& hidden = values_[kHidden];
    if (!hidden.has_value() && (size.plus_input || size.given > 0)) return true;  // of no gate
    if (size.plus_input) {
      const SymInt input = actual - *hidden + *hidden * size.given;
      return input >= 0 && agree({kInput}, input);
    }
    if (value.has_value()) return equal(actual, of(size));
    if (size.times == 0) return equal(actual, 0);
    if (size.given > 0) {
      value = actual + *hidden * size.given;
      return true;
    }
    if (size.times > 1 && !equal(actual % size.times, 0)) return false;
    value = size.times > 1 ? actual / size.times : actual;
    return true;
  }

  bool knows(const Size& size) const {
    const bool of_hidden = size.plus_input || size.given > 0;
    const Letter letter = size.plus_input ? kInput : size.letter;
    return values_[letter].has_value() && (!of_hidden || values_[kHidden].has_value());
  }
  // The symbols are known.
  SymInt of(const Size& size) const {
    const SymInt& symbol = *values_[size.letter];
    const SymInt value = size.times == 1 ? symbol : symbol * size.times;
    const SymInt whole = size.plus_input ? value + *values_[kInput] : value;
    return size.given > 0 ? whole - *values_[kHidden] * size.given : whole;
  }

 private:
  std::array<Value, kLetters> values_;
};

// ---- the arguments of a call -------------------------------------------------

struct Argument {
  const Tensor& tensor;
  const char* name;
  Shape shape;
  bool optional = false;
};

// Checks for strided tensors with the first argument's device and dtype, and for consistent shapes.
// An error names the first argument that disagrees with the arguments before it.
class Checker {
 public:
  // `arguments` must outlive the checker.
  Checker(const char* op, std::span<const Argument> arguments) : op_(op), arguments_(arguments) {
    for (const auto& [tensor, name, shape, optional] : arguments) {
      TORCH_CHECK_TYPE(
          tensor.defined() || optional,
          op_,
          ": expected ",
          name,
          " to be a tensor, got an undefined tensor");
    }
    const auto known = std::find_if(
        arguments.begin(), arguments.end(), [](const Argument& a) { return a.tensor.defined(); });
    const Tensor& first = known->tensor;
    TORCH_CHECK_TYPE(
        is_supported(first.scalar_type()),
        op_,
        ": expected ",
        known->name,
        " of dtype float64, float32, bfloat16 or float16, got ",
        dtype_text(first.scalar_type()));
    for (const auto& [tensor, name, shape, optional] : arguments) {
      if (!tensor.defined()) continue;
      check_strided(op_, tensor, name);
      TORCH_CHECK_TYPE(
          tensor.scalar_type() == first.scalar_type(),
          op_,
          ": expected ",
          name,
          " of dtype ",
          dtype_text(first.scalar_type()),
          ", got ",
          dtype_text(tensor.scalar_type()));
      TORCH_CHECK(
          tensor.device() == first.device(),
          op_,
          ": expected ",
          name,
          " on device ",
          first.device(),
          ", got ",
          tensor.device());
    }
  }

  // `derive` sets sizes that no argument states, and is called after each argument.
  template <typename Derive>
  Sizes sizes(const Derive& derive) const {
    Sizes sizes;
    for (const Argument& a : arguments_) {
      if (!a.tensor.defined()) continue;
      const c10::SymIntArrayRef actual = a.tensor.sym_sizes();
      bool fits = actual.size() == a.shape.size();
      for (size_t d = 0; fits && d < actual.size(); ++d) fits = sizes.agree(a.shape[d], actual[d]);
      if (!fits) report_shape(a, sizes);
      derive(sizes);
    }
    return sizes;
  }
  Sizes sizes() const {
    return sizes([](const Sizes&) {});
  }

  // With numbers, if all are known.
  void report_shape(const Argument& a, const Sizes& sizes) const {
    std::vector<SymInt> expected;
    for (const Size& size : a.shape) {
      if (sizes.knows(size)) expected.push_back(sizes.of(size));
    }
    TORCH_CHECK_VALUE(
        false,
        op_,
        ": expected ",
        a.name,
        " of shape ",
        expected.size() == a.shape.size() ? shape_text(c10::SymIntArrayRef(expected))
                                          : text_of(a.shape),
        ", got ",
        shape_text(a.tensor.sym_sizes()));
  }

 private:
  const char* op_;
  std::span<const Argument> arguments_;
};

template <typename Args>
bool is_prepacked(const Args& args) {
  return !kIsStep<Args> && args.prepacked();
}
template <typename Args>
Shape input_shape(const Args& args) {
  if (kIsStep<Args>) return kStepInput;
  return args.batch_sizes.defined() ? Shape(kPackedInput) : Shape(kPaddedInput);
}
Shape output_shape(const CellShapes& shapes, const SequenceInputs& args) {
  return args.batch_sizes.defined() ? Shape(shapes.packed_output) : Shape(shapes.padded_output);
}

void check_checkpoint_steps(const char* op, int64_t checkpoint_steps) {
  TORCH_CHECK_VALUE(
      checkpoint_steps >= 0,
      op,
      ": expected checkpoint_steps to be at least 0, got ",
      checkpoint_steps);
}

// weight_hh, or a view with the shape that weights with heads have as a single matrix.
Tensor dense_form(const char* op, const CellInfo& cell, const Tensor& weight_hh) {
  if (!has_heads(weight_hh)) return weight_hh;
  const SymInt heads = weight_hh.sym_size(0), units = weight_hh.sym_size(2);
  TORCH_CHECK_VALUE(
      heads > 1 && units > 0 && weight_hh.sym_size(1) == units * cell.h.count(),
      op,
      ": expected weight_hh of shape (",
      cell.h.count(),
      "H, H), or of several heads (heads, ",
      cell.h.count(),
      "H/heads, H/heads), got ",
      shape_text(weight_hh.sym_sizes()));
  if (cell.h.count() == 0) return weight_hh.new_empty_symint({0, heads * units});
  const Tensor one = weight_hh.select(0, 0).select(0, 0).narrow(0, 0, 1);
  return one.expand_symint({heads * units * cell.h.count(), heads * units});
}

// The weights come first: calls of a module differ in the other arguments.
class Arguments {
 public:
  Arguments(const char* op, const CellName& name, Letter rows = kRows)
      : cell_(get_cell(op, name)), shapes_(cell_, rows) {}
  Arguments(const Arguments&) = delete;  // its arguments refer to its shapes
  Arguments& operator=(const Arguments&) = delete;

  const CellShapes& shapes() const { return shapes_; }

  void add(const Tensor& tensor, const char* name, Shape shape, bool optional = false) {
    all_.push_back({tensor, name, shape, optional});
  }
  void add_c(const char* op, const Tensor& c, const char* name) {
    TORCH_CHECK_VALUE(
        cell_.has_c() || !c.defined(),
        op,
        ": expected no ",
        name,
        ", since the cell ",
        cell_.title(),
        " has none, got a tensor");
    add(c, name, shapes_.c, /*optional=*/!cell_.has_c());
  }
  // A cell without c accepts any gradient, because its c' is empty.
  void add_grad_c(const Tensor& grad, const char* name) {
    if (cell_.has_c()) add(grad, name, shapes_.c, /*optional=*/true);
  }
  void add_weights(const char* op, const SequenceInputs& args) {
    const bool concatenated = !args.weight_hh.defined();
    if (concatenated && !cell_.concatenated) check_concatenated(op, args.weight_ih);
    dense_ = dense_form(op, cell_, args.weight_hh);
    if (has_rows(concatenated)) add_weight_ih(args.weight_ih, concatenated);
    add(dense_, "weight_hh", shapes_.weight_hh, /*optional=*/true);
  }
  // Follows the states, which then state H.
  void add_weight_ih_without_rows(const SequenceInputs& args) {
    const bool concatenated = !args.weight_hh.defined();
    if (!has_rows(concatenated)) add_weight_ih(args.weight_ih, concatenated);
  }
  // A custom cell's parameters are appended to bias_ih.
  void add_biases(const SequenceInputs& args) {
    add(args.bias_ih, "bias_ih", shapes_.bias_ih, /*optional=*/cell_.parameters == 0);
    add(args.bias_hh, "bias_hh", shapes_.bias_hh, /*optional=*/true);
  }

  operator std::span<const Argument>() const { return {all_.data(), all_.size()}; }

 private:
  // A cell with two matrices also accepts a concatenated matrix. The message names weight_hh, whose
  // absence is more likely.
  void check_concatenated(const char* op, const Tensor& weight_ih) const {
    if (!weight_ih.defined() || weight_ih.dim() != 2) return;
    const SymInt rows = weight_ih.sym_size(0);
    TORCH_CHECK_VALUE(
        weight_ih.sym_size(1) * cell_.concatenated_blocks() >= rows,
        op,
        ": expected weight_hh, or weight_ih of shape ",
        text_of(shapes_.weights),
        ", the concatenated matrix, got only weight_ih of shape ",
        shape_text(weight_ih.sym_sizes()));
  }

  // False if all gates that depend on x are given.
  bool has_rows(bool concatenated) const {
    return (concatenated ? cell_.concatenated_blocks() : cell_.x.count()) > 0;
  }
  void add_weight_ih(const Tensor& weight_ih, bool concatenated) {
    add(weight_ih, "weight_ih", concatenated ? Shape(shapes_.weights) : Shape(shapes_.weight_ih));
  }

  const CellInfo& cell_;
  const CellShapes shapes_;
  Tensor dense_;
  c10::SmallVector<Argument, 14> all_;
};

template <typename Args>
void add_inputs(Arguments& arguments, const char* op, const Args& args) {
  const bool prepacked = is_prepacked(args);
  if (!prepacked) arguments.add_weights(op, args);
  arguments.add(args.input, "input", input_shape(args));
  arguments.add(args.h_0, kIsStep<Args> ? "h" : "h_0", kState);
  if (!prepacked) arguments.add_weight_ih_without_rows(args);
  arguments.add_c(op, args.c_0, kIsStep<Args> ? "c" : "c_0");
  if (args.recurrent_mask.defined()) arguments.add(args.recurrent_mask, "recurrent_mask", kState);
  arguments.add_biases(args);
}

// checkpoint_steps: 0 without checkpoints.
template <typename Args>
void check_sizes(
    const char* op, const Arguments& arguments, const Args& args, int64_t checkpoint_steps = 0) {
  if constexpr (kIsStep<Args>) {
    Checker(op, arguments).sizes();
    return;
  }
  const Tensor& batch_sizes = args.batch_sizes;
  const Sizes sizes = Checker(op, arguments).sizes([&](Sizes& s) {
    if (batch_sizes.defined()) s[kSteps] = batch_sizes.sym_numel();
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
      !args.save, op, ": expected unpacked weight_ih to compute gradients, got prepacked weights");
  TORCH_CHECK(
      args.weight_ih->device() == device,
      op,
      ": expected weight_ih on device ",
      device,
      ", got ",
      args.weight_ih->device());
  TORCH_CHECK(
      device.is_cpu() || device.is_meta(),
      op,
      ": expected weight_ih prepacked on device ",
      device,
      ", got weights prepacked on the CPU");
  for (const auto& [tensor, name] :
       {std::pair{&args.weight_hh, "weight_hh"}, {&args.recurrent_mask, "recurrent_mask"}}) {
    TORCH_CHECK_VALUE(
        !tensor->defined(), op, ": expected no ", name, " with prepacked weights, got a tensor");
  }
}

template <typename Args>
void check_forward(const char* op, const Args& args) {
  Arguments arguments(op, args.cell);
  add_inputs(arguments, op, args);
  if (is_prepacked(args)) check_takes_prepacked(op, args);
  check_sizes(op, arguments, args);
  if (kIsStep<Args>) return;
  check_reset(op, args.input, args.reset);
  check_checkpoint_steps(op, args.checkpoint_steps);
}

template <typename Args>
void check_backward(const char* op, const Args& args) {
  constexpr bool step = kIsStep<Args>;
  check_checkpoint_steps(op, args.checkpoint_steps);
  Arguments arguments(op, args.cell, step ? kBatch : kRows);
  const CellShapes& shapes = arguments.shapes();
  add_inputs(arguments, op, args);
  if (!step) arguments.add(args.output, "output", output_shape(shapes, args));
  arguments.add(
      args.saved,
      step ? "activations" : "saved",
      args.checkpoint_steps > 0 ? Shape(shapes.checkpoints) : Shape(shapes.activations));
  if (!step) {
    arguments.add(args.grad_output, "grad_output", output_shape(shapes, args), /*optional=*/true);
  }
  arguments.add(args.grad_h_n, step ? "grad_h" : "grad_h_n", kState, /*optional=*/true);
  arguments.add_grad_c(args.grad_c_n, step ? "grad_c" : "grad_c_n");
  check_sizes(op, arguments, args, args.checkpoint_steps);
  check_reset(op, args.input, args.reset);
}

}  // namespace

void check_batch_sizes(
    const std::string& op,
    const Tensor& batch_sizes,
    const std::optional<SymInt>& batch,
    const SymInt& rows,
    const at::Device& device) {
  TORCH_CHECK_TYPE(
      batch_sizes.scalar_type() == at::kLong,
      op,
      ": expected batch_sizes of dtype int64, got ",
      dtype_text(batch_sizes.scalar_type()));
  TORCH_CHECK(
      batch_sizes.device().is_cpu() || device.is_meta(),
      op,
      ": expected batch_sizes on device cpu, got ",
      batch_sizes.device());
  check_strided(op, batch_sizes, "batch_sizes");
  TORCH_CHECK_VALUE(
      batch_sizes.dim() == 1,
      op,
      ": expected batch_sizes of shape (T,), got ",
      shape_text(batch_sizes.sym_sizes()));
  if (device.is_meta()) return;

  const std::vector<int64_t> values = values_of_batch_sizes(op, batch_sizes);
  TORCH_CHECK_VALUE(
      !batch.has_value() || values.empty() || equal(*batch, values[0]),
      op,
      ": expected batch_sizes to begin with ",
      *batch,
      ", the batch size of h_0, got ",
      values[0]);
  int64_t sum = 0;
  for (size_t t = 0; t < values.size(); ++t) {
    const int64_t size = values[t];
    TORCH_CHECK_VALUE(
        size >= 0 && (t == 0 || size <= values[t - 1]),
        op,
        ": expected batch_sizes without negative or increasing values, got ",
        size,
        t > 0 ? " after " + std::to_string(values[t - 1]) : "");
    TORCH_CHECK_VALUE(
        !__builtin_add_overflow(sum, size, &sum),
        op,
        ": expected batch_sizes with a sum below 2^63");
  }
  TORCH_CHECK_VALUE(
      rows == sum,
      op,
      ": expected batch_sizes with the sum ",
      rows,
      ", the number of input rows, got the sum ",
      sum);
}

void check_reset(const std::string& op, const Tensor& input, const Tensor& reset) {
  if (!reset.defined()) return;
  TORCH_CHECK_TYPE(
      reset.scalar_type() == at::kBool,
      op,
      ": expected reset of dtype bool, got ",
      dtype_text(reset.scalar_type()));
  TORCH_CHECK(
      reset.device() == input.device(),
      op,
      ": expected reset on device ",
      input.device(),
      ", got ",
      reset.device());
  TORCH_CHECK(
      reset.layout() == at::kStrided,
      op,
      ": expected reset of layout Strided, got ",
      reset.layout());
  const c10::SymIntArrayRef expected = input.sym_sizes().slice(0, input.dim() - 1);
  const c10::SymIntArrayRef actual = reset.sym_sizes();
  TORCH_CHECK_VALUE(
      std::equal(actual.begin(), actual.end(), expected.begin(), expected.end(), equal),
      op,
      ": expected reset of shape ",
      shape_text(expected),
      ", got ",
      shape_text(actual));
}

void check(const StepArgs& args) {
  check_forward("lltm::step", args);
}
void check(const SequenceArgs& args) {
  check_forward("lltm::sequence", args);
}
void check(const StepBackwardArgs& args) {
  check_backward("lltm::step_backward", args);
}
void check(const SequenceBackwardArgs& args) {
  check_backward("lltm::sequence_backward", args);
}

void check_prepack(
    const CellName& name,
    const Tensor& weight_ih,
    const Tensor& weight_hh,
    std::optional<at::ScalarType> dtype) {
  constexpr const char* kOp = "lltm::prepack";
  const CellInfo& cell = get_cell(kOp, name);
  const CellShapes shapes(cell);
  const bool concatenated = !weight_hh.defined();
  const Shape shape = concatenated ? Shape(shapes.weights) : Shape(shapes.weight_ih);
  const Tensor dense = dense_form(kOp, cell, weight_hh);
  const Argument matrices[] = {
      {weight_ih, "weight_ih", shape},
      {dense, "weight_hh", shapes.weight_hh, /*optional=*/cell.x.count() > 0}};
  const bool has_rows = concatenated || cell.x.count() > 0;  // states H
  const Argument arguments[] = {matrices[has_rows ? 0 : 1], matrices[has_rows ? 1 : 0]};
  Checker(kOp, arguments).sizes();
  TORCH_CHECK_TYPE(
      !dtype.has_value() || dtype == at::kQInt8,
      "lltm::prepack: expected dtype to be qint8 or None, got ",
      dtype_text(*dtype));
}

void check_pair_forward(
    const Tensor& input,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const Tensor& old_h,
    const Tensor& old_cell) {
  const CellShapes shapes(Lltm::kCell);
  const Argument arguments[] = {
      {weights, "weights", shapes.weights},
      {input, "input", kStepInput},
      {or_undefined(bias), "bias", shapes.bias_ih, /*optional=*/true},
      {old_h, "old_h", kState},
      {old_cell, "old_cell", kState}};
  Checker("lltm::forward", arguments).sizes();
}

void check_pair_backward(
    const std::array<Tensor, 6>& states,
    const Tensor& X,
    const Tensor& gate_weights,
    const Tensor& weights) {
  const CellShapes shapes(Lltm::kCell);
  const Argument arguments[] = {
      {weights, "weights", shapes.weights},
      {X, "X", kConcatenated},
      {states[0], "grad_h", kState},
      {states[1], "grad_cell", kState},
      {states[2], "new_cell", kState},
      {states[3], "input_gate", kState},
      {states[4], "output_gate", kState},
      {states[5], "candidate_cell", kState},
      {gate_weights, "gate_weights", shapes.gates_of_step}};
  Checker("lltm::backward", arguments).sizes();
}

}  // namespace lltm
