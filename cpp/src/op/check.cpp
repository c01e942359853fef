#include "op/check.h"

#include "cell/cell.h"
#include "common/format.h"
#include "common/steps.h"

#include <c10/core/Layout.h>
#include <c10/util/Exception.h>

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
  return a.sym_eq(b).expect_true(__FILE__, __LINE__);
}

// The shape of weights in error messages: "(3H, H+I)" for three gates.
static_assert(Cell::kGates < 10);
constexpr char kWeightsShape[] = {'(', '0' + Cell::kGates, 'H', ',', ' ', 'H', '+', 'I', ')', '\0'};

struct Argument {
  const Tensor& tensor;
  const char* name;
  bool optional = false;
};
using Arguments = std::initializer_list<Argument>;

// The most frequent value of `property` among the arguments; the first of several equally
// frequent ones.
template <typename Property>
auto most_frequent(Arguments arguments, Property property) {
  using Value = decltype(property(std::declval<const Tensor&>()));
  std::optional<Value> result;
  int64_t most = 0;
  for (const Argument& candidate : arguments) {
    if (!candidate.tensor.defined()) continue;
    const Value value = property(candidate.tensor);
    int64_t count = 0;
    for (const Argument& a : arguments) count += a.tensor.defined() && property(a.tensor) == value;
    if (count > most) {
      most = count;
      result = value;
    }
  }
  return *result;
}

// Checks the arguments of one call: each must be a strided tensor, and all must
// be of one device and one dtype. Where they disagree, the error names an argument that
// differs from the majority.
class Checker {
 public:
  Checker(const char* op, Arguments arguments) : op_(op) {
    bool agree = true;
    const Tensor* first = nullptr;
    for (const auto& [tensor, name, optional] : arguments) {
      TORCH_CHECK_TYPE(
          tensor.defined() || optional,
          op_,
          ": expected ",
          name,
          " to be a tensor, got an undefined tensor");
      if (!tensor.defined()) continue;
      strided(tensor, name);
      if (first == nullptr) {
        first = &tensor;
        supported(tensor, name);
      }
      agree = agree && tensor.scalar_type() == first->scalar_type() &&
              tensor.device() == first->device();
    }
    device_ = first->device();
    if (!agree) report_mismatch(arguments);
  }

  // `pattern` is the shape in the error message, such as "(B, I)".
  void rank(const Tensor& tensor, const char* name, int64_t dims, const char* pattern) const {
    TORCH_CHECK_VALUE(
        tensor.dim() == dims,
        op_,
        ": expected ",
        name,
        " of shape ",
        pattern,
        ", got ",
        shape_text(tensor.sym_sizes()));
  }

  // An absent optional argument passes.
  void shape(const Tensor& tensor, const char* name, std::initializer_list<SymInt> expected) const {
    if (!tensor.defined()) return;
    const c10::SymIntArrayRef sizes = tensor.sym_sizes();
    bool same = sizes.size() == expected.size();
    for (size_t d = 0; same && d < expected.size(); ++d) {
      same = equal(sizes[d], expected.begin()[d]);
    }
    TORCH_CHECK_VALUE(
        same,
        op_,
        ": expected ",
        name,
        " of shape ",
        shape_text(c10::SymIntArrayRef(expected)),
        ", got ",
        shape_text(sizes));
  }

  // H, from the shape of the weights.
  SymInt hidden(const Tensor& weights) const {
    rank(weights, "weights", 2, kWeightsShape);
    const SymInt rows = weights.sym_size(0);
    TORCH_CHECK_VALUE(
        equal(rows % Cell::kGates, 0),
        op_,
        ": expected weights of shape ",
        kWeightsShape,
        ", got ",
        shape_text(weights.sym_sizes()));
    return rows / Cell::kGates;
  }

  void weights_and_bias(
      const Tensor& weights, const Tensor& bias, const SymInt& input, const SymInt& hidden) const {
    shape(weights, "weights", {hidden * Cell::kGates, hidden + input});
    shape(bias, "bias", {hidden * Cell::kGates});
  }

  // batch_sizes of a packed sequence. On the meta device it has no values to check.
  void batch_sizes(const Tensor& sizes, const SymInt& batch, const SymInt& rows) const {
    TORCH_CHECK_TYPE(
        sizes.scalar_type() == at::kLong,
        op_,
        ": expected batch_sizes of dtype int64, got ",
        dtype_text(sizes.scalar_type()));
    TORCH_CHECK(
        sizes.device().is_cpu() || device_.is_meta(),
        op_,
        ": expected batch_sizes on device cpu, got ",
        sizes.device());
    strided(sizes, "batch_sizes");
    rank(sizes, "batch_sizes", 1, "(T,)");
    if (device_.is_meta()) return;

    const int64_t first = batch.guard_int(__FILE__, __LINE__);
    const std::vector<int64_t> values = values_of_batch_sizes(sizes);
    int64_t previous = first;
    int64_t sum = 0;
    for (size_t t = 0; t < values.size(); ++t) {
      const int64_t size = values[t];
      TORCH_CHECK_VALUE(
          t > 0 || size == first,
          op_,
          ": expected batch_sizes to begin with ",
          first,
          ", the batch size of h_0, got ",
          size);
      TORCH_CHECK_VALUE(
          size >= 0 && size <= previous,
          op_,
          ": expected batch_sizes without negative or increasing values, got ",
          size,
          " after ",
          previous);
      previous = size;
      sum += size;
    }
    TORCH_CHECK_VALUE(
        rows == sum,
        op_,
        ": expected input of shape (",
        sum,
        ", I), the sum of batch_sizes, got ",
        rows,
        " rows");
  }

 private:
  // Reading fails where torch.vmap maps over batch_sizes, at any level.
  std::vector<int64_t> values_of_batch_sizes(const Tensor& sizes) const {
    try {
      return read_batch_sizes(sizes);
    } catch (const c10::Error&) {
      TORCH_CHECK(
          false, op_, ": expected one batch_sizes for all samples of vmap, got one for each");
    }
  }

  void supported(const Tensor& tensor, const char* name) const {
    TORCH_CHECK_TYPE(
        is_supported(tensor.scalar_type()),
        op_,
        ": expected ",
        name,
        " of dtype float64, float32, bfloat16 or float16, got ",
        dtype_text(tensor.scalar_type()));
  }

  void report_mismatch(Arguments arguments) const {
    const auto dtype = most_frequent(arguments, [](const Tensor& t) { return t.scalar_type(); });
    const auto device = most_frequent(arguments, [](const Tensor& t) { return t.device(); });
    for (const auto& [tensor, name, optional] : arguments) {
      if (!tensor.defined()) continue;
      TORCH_CHECK_TYPE(
          tensor.scalar_type() == dtype,
          op_,
          ": expected ",
          name,
          " of dtype ",
          dtype_text(dtype),
          ", got ",
          dtype_text(tensor.scalar_type()));
      TORCH_CHECK(
          tensor.device() == device,
          op_,
          ": expected ",
          name,
          " on device ",
          device,
          ", got ",
          tensor.device());
    }
  }

  void strided(const Tensor& tensor, const char* name) const {
    TORCH_CHECK(
        tensor.layout() == at::kStrided,
        op_,
        ": expected ",
        name,
        " of layout Strided, got ",
        tensor.layout());
  }

  const char* op_;
  at::Device device_ = at::kCPU;
};

struct CellSizes {
  SymInt batch, input, hidden;
};

CellSizes cell_sizes(const Checker& check, const Tensor& input, const Tensor& weights) {
  check.rank(input, "input", 2, "(B, I)");
  return {input.sym_size(0), input.sym_size(1), check.hidden(weights)};
}

// Rows is T * B, or N when packed.
struct SequenceSizes {
  SymInt steps, batch, rows, input, hidden;
};

SequenceSizes sequence_sizes(
    const Checker& check,
    const Tensor& input,
    const Tensor& h_0,
    const SymInt& hidden,
    const Tensor& batch_sizes) {
  const bool packed = batch_sizes.defined();
  check.rank(input, "input", packed ? 2 : 3, packed ? "(N, I)" : "(T, B, I)");
  SequenceSizes sizes;
  sizes.hidden = hidden;
  sizes.input = input.sym_size(-1);
  check.rank(h_0, "h_0", 2, "(B, H)");
  if (packed) {
    sizes.steps = batch_sizes.sym_numel();
    sizes.batch = h_0.sym_size(0);
    sizes.rows = input.sym_size(0);
    check.batch_sizes(batch_sizes, sizes.batch, sizes.rows);
  } else {
    sizes.steps = input.sym_size(0);
    sizes.batch = input.sym_size(1);
    sizes.rows = sizes.steps * sizes.batch;
  }
  check.shape(h_0, "h_0", {sizes.batch, sizes.hidden});
  return sizes;
}

}  // namespace

void check_cell(const CellArgs& args) {
  const auto& [input, h, c, weights, bias, save] = args;
  const Checker check(
      "lltm::cell",
      {{input, "input"},
       {h, "h"},
       {c, "c"},
       {weights, "weights"},
       {bias, "bias", /*optional=*/true}});
  const CellSizes sizes = cell_sizes(check, input, weights);
  check.shape(h, "h", {sizes.batch, sizes.hidden});
  check.shape(c, "c", {sizes.batch, sizes.hidden});
  check.weights_and_bias(weights, bias, sizes.input, sizes.hidden);
}

void check_cell_backward(const CellBackwardArgs& args) {
  const auto& [grad_h, grad_c, input, h, weights, activations, output_mask] = args;
  const Checker check(
      "lltm::cell_backward",
      {{input, "input"},
       {grad_h, "grad_h", /*optional=*/true},
       {grad_c, "grad_c", /*optional=*/true},
       {h, "h"},
       {weights, "weights"},
       {activations, "activations"}});
  const CellSizes sizes = cell_sizes(check, input, weights);
  check.shape(grad_h, "grad_h", {sizes.batch, sizes.hidden});
  check.shape(grad_c, "grad_c", {sizes.batch, sizes.hidden});
  check.shape(h, "h", {sizes.batch, sizes.hidden});
  check.weights_and_bias(weights, /*bias=*/{}, sizes.input, sizes.hidden);
  check.shape(activations, "activations", {sizes.batch, sizes.hidden * Cell::kSaved});
}

namespace {

void check_sequence_of(const char* op, const SequenceArgs& args) {
  const auto& [input, h_0, c_0, weights, bias, batch_sizes, reverse, save, checkpoint_steps] = args;
  const Checker check(
      op,
      {{input, "input"},
       {h_0, "h_0"},
       {c_0, "c_0"},
       {weights, "weights"},
       {bias, "bias", /*optional=*/true}});
  const SequenceSizes sizes = sequence_sizes(check, input, h_0, check.hidden(weights), batch_sizes);
  check.shape(c_0, "c_0", {sizes.batch, sizes.hidden});
  check.weights_and_bias(weights, bias, sizes.input, sizes.hidden);
}

void check_checkpoint_steps(const char* op, int64_t checkpoint_steps) {
  TORCH_CHECK_VALUE(
      checkpoint_steps > 0,
      op,
      ": expected checkpoint_steps to be positive, got ",
      checkpoint_steps);
}

}  // namespace

void check_sequence(const SequenceArgs& args) {
  check_sequence_of("lltm::sequence", args);
}

void check_sequence_checkpointed(const SequenceArgs& args) {
  constexpr const char* kOp = "lltm::sequence_checkpointed";
  check_sequence_of(kOp, args);
  check_checkpoint_steps(kOp, args.checkpoint_steps);
}

void check_prepack(const Tensor& weights, std::optional<at::ScalarType> dtype) {
  const Checker check("lltm::prepack", {{weights, "weights"}});
  const SymInt hidden = check.hidden(weights);
  TORCH_CHECK_VALUE(
      weights.sym_size(1) >= hidden,
      "lltm::prepack: expected weights of shape ",
      kWeightsShape,
      ", got ",
      shape_text(weights.sym_sizes()));
  TORCH_CHECK_TYPE(
      !dtype.has_value() || dtype == at::kQInt8,
      "lltm::prepack: expected dtype to be qint8 or None, got ",
      dtype_text(*dtype));
}

void check_sequence_prepacked(const SequenceArgs& args) {
  constexpr const char* kOp = "lltm::sequence_prepacked";
  const auto& [input, h_0, c_0, weights, bias, batch_sizes, reverse, save, checkpoint_steps] = args;
  const bool packed = weights.defined() && weights.scalar_type() == at::kByte;
  // Packed weights are bytes, whatever the dtype of the others.
  const Tensor none;
  const Checker check(
      kOp,
      {{input, "input"},
       {h_0, "h_0"},
       {c_0, "c_0"},
       {bias, "bias", /*optional=*/true},
       {packed ? none : weights, "weights", /*optional=*/packed}});
  SequenceSizes sizes;
  if (packed) {
    check.rank(h_0, "h_0", 2, "(B, H)");
    TORCH_CHECK(
        weights.device() == input.device(),
        kOp,
        ": expected weights on device ",
        input.device(),
        ", got ",
        weights.device());
    sizes = sequence_sizes(check, input, h_0, h_0.sym_size(1), batch_sizes);
    check.shape(bias, "bias", {sizes.hidden * Cell::kGates});
  } else {
    sizes = sequence_sizes(check, input, h_0, check.hidden(weights), batch_sizes);
    check.weights_and_bias(weights, bias, sizes.input, sizes.hidden);
  }
  check.shape(c_0, "c_0", {sizes.batch, sizes.hidden});
}

namespace {

// The shapes of what both forms of backward take.
template <typename Args>
SequenceSizes backward_sizes(const Checker& check, const Args& args) {
  const SequenceSizes sizes =
      sequence_sizes(check, args.input, args.h_0, check.hidden(args.weights), args.batch_sizes);
  const auto rows_of_output = [&](const Tensor& tensor, const char* name) {
    if (args.batch_sizes.defined()) {
      check.shape(tensor, name, {sizes.rows, sizes.hidden});
    } else {
      check.shape(tensor, name, {sizes.steps, sizes.batch, sizes.hidden});
    }
  };
  rows_of_output(args.grad_output, "grad_output");
  check.shape(args.grad_h_n, "grad_h_n", {sizes.batch, sizes.hidden});
  check.shape(args.grad_c_n, "grad_c_n", {sizes.batch, sizes.hidden});
  check.weights_and_bias(args.weights, /*bias=*/{}, sizes.input, sizes.hidden);
  rows_of_output(args.output, "output");
  return sizes;
}

}  // namespace

void check_sequence_backward(const SequenceBackwardArgs& args) {
  const Checker check(
      "lltm::sequence_backward",
      {{args.input, "input"},
       {args.grad_output, "grad_output", /*optional=*/true},
       {args.grad_h_n, "grad_h_n", /*optional=*/true},
       {args.grad_c_n, "grad_c_n", /*optional=*/true},
       {args.h_0, "h_0"},
       {args.weights, "weights"},
       {args.output, "output"},
       {args.activations, "activations"}});
  const SequenceSizes sizes = backward_sizes(check, args);
  check.shape(args.activations, "activations", {sizes.rows, sizes.hidden * Cell::kSaved});
}

void check_sequence_checkpointed_backward(const CheckpointedBackwardArgs& args) {
  constexpr const char* kOp = "lltm::sequence_checkpointed_backward";
  const Checker check(
      kOp,
      {{args.input, "input"},
       {args.grad_output, "grad_output", /*optional=*/true},
       {args.grad_h_n, "grad_h_n", /*optional=*/true},
       {args.grad_c_n, "grad_c_n", /*optional=*/true},
       {args.h_0, "h_0"},
       {args.c_0, "c_0"},
       {args.weights, "weights"},
       {args.bias, "bias", /*optional=*/true},
       {args.output, "output"},
       {args.checkpoints, "checkpoints"}});
  check_checkpoint_steps(kOp, args.checkpoint_steps);
  const SequenceSizes sizes = backward_sizes(check, args);
  check.shape(args.c_0, "c_0", {sizes.batch, sizes.hidden});
  check.shape(args.bias, "bias", {sizes.hidden * Cell::kGates});
  const SymInt count = (sizes.steps + (args.checkpoint_steps - 1)) / args.checkpoint_steps;
  check.shape(args.checkpoints, "checkpoints", {count, sizes.batch, sizes.hidden});
}

void check_pair_forward(
    const Tensor& input,
    const Tensor& weights,
    const std::optional<Tensor>& bias_or_none,
    const Tensor& old_h,
    const Tensor& old_cell) {
  const Tensor& bias = or_undefined(bias_or_none);
  const Checker check(
      "lltm::forward",
      {{input, "input"},
       {weights, "weights"},
       {bias, "bias", /*optional=*/true},
       {old_h, "old_h"},
       {old_cell, "old_cell"}});
  const CellSizes sizes = cell_sizes(check, input, weights);
  check.shape(old_h, "old_h", {sizes.batch, sizes.hidden});
  check.shape(old_cell, "old_cell", {sizes.batch, sizes.hidden});
  check.weights_and_bias(weights, bias, sizes.input, sizes.hidden);
}

void check_pair_backward(
    const std::array<Tensor, 6>& states,
    const Tensor& X,
    const Tensor& gate_weights,
    const Tensor& weights) {
  static constexpr std::array<const char*, 6> kNames = {
      "grad_h", "grad_cell", "new_cell", "input_gate", "output_gate", "candidate_cell"};
  const Checker check(
      "lltm::backward",
      {{X, "X"},
       {states[0], kNames[0]},
       {states[1], kNames[1]},
       {states[2], kNames[2]},
       {states[3], kNames[3]},
       {states[4], kNames[4]},
       {states[5], kNames[5]},
       {gate_weights, "gate_weights"},
       {weights, "weights"}});
  check.rank(X, "X", 2, "(B, H+I)");
  const SymInt hidden = check.hidden(weights);
  const SymInt batch = X.sym_size(0);
  check.shape(weights, "weights", {hidden * Cell::kGates, X.sym_size(1)});
  for (size_t k = 0; k < states.size(); ++k) {
    check.shape(states[k], kNames[k], {batch, hidden});
  }
  check.shape(gate_weights, "gate_weights", {batch, hidden * Cell::kGates});
}

}  // namespace lltm
