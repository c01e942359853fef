// The element-wise kernels of a cell that a user has written: those of elementwise_kernels.h and
// few_rows_kernels.h, with its programs in the place of a page.
//
// What a program writes may be what it reads, as c_next is c: so states go through buffers.
#pragma once

#include "cpu/kernel/elementwise_kernels.h"
#include "cpu/kernel/program_kernels.h"

namespace lltm::cpu {
namespace {

template <typename T, typename G>
void forward_program(const ForwardArgs<T, G>& a, std::int64_t begin, std::int64_t end) {
  using C = compute_t<T>;
  const CellInfo& cell = *a.cell;
  const Program& program = cell.programs->forward;
  const int own = cell.reads_h ? 1 : 0;  // h stands before the other states
  Registers<C> registers(program);
  Block<C> in_z[CellInfo::kMostSlots], in_bias, in_states[CellInfo::kMostStates + 1];
  Block<C> in_parameters[CellInfo::kMostParameters];
  Block<C> out_h, out_states[CellInfo::kMostStates], out_saved[CellInfo::kMostSaved];
  for_each_block(a.hidden, begin, end, [&](std::int64_t row, std::int64_t col, std::int64_t n) {
    const std::int64_t size = padded(n);
    int in = 0, out = 0;
    for (int k = 0; k < cell.slots; ++k) {
      const C* z = load(a.gates, row, col + k * a.gates_step, n, in_z[k], a.gates_padded);
      if (a.bias.data != nullptr) {
        const C* const bias = load(a.bias, 0, col + k * a.layer_hidden, n, in_bias);
        C* const sum = in_z[k].values;
        LLTM_INDEPENDENT
        for (std::int64_t j = 0; j < size; ++j) sum[j] = z[j] + bias[j];
        z = sum;
      }
      registers.set_input(in++, z);
    }
    for (int k = 0; k < cell.state_columns(); ++k) {
      registers.set_input(in++, load(a.c, row, col + k * a.layer_hidden, n, in_states[k]));
    }
    for (int k = 0; k < cell.parameters; ++k) {
      const std::int64_t column = col + k * a.layer_hidden;
      registers.set_input(in++, load(a.parameters, 0, column, n, in_parameters[k]));
    }
    C* const h = target(a.h_next, row, col, n, out_h);
    C* saved[CellInfo::kMostSaved];
    registers.set_output(out++, h);
    for (int k = 0; k < cell.states; ++k) registers.set_output(out++, out_states[k].values);
    for (int k = 0; k < cell.saved; ++k) {
      const std::int64_t column = col + k * a.layer_hidden;
      if (a.activations.data != nullptr) {
        fetch_ahead(a.activations.row(row + kRowsAhead) + column, n);
      }
      saved[k] = target(a.activations, row, column, n, out_saved[k]);
      registers.set_output(out++, saved[k]);
    }

    execute_block(program, registers, size);

    for (int k = 0; k < cell.saved; ++k) {
      store(a.activations, row, col + k * a.layer_hidden, n, saved[k]);
    }
    if (own == 1) store(a.c_next, row, col, n, static_cast<const C*>(h));
    for (int k = 0; k < cell.states; ++k) {
      const C* const values = out_states[k].values;
      store(a.c_next, row, col + (own + k) * a.layer_hidden, n, values);
    }
    store_h(a, row, col, n, h, out_h);
  });
}

template <typename T, typename G>
void backward_program(const BackwardArgs<T, G>& a, std::int64_t begin, std::int64_t end) {
  using C = compute_t<T>;
  const CellInfo& cell = *a.cell;
  const Program& program = cell.programs->backward;
  const int own = cell.reads_h ? 1 : 0;
  Registers<C> registers(program);
  Block<C> in_saved[CellInfo::kMostSaved], in_parameters[CellInfo::kMostParameters];
  Block<C> in_dh, in_dh_state, in_states[CellInfo::kMostStates + 1];
  Block<C> out_dz[CellInfo::kMostSlots + CellInfo::kMostParameters],
      out_states[CellInfo::kMostStates + 1];
  for_each_block(a.hidden, begin, end, [&](std::int64_t row, std::int64_t col, std::int64_t n) {
    const std::int64_t size = padded(n);
    int in = 0, out = 0;
    for (int k = 0; k < cell.saved; ++k) {
      const std::int64_t column = col + k * a.layer_hidden;
      fetch_ahead(a.activations.row(row + kRowsAhead) + column, n);
      registers.set_input(in++, load(a.activations, row, column, n, in_saved[k]));
    }
    for (int k = 0; k < cell.parameters; ++k) {
      const std::int64_t column = col + k * a.layer_hidden;
      registers.set_input(in++, load(a.parameters, 0, column, n, in_parameters[k]));
    }
    const C* const from_output = load(a.grad_h, row, col, n, in_dh);
    const C* const from_next = load(a.grad_h_state, row, col, n, in_dh_state);
    const C* of_states[CellInfo::kMostStates + 1];
    for (int k = 0; k < cell.state_columns(); ++k) {
      of_states[k] = load(a.grad_c, row, col + k * a.layer_hidden, n, in_states[k]);
    }
    C* const dh = in_dh.values;
    LLTM_INDEPENDENT
    for (std::int64_t j = 0; j < size; ++j) dh[j] = from_output[j] + from_next[j];
    if (own == 1) {
      const C* const direct = of_states[0];
      LLTM_INDEPENDENT
      for (std::int64_t j = 0; j < size; ++j) dh[j] += direct[j];
    }
    registers.set_input(in++, dh);
    for (int k = own; k < cell.state_columns(); ++k) registers.set_input(in++, of_states[k]);
    C* dz[CellInfo::kMostSlots + CellInfo::kMostParameters];
    for (int k = 0; k < cell.grad_columns(); ++k) {
      const std::int64_t column = col + k * a.layer_hidden;
      fetch_ahead(a.grad_gates.row(row + kRowsAhead) + column, n);
      dz[k] = target(a.grad_gates, row, column, n, out_dz[k]);
      registers.set_output(out++, dz[k]);
    }
    for (int k = 0; k < cell.state_columns(); ++k) {
      registers.set_output(out++, out_states[k].values);
    }

    execute_block(program, registers, size);

    bool fits = true;
    for (int k = 0; k < cell.grad_columns(); ++k) {
      store(a.grad_gates, row, col + k * a.layer_hidden, n, dz[k]);
      if (a.operand.data == nullptr || k >= cell.slots) continue;
      fits &= store_operand(a.operand, row, col + k * a.operand_step, n, dz[k]);
    }
    for (int k = 0; k < cell.state_columns(); ++k) {
      const C* const values = out_states[k].values;
      store(a.grad_c_prev, row, col + k * a.layer_hidden, n, values);
    }
    if (!fits) *a.out_of_range = true;
  });
}

void forward_few_rows_program(const FewRowsArgs& a, std::int64_t rows) {
  const CellInfo& cell = *a.cell;
  const Program& program = cell.programs->forward;
  const int own = cell.reads_h ? 1 : 0;
  Registers<double> registers(program);
  Block<double> in_z[CellInfo::kMostSlots], in_states[CellInfo::kMostStates + 1];
  Block<double> in_parameters[CellInfo::kMostParameters];
  Block<double> out_h, out_states[CellInfo::kMostStates], out_saved[CellInfo::kMostSaved];
  for_each_block(
      a.hidden, 0, rows * a.hidden, [&](std::int64_t row, std::int64_t col, std::int64_t n) {
        const std::int64_t size = padded(n);
        int in = 0, out = 0;
        for (int k = 0; k < cell.slots; ++k) {
          const float* const z = a.gates.row(row) + col + k * a.gates_step;
          double* const sum = in_z[k].values;
          for (std::int64_t j = 0; j < n; ++j) sum[j] = z[j];
          if (a.bias != nullptr) {
            const float* const bias = a.bias + col + k * a.layer_hidden;
            for (std::int64_t j = 0; j < n; ++j) sum[j] += bias[j];
          }
          for (std::int64_t j = n; j < size; ++j) sum[j] = 0;
          registers.set_input(in++, sum);
        }
        for (int k = 0; k < cell.state_columns(); ++k) {
          const Matrix<const double> c = as_const(a.c);
          registers.set_input(in++, load(c, row, col + k * a.layer_hidden, n, in_states[k]));
        }
        for (int k = 0; k < cell.parameters; ++k) {
          const float* const own_parameter = a.parameters + col + k * a.layer_hidden;
          double* const wide = in_parameters[k].values;
          for (std::int64_t j = 0; j < n; ++j) wide[j] = own_parameter[j];
          for (std::int64_t j = n; j < size; ++j) wide[j] = 0;
          registers.set_input(in++, wide);
        }
        registers.set_output(out++, out_h.values);
        for (int k = 0; k < cell.states; ++k) registers.set_output(out++, out_states[k].values);
        for (int k = 0; k < cell.saved; ++k) registers.set_output(out++, out_saved[k].values);

        execute_block(program, registers, size);

        const auto narrow_to = [&](float* y, const double* x) {
          for (std::int64_t j = 0; j < n; ++j) y[j] = static_cast<float>(x[j]);
        };
        const double* const h = out_h.values;
        narrow_to(a.h_next.row(row) + col, h);
        if (own == 1) store(a.c, row, col, n, h);
        for (int k = 0; k < cell.states; ++k) {
          const double* const values = out_states[k].values;
          store(a.c, row, col + (own + k) * a.layer_hidden, n, values);
        }
        if (a.activations.data == nullptr) return;
        for (int k = 0; k < cell.saved; ++k) {
          narrow_to(a.activations.row(row) + col + k * a.layer_hidden, out_saved[k].values);
        }
      });
}

template <typename T, typename G>
constexpr Elementwise<T, G> kProgramElementwise = {forward_program<T, G>, backward_program<T, G>};

constexpr CellKernels kProgramKernels = {
    kProgramElementwise<double, double>,
    kProgramElementwise<float, float>,
    kProgramElementwise<Half, float>,
    kProgramElementwise<BFloat16, float>,
    kProgramElementwise<BFloat16, BFloat16>,
    kProgramElementwise<float, BFloat16>,
#if defined(__AMX_BF16__)
    kProgramElementwise<float, BFloat16x3>,
    kProgramElementwise<Half, BFloat16x3>,
#else
    {},
    {},
#endif
    {forward_program<float, Int8>, nullptr},
    {forward_program<Half, Int8>, nullptr},
    {forward_program<BFloat16, Int8>, nullptr},
    forward_few_rows_program,
};

}  // namespace
}  // namespace lltm::cpu
