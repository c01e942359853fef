// The forward engines on raw memory, all of which belongs to the caller: forward_tensors.cpp takes
// it from tensors. They allocate only workspaces. No PyTorch header.
#pragma once

#include "cell/cell.h"
#include "common/matrix.h"
#include "common/steps.h"
#include "cpu/packed_weights.h"
#include "cpu/schedule.h"

#include <cstdint>
#include <vector>

namespace lltm::cpu {

struct ForwardCall {
  const CellInfo& cell;
  int64_t batch, input_size, hidden;  // input_size includes given gates
  std::vector<Step> steps;
  bool reverse;
  Storage storage;  // of `given`, c_0, mask and results

  // Of the type from which the format packs operands (Format::Unpacked), with contiguous rows.
  StepsView input;
  bool input_is_contiguous;
  View h_0;         // (B, H), masked
  StepsView given;  // the input in `storage`, if the cell has given gates
  View c_0;         // (B, state columns * H)
  View recurrent_mask;
  const bool* reset;               // by row of the input, or null
  const float *bias, *parameters;  // (S * H), (P * H), or null
  PackedBytes packed;              // or, if empty:
  WeightViews weights;

  // Results, contiguous.
  void *output, *h_n;  // (N, output columns * H), (B, H)
  void* c_n;           // null if not wanted, only for few rows
  void* activations;   // (N, saved * H), or null
  void* checkpoints;   // c before every checkpoint_steps-th step, if not 0
  int64_t checkpoint_steps;
};

// blocked_forward.cpp: the blocked engine, without float64 or empty sizes. False if values are out
// of range of the format.
bool run_blocked(const ForwardCall& call, const ForwardSchedule& schedule);
// Returns the batch elements that cannot be quantized. Their results are invalid.
std::vector<int64_t> run_blocked_int8(const ForwardCall& call, const ForwardSchedule& schedule);

// blocked_forward.cpp: the small-batch engine (small_batch.h), if `storage` is kF32.
void run_small_batch(const ForwardCall& call, const SmallBatchSchedule& schedule);

// small_layer.cpp: the small-layer engine, if Call::small_layer. The input is contiguous and has
// `steps` steps of B rows; call.steps is not read.
void run_small_layer(const ForwardCall& call, int64_t steps);

}  // namespace lltm::cpu
