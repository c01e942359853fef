#include "op/run_program.h"

#include "common/tensor_views.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace lltm::composite {
namespace {

using at::Tensor;

// A condition is a bool tensor until a number is required.
Tensor number(const Tensor& value, at::ScalarType dtype) {
  return value.scalar_type() == at::kBool ? value.to(dtype) : value;
}
Tensor condition(const Tensor& value) {
  return value.scalar_type() == at::kBool ? value : at::ne(value, 0);
}

Tensor apply(Op op, at::ScalarType dtype, const Tensor& x, const Tensor& y, const Tensor& w) {
  const auto a = [&] { return number(x, dtype); };
  const auto b = [&] { return number(y, dtype); };
  const auto c = [&] { return number(w, dtype); };
  switch (op) {
    case Op::kCopy:
      return x;
    case Op::kNegate:
      return at::neg(a());
    case Op::kAbs:
      return at::abs(a());
    case Op::kSign:  // at::sign(NaN) is 0
      return at::where(at::isnan(a()), a(), at::sign(a()));
    case Op::kSqrt:
      return at::sqrt(a());
    case Op::kExp:
      return at::exp(a());
    case Op::kExpm1:
      return at::expm1(a());
    case Op::kLog:
      return at::log(a());
    case Op::kLog1p:
      return at::log1p(a());
    case Op::kSigmoid:
      return at::sigmoid(a());
    case Op::kTanh:
      return at::tanh(a());
    case Op::kElu:
      return at::elu(a());
    case Op::kSoftplus:  // above the threshold the result equals a in every dtype
      return at::softplus(a(), /*beta=*/1, /*threshold=*/40);
    case Op::kNot:
      return at::logical_not(condition(x));
    case Op::kDetach:
      return at::detach(x);
    case Op::kAdd:
      return at::add(a(), b());
    case Op::kSubtract:
      return at::sub(a(), b());
    case Op::kMultiply:
      return at::mul(a(), b());
    case Op::kDivide:
      return at::div(a(), b());
    case Op::kMaximum:
      return at::maximum(a(), b());
    case Op::kMinimum:
      return at::minimum(a(), b());
    case Op::kGreater:
      return at::gt(a(), b());
    case Op::kGreaterEqual:
      return at::ge(a(), b());
    case Op::kEqual:
      return at::eq(a(), b());
    case Op::kNotEqual:
      return at::ne(a(), b());
    case Op::kAnd:
      return at::logical_and(condition(x), condition(y));
    case Op::kOr:
      return at::logical_or(condition(x), condition(y));
    case Op::kWhere:
      return at::where(condition(x), b(), c());
    case Op::kMultiplyAdd:
      return at::add(at::mul(a(), b()), c());
    case Op::kMultiplySubtract:
      return at::sub(at::mul(a(), b()), c());
    case Op::kSubtractProduct:
      return at::sub(c(), at::mul(a(), b()));
    case Op::kSigmoidGradient: {
      const Tensor product = at::mul(a(), b());
      return at::sub(product, at::mul(product, b()));
    }
    case Op::kTanhGradient:
      return at::mul(a(), at::rsub(at::mul(b(), b()), 1));
    case Op::kEluGradient:
      return at::mul(a(), at::where(at::gt(b(), 0), 1.0, at::add(b(), 1)));
    case Op::kAddTanhGradient:
      return at::add(at::mul(a(), at::rsub(at::mul(b(), b()), 1)), c());
  }
  TORCH_INTERNAL_ASSERT(false);
}

std::vector<Tensor> run(const Program& program, std::vector<Tensor> registers, const Tensor& like) {
  const at::ScalarType dtype = compute_dtype(like.scalar_type());
  registers.resize(program.registers);
  for (int k = 0; k < program.constant_count; ++k) {
    registers[program.first_constant() + k] =
        at::scalar_tensor(program.constants[k], like.options().dtype(dtype));
  }
  for (const Instruction* i = program.code; i != program.code + program.size; ++i) {
    registers[i->y] = apply(i->op, dtype, registers[i->a], registers[i->b], registers[i->c]);
  }
  std::vector<Tensor> outputs;
  for (int k = 0; k < program.outputs; ++k) {
    const Tensor output = number(registers[program.inputs + k], dtype);
    // An output that depends only on constants and parameters has fewer dimensions.
    outputs.push_back(output.dim() == like.dim() ? output : output.expand_symint(like.sym_sizes()));
  }
  return outputs;
}

// Splits (rows, count * H) or (count * H), in the compute dtype.
void unpack(const Tensor& packed, int count, std::vector<Tensor>& to) {
  if (count == 0) return;
  const Tensor wide = packed.to(compute_dtype(packed.scalar_type()));
  if (count == 1) return to.push_back(wide);
  for (const Tensor& part : wide.chunk(count, -1)) to.push_back(part);
}

Tensor pack(const std::vector<Tensor>& tensors, int first, int count) {
  return at::cat(at::TensorList(tensors).slice(first, count), 1);
}

// A single tensor is not copied, unless it is `argument` itself.
Tensor pack_states(
    const CellInfo& cell, const std::vector<Tensor>& tensors, int first, const Tensor& argument) {
  if (cell.state_columns() > 1) return pack(tensors, first, cell.state_columns());
  return tensors[first].is_same(argument) ? tensors[first].clone() : tensors[first];
}

}  // namespace

StepResult run_forward(
    const CellInfo& cell,
    const Tensor& gates,
    const Tensor& c,
    const Tensor& parameters,
    bool save) {
  std::vector<Tensor> inputs;
  unpack(gates, cell.slots, inputs);
  unpack(c, cell.state_columns(), inputs);
  unpack(parameters, cell.parameters, inputs);
  const Tensor like = inputs.front();
  // h', states', saved values
  const std::vector<Tensor> y = run(programs_of(cell).forward, std::move(inputs), like);
  const at::ScalarType dtype = c.scalar_type();
  const int first = cell.reads_h ? 0 : 1;
  const Tensor c_next = pack_states(cell, y, first, c).to(dtype);
  const int begin = 1 + cell.states;
  return {
      y[0].to(dtype),
      c_next,
      !save             ? Tensor()
      : cell.saved == 0 ? at::empty_symint({like.sym_size(0), 0}, c.options())
                        : pack(y, begin, cell.saved).to(dtype)};
}

std::tuple<Tensor, Tensor> run_backward(
    const CellInfo& cell,
    const Tensor& activations,
    const Tensor& grad_h,
    const Tensor& grad_c,
    const Tensor& parameters) {
  std::vector<Tensor> inputs;
  unpack(activations, cell.saved, inputs);
  unpack(parameters, cell.parameters, inputs);
  std::vector<Tensor> of_states;
  unpack(grad_c, cell.state_columns(), of_states);
  const size_t own = cell.reads_h ? 1 : 0;
  inputs.push_back(own ? at::add(grad_h, of_states[0]) : grad_h);
  inputs.insert(inputs.end(), of_states.begin() + own, of_states.end());
  const std::vector<Tensor> y = run(programs_of(cell).backward, std::move(inputs), grad_h);
  return {pack(y, 0, cell.grad_columns()), pack_states(cell, y, cell.grad_columns(), grad_c)};
}

}  // namespace lltm::composite
