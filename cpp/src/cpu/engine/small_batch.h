// The small-batch engine: the blocked engine's forward pass of sequences with has_few_elements, and
// of short calls, with other GEMMs and another element-wise kernel. Input and states are float32.
//
// c is float64, and so is the element-wise part unless the cell `forgets`. GEMM operands and z are
// float32, 16-bit weights are widened. With packed weights and up to four rows, short chains are
// accumulated in float64. If the cell `forgets`, float32 sums are sufficient in x W_x^T, and for
// several rows. For several rows, they also are in the shorter products of heads.
#pragma once

#include "cpu/engine/forward_call.h"
#include "cpu/gemm/operands.h"
#include "cpu/packed_weights.h"

#include <utility>
#include <vector>

namespace lltm::cpu {

// z (rows, S * width): project() writes the columns with x, recur() adds h W_h^T.
struct SmallBatchPackedWeights : PackedWeights<F32Format> {
  SmallBatchPackedWeights(PackedWeights<F32Format> packed, int64_t batch_size)
      : PackedWeights(std::move(packed)), batch(batch_size) {}

  void project(int64_t rows, Matrix<const float> a, int64_t block, Matrix<float> z) const {
    if (cell.x.count() == 0) return;
    multiply(rows, a, x(block), z, cell.forgets, /*accumulate=*/false);
  }
  void recur(int64_t rows, Matrix<const float> a, int64_t block, Matrix<float> z) const {
    if (cell.h.count() == 0) return;
    const auto z_h = z.from(0, cell.h.begin * slot_columns(block));
    const auto h_of_head = a.from(0, first_of_h(block));
    const bool in_float32 = (cell.forgets || heads > 1) && batch > 1;
    multiply(rows, h_of_head, h(block), z_h, in_float32, /*accumulate=*/true);
  }

 private:
  // Unless `in_float32`, up to four rows are accumulated in float64: their errors are not averaged
  // out.
  static void multiply(
      int64_t rows,
      Matrix<const float> a,
      PackedB<const float> b,
      Matrix<float> c,
      bool in_float32,
      bool accumulate) {
    constexpr int64_t kChain = 32;
    const auto small_batch =
        in_float32 ? kernels().gemm_small_batch_f32 : kernels().gemm_small_batch;
    if (rows <= kMostProductRows) return small_batch(rows, a, b, c, accumulate);
    const int64_t chain = in_float32 ? longest_chain(rows) : kChain;
    gemms_f32<float>().multiply(rows, a, b, c, chain, accumulate);
  }

  int64_t batch;
};

// Used for few steps: packing would dominate.
template <typename T>
struct SmallBatchWeightsInPlace {
  SmallBatchWeightsInPlace(const CellInfo& cell, const WeightViews& views, const Partition& b)
      : weights{
            cell, {views.ih.as<const T>(), views.hh.as<const T>()}, views.hidden, views.input_size},
        heads(views.heads),
        blocks(heads == 1 ? b : Partition(b.total, b.total / heads)) {
    for (int64_t head = 0; head < heads && heads > 1; ++head) {
      of_heads.push_back(weights);
      of_heads.back().hidden = blocks.width;
      auto& rows = of_heads.back().weights.hh;
      rows = rows.from(blocks.begin(head) * cell.h.count());
    }
  }

  int64_t slot_columns(int64_t block) const { return blocks.size(block); }
  void project(int64_t rows, Matrix<const float> a, int64_t block, Matrix<float> z) const {
    weights.multiply(rows, a, {}, blocks.begin(block), blocks.size(block), z);
  }
  void recur(int64_t rows, Matrix<const float> a, int64_t block, Matrix<float> z) const {
    const int64_t unit = blocks.begin(block);
    const auto& of_block = heads == 1 ? weights : of_heads[block];
    const auto h = heads == 1 ? a : a.from(0, unit);
    of_block.multiply(rows, {}, h, heads == 1 ? unit : 0, blocks.size(block), z);
  }

  WeightsInPlace<T> weights;
  int64_t heads;                            // each is a block
  std::vector<WeightsInPlace<T>> of_heads;  // of h; empty without heads
  Partition blocks;
};

}  // namespace lltm::cpu
