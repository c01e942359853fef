#include "aten/run_program.h"

#include "common/tensor_views.h"
#include "common/weights.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <array>
#include <span>
#include <utility>
#include <vector>

namespace lltm::aten_fallback {
namespace {

using at::Tensor;

// A condition is a bool tensor until a number is required.
Tensor number(const Tensor& value, at::ScalarType dtype) {
  return value.scalar_type() == at::kBool ? value.to(dtype) : value;
}
Tensor truth(const Tensor& value) {
  return value.scalar_type() == at::kBool ? value : at::ne(value, 0);
}

Tensor sigmoid_gradient(const Tensor& x, const Tensor& sigmoid) {
  const Tensor product = at::mul(x, sigmoid);
  return at::sub(product, at::mul(product, sigmoid));
}
Tensor tanh_gradient(const Tensor& x, const Tensor& tanh) {
  return at::mul(x, at::rsub(at::mul(tanh, tanh), 1));
}
Tensor elu_gradient(const Tensor& x, const Tensor& elu) {
  return at::mul(x, at::where(at::gt(elu, 0), 1.0, at::add(elu, 1)));
}

Tensor apply(Op op, at::ScalarType dtype, const Tensor& x, const Tensor& y, const Tensor& w) {
  const auto a = [&] { return number(x, dtype); };
  const auto b = [&] { return number(y, dtype); };
  const auto c = [&] { return number(w, dtype); };
  switch (op) {
#define LLTM_APPLY(op, function, operands, word, cost, range, aten) \
  case Op::op:                                                      \
    return aten;
    LLTM_OPERATIONS(LLTM_APPLY)
#undef LLTM_APPLY
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Tensors by place and index (Port): `in` for the stages of a pass to read, `out` written.
struct PassValues {
  const Pass& pass;
  std::array<std::vector<Tensor>, kPlaces> in = {}, out = {};

  std::vector<Tensor>& read(Place place) {
    return (place == Place::kKept ? out : in)[static_cast<size_t>(place)];
  }
  std::vector<Tensor>& written(Place place) { return out[static_cast<size_t>(place)]; }

  // Splits (rows, count * H) or (count * H).
  void set(Place place, const Tensor& packed, int count) {
    if (count == 0) return;
    const Tensor wide = packed.to(compute_dtype(packed.scalar_type()));
    read(place) = count == 1 ? std::vector{wide} : wide.chunk(count, -1);
  }

  std::vector<Tensor> results(Place place, int count) {
    std::vector<Tensor>& all = written(place);
    return {all.begin(), all.begin() + count};
  }

  // Calls multiply(p) for each product.
  template <typename Multiply>
  void run_stages(const Tensor& like, const Multiply& multiply) {
    read(Place::kMean).resize(pass.means);
    for (auto& values : out) values.resize(CellInfo::kMostValues);
    for (const Stage& stage : std::span(pass.stages, pass.count)) {
      std::vector<Tensor> inputs;
      const Port* port = stage.ports;
      for (int k = 0; k < stage.program.inputs; ++k, ++port) {
        inputs.push_back(read(port->place)[port->index]);
      }
      for (Tensor& result : run(stage.program, std::move(inputs), like)) {
        written(port->place)[port->index] = std::move(result);
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

// A single tensor is not copied, unless it is `argument` itself.
Tensor pack_states(const std::vector<Tensor>& states, const Tensor& argument) {
  if (states.size() > 1) return at::cat(states, 1);
  return states[0].is_same(argument) ? states[0].clone() : states[0];
}

}  // namespace

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

StepResult run_forward(
    const CellInfo& cell,
    const Tensor& gates,
    const Tensor& c,
    const Tensor& parameters,
    const Tensor& weight_h,
    bool save) {
  const at::ScalarType dtype = c.scalar_type();
  PassValues values{cell.forward()};
  values.set(Place::kGate, gates, cell.slots);
  values.set(Place::kState, c, cell.state_columns());
  values.set(Place::kParameter, parameters, cell.parameters);
  std::vector<Tensor>& z = values.read(Place::kGate);
  const Tensor like = z[0];
  values.run_stages(like, [&](int p) {
    // v is rounded, as h is.
    const Tensor& made = values.written(Place::kOperand)[p];
    const Tensor v = made.to(dtype).to(made.scalar_type());
    for (const SlotRange& range : cell.operands()[p].gates) {
      for (int slot = range.begin; slot < range.end; ++slot) {
        z[slot] = at::add(z[slot], at::linear(v, rows_of_slot(cell, weight_h, slot)));
      }
    }
  });
  const Tensor h = values.written(Place::kH)[0];
  std::vector<Tensor> states = values.results(Place::kState, cell.state_columns());
  if (cell.reads_h) states[0] = h;
  const std::vector<Tensor> saved = values.results(Place::kSaved, cell.saved);
  return {
      h.to(dtype),
      pack_states(states, c).to(dtype),
      !save           ? Tensor()
      : saved.empty() ? at::empty_symint({like.sym_size(0), 0}, c.options())
                      : at::cat(saved, 1).to(dtype)};
}

std::tuple<Tensor, Tensor> run_backward(
    const CellInfo& cell,
    const Tensor& activations,
    const Tensor& grad_h,
    const Tensor& grad_c,
    const Tensor& parameters,
    const Tensor& weight_h) {
  PassValues values{cell.backward()};
  values.set(Place::kSaved, activations, cell.saved);
  for (int k = 0; k < cell.saved; ++k) {
    if ((cell.programs->per_row >> k & 1) == 0) continue;
    Tensor& of_row = values.read(Place::kSaved)[k];
    of_row = of_row.slice(1, 0, 1).expand_symint(grad_h.sym_sizes());
  }
  values.set(Place::kParameter, parameters, cell.parameters);
  values.set(Place::kState, grad_c, cell.state_columns());
  // c begins with h, if the cell reads it.
  values.read(Place::kH) = {cell.reads_h ? at::add(grad_h, values.read(Place::kState)[0]) : grad_h};
  values.read(Place::kOperand).resize(CellInfo::kMostSlots);
  values.run_stages(grad_h, [&](int p) {
    Tensor dv;
    for (const SlotRange& range : cell.operands()[p].gates) {
      for (int slot = range.begin; slot < range.end; ++slot) {
        const Tensor term =
            at::matmul(values.written(Place::kGate)[slot], rows_of_slot(cell, weight_h, slot));
        dv = dv.defined() ? at::add(dv, term) : term;
      }
    }
    values.read(Place::kOperand)[p] = dv;
  });
  std::vector<Tensor> dz = values.results(Place::kGate, cell.slots);
  for (const Tensor& of_parameter : values.results(Place::kParameter, cell.parameters)) {
    dz.push_back(of_parameter);
  }
  const std::vector<Tensor> dc = values.results(Place::kState, cell.state_columns());
  return {at::cat(dz, 1), pack_states(dc, grad_c)};
}

}  // namespace lltm::aten_fallback
