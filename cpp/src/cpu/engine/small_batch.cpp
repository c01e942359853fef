// The small-batch engine: forward of float32 sequences with has_few_elements, and of short calls.
//
// c is float64, and so is the element-wise part unless the cell `forgets`. Weights, GEMM operands
// and z are float32. With packed weights and up to four rows, short chains are accumulated in
// float64. If the cell `forgets`, float32 sums are sufficient in x W_x^T, and for several rows.
//
// Threads divide the batch rows or, with a barrier after each step, the blocks.
#include "common/memory.h"
#include "common/steps.h"
#include "cpu/dispatch.h"
#include "cpu/engine/engine.h"
#include "cpu/engine/plan.h"
#include "cpu/engine/step_io.h"
#include "cpu/gemm/gemm.h"
#include "cpu/packed_weights.h"
#include "cpu/parallel.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace lltm::cpu {
namespace {

using at::Tensor;

class PackedSmallBatchWeights {
 public:
  PackedSmallBatchWeights(PackedWeights<F32Format> packed, int64_t batch)
      : packed_(std::move(packed)), batch_(batch) {}

  const Blocks& blocks() const { return packed_.blocks; }
  void project(int64_t rows, Matrix<const float> x, int64_t block, Matrix<float> z) const {
    multiply(rows, x, packed_.x(block), z, packed_.cell.forgets, /*accumulate=*/false);
    clear_slots_of_h(packed_.cell, packed_.slot_columns(block), rows, z);
  }
  void recur(int64_t rows, Matrix<const float> h, int64_t block, Matrix<float> z) const {
    if (packed_.cell.h.count() == 0) return;
    const int64_t first = packed_.cell.h.begin * packed_.slot_columns(block);
    const bool plain = packed_.cell.forgets && batch_ > 1;
    multiply(rows, h, packed_.h(block), z.from(0, first), plain, /*accumulate=*/true);
  }

 private:
  // Unless `plain`, up to four rows are accumulated in float64: their errors are not averaged out.
  static void multiply(
      int64_t rows,
      Matrix<const float> a,
      PackedB<const float> b,
      Matrix<float> c,
      bool plain,
      bool accumulate) {
    constexpr int64_t kChain = 32;
    const auto small_batch = plain ? kernels().gemm_small_batch_f32 : kernels().gemm_small_batch;
    if (rows <= kMostProductRows) return small_batch(rows, a, b, c, accumulate);
    const int64_t chain = plain ? longest_chain(rows) : kChain;
    gemms_f32<float>().multiply(rows, a, b, c, chain, accumulate);
  }

  PackedWeights<F32Format> packed_;
  int64_t batch_;
};

// Used for few steps: packing would dominate.
class SmallBatchWeightsInPlace {
 public:
  SmallBatchWeightsInPlace(const SequenceArgs& args, const Blocks& blocks)
      : ih_(with_contiguous_rows(args.weight_ih)),
        hh_(args.weight_hh.defined() ? with_contiguous_rows(args.weight_hh) : Tensor()),
        weights_{
            *args.cell,
            read_weights<float>(ih_, hh_, args.h_0->size(1)),
            args.h_0->size(1),
            args.input->size(-1)},
        blocks_(blocks) {}

  const Blocks& blocks() const { return blocks_; }
  void project(int64_t rows, Matrix<const float> x, int64_t block, Matrix<float> z) const {
    weights_.multiply(rows, x, {}, blocks_.begin(block), blocks_.size(block), z);
    clear_slots_of_h(weights_.cell, blocks_.size(block), rows, z);
  }
  void recur(int64_t rows, Matrix<const float> h, int64_t block, Matrix<float> z) const {
    weights_.multiply(rows, {}, h, blocks_.begin(block), blocks_.size(block), z);
  }

 private:
  Tensor ih_, hh_;
  WeightsInPlace<float> weights_;
  Blocks blocks_;
};

template <typename SmallBatchWeights>
class SmallBatchForward {
 public:
  SmallBatchForward(
      const SequenceArgs& args, const SmallBatchSchedule& schedule, SmallBatchWeights weights)
      : args_(args),
        cell_(*args.cell),
        batch_(args.h_0->size(0)),
        hidden_(args.h_0->size(1)),
        input_size_(args.input->size(-1)),
        state_columns_(cell_.state_columns() * hidden_),
        weights_(std::move(weights)),
        blocks_(weights_.blocks()),
        grid_(schedule.grid.within(blocks_)),
        steps_(plan_steps(args.input, args.batch_sizes, args.reverse)),
        plan_(steps_, batch_, grid_, blocks_.count),
        io_(args, steps_),
        chunks_(plan_chunks(steps_, schedule.chunk_rows)),
        chunk_rows_(most_rows(chunks_)),
        input_(args.input),
        input_in_place_(
            args.input->is_contiguous() && grid_.rows == 1 && (!args.reverse || batch_ == 1)) {
    plan_.count_rows_before(chunks_, /*reverse=*/false);
    bias_ = slot_bias(args, hidden_);
    parameters_ = cell_parameters(cell_, args.bias_ih);
    if (io_.resets.any()) {
      zeros_.resize(hidden_);
      zero_products_.resize(grid_.rows * cell_.slots * hidden_);
    }
    if (bias_.defined()) bias_data_ = bias_.const_data_ptr<float>();
    if (parameters_.defined()) parameters_data_ = parameters_.const_data_ptr<float>();
    allocate_workspace();
    copy_rows(read<float>(masked_h(args.h_0, args.recurrent_mask)), h_0_, batch_, hidden_);
    copy_rows(read<float>(args.c_0), c_, batch_, state_columns_);
  }

  SequenceResult run() {
    parallel_region(grid_.workers(), [&](Team& team) { run_thread(team); }, grid_.columns);
    return {
        io_.output,
        last_h(),
        // The caller discards the c of a cell without c (states.h).
        cell_.has_c() || !args_.prepacked() ? state_of(as_const(c_), state_columns_) : Tensor(),
        io_.saved()};
  }

 private:
  // One allocation: allocations are noticeable in a streaming step.
  void allocate_workspace() {
    constexpr int64_t kLine = 64 / sizeof(double);
    const int64_t state = round_up(batch_ * hidden_, kLine);
    const int64_t c = round_up(batch_ * state_columns_, kLine);
    const int64_t rows = grid_.rows * chunk_rows_;  // for x and z; groups have separate rows
    const int64_t x = input_in_place_ ? 0 : round_up(rows * input_size_, kLine);
    const int64_t z = round_up(rows * cell_.slots * hidden_, kLine);
    const int64_t masked = masks() ? 2 * state : 0;
    workspace_ = Workspace<double>(c + state + x + z + masked);
    double* next = workspace_.data();
    const auto take = [&](int64_t doubles) { return std::exchange(next, next + doubles); };
    c_ = {take(c), state_columns_};
    h_0_ = {reinterpret_cast<float*>(take(state)), hidden_};
    x_ = {reinterpret_cast<float*>(take(x)), input_size_};
    z_data_ = reinterpret_cast<float*>(take(z));
    masked_h_ = {reinterpret_cast<float*>(take(masked)), hidden_};
  }

  void run_thread(Team& team) {
    const auto for_each_worker = [&](const auto& work) {
      team.for_each_worker([&](int64_t index) {
        work(index);
        return true;
      });
    };
    const auto for_each_block = [&](const auto& work) {
      for_each_worker([&](int64_t index) {
        const Part part = plan_.part_of(index);
        for (int64_t block = part.blocks.begin; block < part.blocks.end; ++block) work(part, block);
      });
    };
    if (io_.resets.any()) {
      for_each_block([&](const Part& part, int64_t block) { multiply_zeros(part, block); });
    }
    for (const Chunk& chunk : chunks_) {
      if (!input_in_place_) {
        for_each_worker([&](int64_t index) { copy_input(chunk, index); });
        team.barrier();
      }
      for_each_block([&](const Part& part, int64_t block) { project(chunk, part, block); });
      for (size_t k = chunk.first; k < chunk.last; ++k) {
        for_each_block([&](const Part& part, int64_t block) { step_block(k, part, block); });
        team.barrier();
      }
    }
  }

  template <typename From>
  Tensor state_of(Matrix<const From> from, int64_t columns) const {
    const Tensor state = new_tensor({batch_, columns}, args_.input->options());
    copy_rows(from, write<float>(state), batch_, columns);
    return state;
  }

  Tensor last_h() const {
    const bool all = !steps_.empty() && steps_.back().rows == batch_;
    return all ? state_of(
                     as_const(io_.h_next(steps_.size() - 1, {0, batch_}, {0, hidden_})), hidden_)
               : final_states(steps_, args_.h_0, io_.output_h());
  }

  void copy_input(const Chunk& chunk, int64_t index) {
    const int64_t group = index / grid_.columns;
    const Range columns = share(input_size_, grid_.columns, index % grid_.columns);
    for (size_t k = chunk.first; k < chunk.last; ++k) {
      const Range rows = plan_.rows_of_step(k, group);
      for (int64_t r = 0; r < rows.size(); ++r) {
        const auto from = input_.of(steps_[k].offset).from(rows.begin + r, columns.begin);
        float* const to = x_of(group).row(plan_.rows_before(k, group) + r) + columns.begin;
        for (int64_t j = 0; j < columns.size(); ++j) to[j] = from.data[j * from.col_stride];
      }
    }
  }

  void project(const Chunk& chunk, const Part& own, int64_t block) {
    const size_t last = chunk.last - 1;
    const int64_t rows =
        plan_.rows_before(last, own.group) + plan_.rows_of_step(last, own.group).size();
    if (rows == 0) return;
    const Matrix<const float> x = input_in_place_ ? input_rows(chunk) : as_const(x_of(own.group));
    weights_.project(rows, x, block, z_of(own.group, block));
  }

  // The recurrent GEMM of a zero h: the block's columns.
  float* zero_product(const Part& own, int64_t block) {
    if (!io_.resets.any()) return nullptr;
    return zero_products_.data() + cell_.slots * (own.group * hidden_ + blocks_.begin(block));
  }

  void multiply_zeros(const Part& own, int64_t block) {
    const Matrix<const float> zero_h = {zeros_.data(), hidden_};
    weights_.recur(1, zero_h, block, {zero_product(own, block), cell_.slots * blocks_.size(block)});
  }

  void step_block(size_t k, const Part& own, int64_t block) {
    const Range rows = plan_.rows_of_step(k, own.group);
    const Range units = blocks_.range(block);
    io_.enter_c(k, c_.from(own.rows.begin, units.begin), own.rows, units);
    if (rows.size() == 0) return;
    const Matrix<float> z =
        z_of(own.group, block).from(plan_.rows_before(k, own.group) - rows.begin);
    const auto recur = [&](Range part, Matrix<const float> h) {
      if (part.size() == 0) return;
      weights_.recur(part.size(), h.from(part.begin), block, z.from(part.begin));
    };
    io_.enter_z(k, z, rows, cell_.slots * units.size(), zero_product(own, block), [&] {
      const int64_t carried = carried_rows(steps_, k);
      if (k > 0) recur(intersect(rows, {0, carried}), operand(k - 1));
      recur(intersect(rows, {carried, steps_[k].rows}), as_const(h_0_));
    });

    SmallBatchArgs args;
    args.cell = &cell_;
    args.hidden = units.size();
    args.layer_hidden = hidden_;
    args.gates = as_const(z.from(rows.begin));
    args.gates_step = args.hidden;
    args.bias = bias_data_ == nullptr ? nullptr : bias_data_ + units.begin;
    args.parameters = parameters_data_ == nullptr ? nullptr : parameters_data_ + units.begin;
    args.c = c_.from(rows.begin, units.begin);
    args.h_next = io_.h_next(k, rows, units);
    args.activations = io_.saved_values(k, rows, units);
    kernels().cells[cell_.id].small_batch(args, rows.size());
    io_.leave_c(k, args.c, rows, units);
    if (masks()) io_.leave_h(k, masked(k).from(rows.begin, units.begin), rows, units);
  }

  // Reversed steps have one row.
  Matrix<const float> input_rows(const Chunk& chunk) const {
    const Matrix<const float> all = {input_.of(0).data, input_size_};
    return {all.row(steps_[chunk.first].offset), args_.reverse ? -input_size_ : input_size_};
  }
  // A group's input rows, and their pre-activations in a block.
  Matrix<float> x_of(int64_t group) const { return x_.from(group * chunk_rows_); }
  Matrix<float> z_of(int64_t group, int64_t block) const {
    const int64_t columns = cell_.slots * blocks_.size(block);
    const int64_t units = group * hidden_ + blocks_.begin(block);
    return {z_data_ + cell_.slots * units * chunk_rows_, columns};
  }
  bool masks() const { return args_.recurrent_mask.defined(); }
  // The state after step k.
  Matrix<const float> operand(size_t k) const {
    const Range all = {0, batch_};
    return as_const(masks() ? masked(k) : io_.h_next(k, all, {0, hidden_}));
  }
  Matrix<float> masked(size_t k) const {
    return masked_h_.from(static_cast<int64_t>(k % 2) * batch_);
  }

  const SequenceArgs& args_;
  const CellInfo& cell_;
  const int64_t batch_, hidden_, input_size_, state_columns_;
  const SmallBatchWeights weights_;
  const Blocks& blocks_;
  const Grid grid_;
  const std::vector<Step> steps_;
  Plan plan_;
  const ForwardIO<float> io_;
  const std::vector<Chunk> chunks_;
  const int64_t chunk_rows_;
  const StepRows<float> input_;
  const bool input_in_place_;
  std::vector<float> zeros_, zero_products_;  // empty without resets
  Tensor bias_, parameters_;
  Workspace<double> workspace_;
  // Accessing tensors is noticeable in short steps.
  const float *bias_data_ = nullptr, *parameters_data_ = nullptr;
  // Parts of the workspace; masked_h_ alternates between two steps.
  Matrix<float> h_0_, x_, masked_h_;
  float* z_data_ = nullptr;
  Matrix<double> c_;
};

}  // namespace

SequenceResult small_batch_forward(const SequenceArgs& args, const SmallBatchSchedule& schedule) {
  const auto run = [&](auto weights) {
    return SmallBatchForward(args, schedule, std::move(weights)).run();
  };
  if (schedule.in_place) return run(SmallBatchWeightsInPlace(args, schedule.blocks));
  PackedWeights<F32Format> packed =
      args.prepacked() ? read_packed<F32Format>(*args.cell, args.weight_ih)
                       : *pack_weights<F32Format>(*args.cell, weights_of(args), schedule.blocks);
  return run(PackedSmallBatchWeights(std::move(packed), args.h_0->size(0)));
}

}  // namespace lltm::cpu
