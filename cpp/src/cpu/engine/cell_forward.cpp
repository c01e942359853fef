// One step on the CPU, forward, with the weights read as they lie: by ATen's GEMMs, or block by
// block by the GEMM kernel or, for few rows, by scalar products.
#include "cell/cell.h"
#include "cpu/engine/cell.h"
#include "cpu/engine/engine.h"
#include "cpu/gemm/gemm.h"
#include "cpu/memory.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <type_traits>

namespace lltm::cpu {
namespace {

using at::Tensor;

template <typename T>
using StepArgs = ForwardArgs<T, compute_t<T>>;

template <typename T>
void step_by_aten(StepArgs<T> step, const CellArgs& args) {
  const Linear linear(args.weights, args.bias);
  const Tensor gates = linear.project_input(args.input);
  linear.add_recurrent(gates, args.h.to(gates.scalar_type()));
  step.hidden = args.h.size(1);
  step.gates = read<compute_t<T>>(gates);
  step.gates_step = step.hidden;
  parallel_for(args.h.numel(), kElementwiseGrain, [&](int64_t begin, int64_t end) {
    elementwise<T, compute_t<T>>().forward(step, begin, end);
  });
}

// The element-wise part of a block: `width` units from `unit` on, of `rows` rows from `first` on,
// with the pre-activations z (rows, G * width).
template <typename T>
void finish_block(
    ForwardArgs<T, float> part,
    const Tensor& bias,
    Matrix<const float> z,
    int64_t first,
    int64_t rows,
    int64_t unit,
    int64_t width) {
  part.hidden = width;
  part.gates = z;
  part.gates_step = width;
  part.bias = read_row<float>(bias).from(0, unit);
  part.c = part.c.from(first, unit);
  part.c_next = part.c_next.from(first, unit);
  part.h_next = part.h_next.from(first, unit);
  part.activations = part.activations.from(first, unit);
  elementwise<T, float>().forward(part, 0, rows * width);
}

Tensor float_bias(const CellArgs& args) {
  return args.bias.defined() ? args.bias->to(at::kFloat) : Tensor();
}

// z = [h, x] W^T for few rows, where reading the weights is the work.
template <typename T>
void step_by_products(const StepArgs<T>& step, const CellArgs& args, const CellSchedule& schedule) {
  const int64_t batch = args.h.size(0);
  const int64_t hidden = args.h.size(1);
  const Tensor h = with_contiguous_rows(args.h.to(at::kFloat));
  const Tensor x = with_contiguous_rows(args.input.to(at::kFloat));
  const Tensor bias = float_bias(args);
  const Blocks blocks(hidden, schedule.block_width);
  const int64_t columns = Cell::kGates * blocks.width;
  const Workspace<float> z(blocks.count * batch * columns);
  for_each_block(blocks, schedule.threads, [&](int64_t block) {
    const int64_t unit = blocks.begin(block);
    const int64_t width = blocks.size(block);
    const Matrix<float> gates = {z.data() + block * batch * columns, columns};
    multiply_in_place<T>(
        batch,
        {{read<float>(h), hidden}, {read<float>(x), x.size(1)}},
        read<T>(args.weights).from(unit),
        hidden,
        width,
        gates,
        /*accumulate=*/false);
    finish_block<T>(step, bias, as_const(gates), 0, batch, unit, width);
  });
}

template <typename T>
using CellFormat = std::conditional_t<std::is_same_v<T, BFloat16>, Bf16Format, F32Format>;
// The dtypes that are operands of it.
template <typename T>
constexpr bool kIsOperand = std::is_same_v<T, typename CellFormat<T>::Operand>;

// z^T = W X^T: the weights are A in place, and only the small X is packed. Up to kCellRows
// rows of the batch at a time.
template <typename T>
class BlockedStep {
 public:
  BlockedStep(const StepArgs<T>& step, const CellArgs& args, const CellSchedule& schedule)
      : step_(step),
        args_(args),
        hidden_(args.h.size(1)),
        k_(args.weights.size(1)),
        columns_(std::min(round_up(args.h.size(0), kVector), kCellRows)),
        blocks_(hidden_, schedule.block_width),
        threads_(schedule.threads),
        bias_(float_bias(args)),
        x_size_(k_ * columns_ * static_cast<int64_t>(sizeof(T)) / 4) {
    buffer_ =
        at::empty({x_size_ + 2 * blocks_.count * z_size()}, args.input.options().dtype(at::kFloat));
    floats_ = buffer_.mutable_data_ptr<float>();
  }

  void run() {
    const int64_t batch = args_.h.size(0);
    for (int64_t first = 0; first < batch; first += columns_) {
      const int64_t rows = std::min(columns_, batch - first);
      pack(first, rows);
      for_each_block(blocks_, threads_, [&](int64_t block) { compute(block, first, rows); });
    }
  }

 private:
  using Format = CellFormat<T>;
  static constexpr int64_t kVector = 16;  // widths of z^T are multiples of it

  int64_t z_size() const { return Cell::kGates * blocks_.width * columns_; }
  PackedB<T> x_transposed() const {
    return {reinterpret_cast<T*>(floats_), k_, columns_, columns_};
  }

  // X^T of some rows of the batch.
  void pack(int64_t first, int64_t rows) {
    if (rows < columns_) std::fill_n(floats_, x_size_, 0.0f);
    const auto b = x_transposed();
    Format::pack_b_transposed(b, 0, 0, read<T>(args_.h).from(first), hidden_, rows);
    Format::pack_b_transposed(b, hidden_, 0, read<T>(args_.input).from(first), k_ - hidden_, rows);
  }

  void compute(int64_t block, int64_t first, int64_t rows) {
    const int64_t unit = blocks_.begin(block);
    const int64_t width = blocks_.size(block);
    float* const z_transposed = floats_ + x_size_ + 2 * block * z_size();
    float* const z = z_transposed + z_size();
    const auto w = read<T>(args_.weights);
    const auto b = as_const(x_transposed());
    for (int64_t gate = 0; gate < Cell::kGates; ++gate) {
      const Matrix<float> out = {z_transposed + gate * width * columns_, columns_};
      Format::gemm(width, w.from(gate * hidden_ + unit), b, out, /*accumulate=*/false);
    }
    const int64_t z_columns = Cell::kGates * width;
    kernels().transpose_f32(z_columns, columns_, {z_transposed, columns_}, {z, z_columns});
    finish_block<T>(step_, bias_, {z, z_columns}, first, rows, unit, width);
  }

  const StepArgs<T>& step_;
  const CellArgs& args_;
  const int64_t hidden_, k_, columns_;
  const Blocks blocks_;
  const int64_t threads_;
  const Tensor bias_;
  const int64_t x_size_;
  Tensor buffer_;
  float* floats_;  // X^T, and for each block z^T and z
};

template <typename T>
void run_step(const CellArgs& args, const CellResult& result, const CellSchedule& schedule) {
  const auto& [h_next, c_next, activations] = result;
  StepArgs<T> step;
  step.bias_step = args.h.size(1);
  step.c = read<T>(args.c);
  step.h_next = write<T>(h_next);
  step.c_next = write<T>(c_next);
  step.activations = write<T>(activations);
  step.activations_step = step.bias_step;
  if constexpr (kHasGemm<T>) {
    if (schedule.forward == CellGemm::kProducts) return step_by_products(step, args, schedule);
  }
  if constexpr (kIsOperand<T>) {
    if (schedule.forward == CellGemm::kBlocked) return BlockedStep<T>(step, args, schedule).run();
  }
  step_by_aten<T>(step, args);
}

}  // namespace

CellResult cell_forward(const CellArgs& args) {
  const int64_t batch = args.h.size(0);
  const int64_t hidden = args.h.size(1);
  const auto options = args.input.options();
  CellResult result = {
      new_tensor({batch, hidden}, options),
      new_tensor({batch, hidden}, options),
      args.save ? new_tensor({batch, Cell::kSaved * hidden}, options) : Tensor()};
  const CellSchedule schedule = schedule_of(args.input, args.h, args.weights);
  if (logs_schedules()) {
    log_schedule({batch, args.input.size(1), hidden, batch}, to_string(schedule));
  }
  visit_dtype(
      args.input.scalar_type(), [&]<typename T>(T*) { run_step<T>(args, result, schedule); });
  return result;
}

}  // namespace lltm::cpu
