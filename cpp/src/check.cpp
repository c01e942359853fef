#include "check.h"

#include "steps.h"
#include "text.h"

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

// An argument of a call; one that was not given is skipped.
struct Argument {
  Argument(const Tensor& tensor, const char* name) : tensor(&tensor), name(name) {}
  Argument(const std::optional<Tensor>& tensor, const char* name)
      : tensor(tensor.has_value() && tensor->defined() ? &*tensor : nullptr), name(name) {}

  const Tensor* tensor;
  const char* name;
};
using Arguments = std::initializer_list<Argument>;

// Of the values that `property` has for the arguments, the most frequent one; the
// first of those that are equally frequent.
template <typename Property>
auto most_frequent(Arguments arguments, Property property) {
  using Value = decltype(property(std::declval<const Tensor&>()));
  std::optional<Value> result;
  int64_t most = 0;
  for (const Argument& candidate : arguments) {
    if (candidate.tensor == nullptr) continue;
    const Value value = property(*candidate.tensor);
    int64_t count = 0;
    for (const Argument& a : arguments) count += a.tensor && property(*a.tensor) == value;
    if (count > most) {
      most = count;
      result = value;
    }
  }
  return *result;
}

// Checks the arguments of one call: each must be a strided tensor, and all must
// be of one device and one dtype. Of those that disagree, the one that is alone
// is named.
class Checker {
 public:
  Checker(const char* op, Arguments arguments) : op_(op) {
    bool agree = true;
    const Tensor* first = nullptr;
    for (const auto& [tensor, name] : arguments) {
      if (tensor == nullptr) continue;
      TORCH_CHECK_TYPE(
          tensor->defined(), op_, ": expected ", name, " to be a tensor, got an undefined tensor");
      strided(*tensor, name);
      if (first == nullptr) {
        first = tensor;
        supported(*tensor, name);
      }
      agree = agree && tensor->scalar_type() == first->scalar_type() &&
              tensor->device() == first->device();
    }
    device_ = first->device();
    if (!agree) name_the_odd_one(arguments);
  }

  // `pattern` is what users read, such as "(B, I)".
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

  void shape(const Tensor& tensor, const char* name, std::initializer_list<SymInt> expected) const {
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

  void shape(
      const std::optional<Tensor>& tensor,
      const char* name,
      std::initializer_list<SymInt> expected) const {
    if (tensor.has_value() && tensor->defined()) shape(*tensor, name, expected);
  }

  // weights (3H, H+I); returns H.
  SymInt hidden(const Tensor& weights) const {
    rank(weights, "weights", 2, "(3H, H+I)");
    const SymInt rows = weights.sym_size(0);
    TORCH_CHECK_VALUE(
        equal(rows % 3, 0),
        op_,
        ": expected weights of shape (3H, H+I), got ",
        shape_text(weights.sym_sizes()));
    return rows / 3;
  }

  void weights_and_bias(
      const Tensor& weights,
      const std::optional<Tensor>& bias,
      const SymInt& input,
      const SymInt& hidden) const {
    shape(weights, "weights", {hidden * 3, hidden + input});
    shape(bias, "bias", {hidden * 3});
  }

  // batch_sizes of a packed sequence: its values are read where they can be.
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
  // Mapped by torch.vmap, at whatever level, they are no single values.
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

  void name_the_odd_one(Arguments arguments) const {
    const auto dtype = most_frequent(arguments, [](const Tensor& t) { return t.scalar_type(); });
    const auto device = most_frequent(arguments, [](const Tensor& t) { return t.device(); });
    for (const auto& [tensor, name] : arguments) {
      if (tensor == nullptr) continue;
      TORCH_CHECK_TYPE(
          tensor->scalar_type() == dtype,
          op_,
          ": expected ",
          name,
          " of dtype ",
          dtype_text(dtype),
          ", got ",
          dtype_text(tensor->scalar_type()));
      TORCH_CHECK(
          tensor->device() == device,
          op_,
          ": expected ",
          name,
          " on device ",
          device,
          ", got ",
          tensor->device());
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

std::optional<Tensor> given(const std::optional<Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor : std::nullopt;
}

CellSizes cell_sizes(const Checker& check, const Tensor& input, const Tensor& weights) {
  check.rank(input, "input", 2, "(B, I)");
  return {input.sym_size(0), input.sym_size(1), check.hidden(weights)};
}

SequenceSizes sequence_sizes(
    const Checker& check,
    const Tensor& input,
    const Tensor& h_0,
    const SymInt& hidden,
    const std::optional<Tensor>& batch_sizes) {
  const bool packed = given(batch_sizes).has_value();
  check.rank(input, "input", packed ? 2 : 3, packed ? "(N, I)" : "(T, B, I)");
  SequenceSizes sizes;
  sizes.hidden = hidden;
  sizes.input = input.sym_size(-1);
  check.rank(h_0, "h_0", 2, "(B, H)");
  if (packed) {
    sizes.steps = batch_sizes->sym_numel();
    sizes.batch = h_0.sym_size(0);
    sizes.rows = input.sym_size(0);
    check.batch_sizes(*batch_sizes, sizes.batch, sizes.rows);
  } else {
    sizes.steps = input.sym_size(0);
    sizes.batch = input.sym_size(1);
    sizes.rows = sizes.steps * sizes.batch;
  }
  check.shape(h_0, "h_0", {sizes.batch, sizes.hidden});
  return sizes;
}

}  // namespace

CellSizes check_cell(
    const Tensor& input,
    const Tensor& h,
    const Tensor& c,
    const Tensor& weights,
    const std::optional<Tensor>& bias) {
  const Checker check(
      "lltm::cell", {{input, "input"}, {h, "h"}, {c, "c"}, {weights, "weights"}, {bias, "bias"}});
  const CellSizes sizes = cell_sizes(check, input, weights);
  check.shape(h, "h", {sizes.batch, sizes.hidden});
  check.shape(c, "c", {sizes.batch, sizes.hidden});
  check.weights_and_bias(weights, bias, sizes.input, sizes.hidden);
  return sizes;
}

CellSizes check_cell_backward(
    const std::optional<Tensor>& grad_h,
    const std::optional<Tensor>& grad_c,
    const Tensor& input,
    const Tensor& h,
    const Tensor& weights,
    const Tensor& activations) {
  const Checker check(
      "lltm::cell_backward",
      {{input, "input"},
       {grad_h, "grad_h"},
       {grad_c, "grad_c"},
       {h, "h"},
       {weights, "weights"},
       {activations, "activations"}});
  const CellSizes sizes = cell_sizes(check, input, weights);
  check.shape(grad_h, "grad_h", {sizes.batch, sizes.hidden});
  check.shape(grad_c, "grad_c", {sizes.batch, sizes.hidden});
  check.shape(h, "h", {sizes.batch, sizes.hidden});
  check.weights_and_bias(weights, std::nullopt, sizes.input, sizes.hidden);
  check.shape(activations, "activations", {sizes.batch, sizes.hidden * 4});
  return sizes;
}

SequenceSizes check_sequence(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes) {
  const Checker check(
      "lltm::sequence",
      {{input, "input"}, {h_0, "h_0"}, {c_0, "c_0"}, {weights, "weights"}, {bias, "bias"}});
  const SequenceSizes sizes = sequence_sizes(check, input, h_0, check.hidden(weights), batch_sizes);
  check.shape(c_0, "c_0", {sizes.batch, sizes.hidden});
  check.weights_and_bias(weights, bias, sizes.input, sizes.hidden);
  return sizes;
}

void check_prepack(const Tensor& weights) {
  const Checker check("lltm::prepack", {{weights, "weights"}});
  const SymInt hidden = check.hidden(weights);
  TORCH_CHECK_VALUE(
      weights.sym_size(1) >= hidden,
      "lltm::prepack: expected weights of shape (3H, H+I), got ",
      shape_text(weights.sym_sizes()));
}

SequenceSizes check_sequence_prepacked(
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& c_0,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const std::optional<Tensor>& batch_sizes) {
  constexpr const char* kOp = "lltm::sequence_prepacked";
  const bool packed = weights.defined() && weights.scalar_type() == at::kByte;

  const Checker check(
      kOp,
      // Packed weights are bytes, whatever the dtype of the others.
      {{input, "input"},
       {h_0, "h_0"},
       {c_0, "c_0"},
       {bias, "bias"},
       packed ? Argument{std::nullopt, ""} : Argument{weights, "weights"}});
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
    check.shape(bias, "bias", {sizes.hidden * 3});
  } else {
    sizes = sequence_sizes(check, input, h_0, check.hidden(weights), batch_sizes);
    check.weights_and_bias(weights, bias, sizes.input, sizes.hidden);
  }
  check.shape(c_0, "c_0", {sizes.batch, sizes.hidden});
  return sizes;
}

SequenceSizes check_sequence_backward(
    const std::optional<Tensor>& grad_output,
    const std::optional<Tensor>& grad_h_n,
    const std::optional<Tensor>& grad_c_n,
    const Tensor& input,
    const Tensor& h_0,
    const Tensor& weights,
    const Tensor& output,
    const Tensor& activations,
    const std::optional<Tensor>& batch_sizes) {
  const Checker check(
      "lltm::sequence_backward",
      {{input, "input"},
       {grad_output, "grad_output"},
       {grad_h_n, "grad_h_n"},
       {grad_c_n, "grad_c_n"},
       {h_0, "h_0"},
       {weights, "weights"},
       {output, "output"},
       {activations, "activations"}});
  const SequenceSizes sizes = sequence_sizes(check, input, h_0, check.hidden(weights), batch_sizes);
  const auto rows_of_output = [&](const Tensor& tensor, const char* name) {
    if (given(batch_sizes).has_value()) {
      check.shape(tensor, name, {sizes.rows, sizes.hidden});
    } else {
      check.shape(tensor, name, {sizes.steps, sizes.batch, sizes.hidden});
    }
  };
  if (given(grad_output).has_value()) rows_of_output(*grad_output, "grad_output");
  check.shape(grad_h_n, "grad_h_n", {sizes.batch, sizes.hidden});
  check.shape(grad_c_n, "grad_c_n", {sizes.batch, sizes.hidden});
  check.weights_and_bias(weights, std::nullopt, sizes.input, sizes.hidden);
  rows_of_output(output, "output");
  check.shape(activations, "activations", {sizes.rows, sizes.hidden * 4});
  return sizes;
}

void check_pair_forward(
    const Tensor& input,
    const Tensor& weights,
    const std::optional<Tensor>& bias,
    const Tensor& old_h,
    const Tensor& old_cell) {
  const Checker check(
      "lltm::forward",
      {{input, "input"},
       {weights, "weights"},
       {bias, "bias"},
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
  check.shape(weights, "weights", {hidden * 3, X.sym_size(1)});
  for (size_t k = 0; k < states.size(); ++k) {
    check.shape(states[k], kNames[k], {batch, hidden});
  }
  check.shape(gate_weights, "gate_weights", {batch, hidden * 3});
}

}  // namespace lltm
