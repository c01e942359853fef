#include "op/run_program.h"

#include "common/tensor_views.h"
#include "common/weights.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <array>
#include <span>
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

// The values of a pass by port: `in` for stages to read, `out` written.
struct PassValues {
  std::array<std::vector<Tensor>, kPlaces> in, out;

  std::vector<Tensor>& read(Place place) { return in[static_cast<size_t>(place)]; }
  std::vector<Tensor>& written(Place place) { return out[static_cast<size_t>(place)]; }

  // Calls multiply(p) for each product.
  template <typename Multiply>
  void run_stages(const Pass& pass, const Tensor& like, const Multiply& multiply) {
    read(Place::kMean).resize(pass.means);
    read(Place::kKept).resize(pass.kept);
    for (auto& values : out) values.resize(CellInfo::kMostValues);
    for (const Stage& stage : std::span(pass.stages, pass.count)) {
      std::vector<Tensor> inputs;
      const Port* port = stage.ports;
      for (int k = 0; k < stage.program.inputs; ++k, ++port) {
        inputs.push_back(read(port->place)[port->index]);
      }
      for (const Tensor& y : run(stage.program, std::move(inputs), like)) {
        (port->place == Place::kKept ? read(port->place) : written(port->place))[port->index] = y;
        ++port;
      }
      for (int p = 0; p < CellInfo::kMostSlots; ++p) {
        if ((stage.operands >> p & 1) != 0) multiply(p);
      }
      for (int k = stage.means.begin; k < stage.means.end; ++k) {
        const Tensor mean = at::mean(written(Place::kMean)[k], -1, /*keepdim=*/true);
        read(Place::kMean)[k] = mean.expand_symint(like.sym_sizes());
      }
    }
  }
};

// h', the other states', saved values
std::vector<Tensor> run_forward_stages(
    const CellInfo& cell,
    std::vector<Tensor> inputs,
    const Tensor& weight_h,
    at::ScalarType dtype) {
  PassValues values;
  auto next = inputs.begin();
  const auto take = [&](Place place, int count) {
    values.read(place).assign(next, next + count);
    next += count;
  };
  take(Place::kGate, cell.slots);
  take(Place::kState, cell.state_columns());
  take(Place::kParameter, cell.parameters);
  std::vector<Tensor>& gates = values.read(Place::kGate);
  const Tensor like = gates[0];
  values.run_stages(cell.stages->forward, like, [&](int p) {
    // v is rounded, as h is.
    const Tensor& made = values.written(Place::kOperand)[p];
    const Tensor v = made.to(dtype).to(made.scalar_type());
    for (const SlotRange& range : cell.stages->operands[p].gates) {
      for (int slot = range.begin; slot < range.end; ++slot) {
        const Tensor rows = rows_of_slot(cell, weight_h, slot);
        gates[slot] = at::add(gates[slot], at::linear(v, rows));
      }
    }
  });
  std::vector<Tensor> results = {values.written(Place::kH)[0]};
  const int own = cell.reads_h ? 1 : 0;
  for (int k = 0; k < cell.states; ++k) {
    results.push_back(values.written(Place::kState)[own + k]);
  }
  for (int k = 0; k < cell.saved; ++k) results.push_back(values.written(Place::kSaved)[k]);
  return results;
}

// Gradients of pre-activations, parameters, states
std::vector<Tensor> run_backward_stages(
    const CellInfo& cell, std::vector<Tensor> inputs, const Tensor& weight_h) {
  PassValues values;
  auto next = inputs.begin();
  const auto take = [&](Place place, int first, int count) {
    std::vector<Tensor>& to = values.read(place);
    to.resize(first);
    to.insert(to.end(), next, next + count);
    next += count;
  };
  take(Place::kSaved, 0, cell.saved);
  take(Place::kParameter, 0, cell.parameters);
  take(Place::kH, 0, 1);
  const int own = cell.reads_h ? 1 : 0;
  take(Place::kState, own, cell.states);
  const Tensor like = values.read(Place::kH)[0];
  values.read(Place::kOperand).resize(CellInfo::kMostSlots);
  values.run_stages(cell.stages->backward, like, [&](int p) {
    Tensor dv;
    for (const SlotRange& range : cell.stages->operands[p].gates) {
      for (int slot = range.begin; slot < range.end; ++slot) {
        const Tensor term =
            at::matmul(values.written(Place::kGate)[slot], rows_of_slot(cell, weight_h, slot));
        dv = dv.defined() ? at::add(dv, term) : term;
      }
    }
    values.read(Place::kOperand)[p] = dv;
  });
  std::vector<Tensor> results;
  const auto give = [&](Place place, int count) {
    for (int k = 0; k < count; ++k) results.push_back(values.written(place)[k]);
  };
  give(Place::kGate, cell.slots);
  give(Place::kParameter, cell.parameters);
  give(Place::kState, cell.state_columns());
  return results;
}

}  // namespace

StepResult run_forward(
    const CellInfo& cell,
    const Tensor& gates,
    const Tensor& c,
    const Tensor& parameters,
    const Tensor& weight_h,
    bool save) {
  std::vector<Tensor> inputs;
  unpack(gates, cell.slots, inputs);
  unpack(c, cell.state_columns(), inputs);
  unpack(parameters, cell.parameters, inputs);
  const Tensor like = inputs.front();
  const at::ScalarType dtype = c.scalar_type();
  // h', states', saved values
  const std::vector<Tensor> y = cell.stages != nullptr
                                    ? run_forward_stages(cell, std::move(inputs), weight_h, dtype)
                                    : run(programs_of(cell).forward, std::move(inputs), like);
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
    const Tensor& parameters,
    const Tensor& weight_h) {
  std::vector<Tensor> inputs;
  unpack(activations, cell.saved, inputs);
  unpack(parameters, cell.parameters, inputs);
  std::vector<Tensor> of_states;
  unpack(grad_c, cell.state_columns(), of_states);
  const size_t own = cell.reads_h ? 1 : 0;
  inputs.push_back(own ? at::add(grad_h, of_states[0]) : grad_h);
  inputs.insert(inputs.end(), of_states.begin() + own, of_states.end());
  const std::vector<Tensor> y = cell.stages != nullptr
                                    ? run_backward_stages(cell, std::move(inputs), weight_h)
                                    : run(programs_of(cell).backward, std::move(inputs), grad_h);
  return {pack(y, 0, cell.grad_columns()), pack_states(cell, y, cell.grad_columns(), grad_c)};
}

}  // namespace lltm::composite
