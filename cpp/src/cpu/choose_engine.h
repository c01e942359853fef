// The engine of a sequence's call: a pure function of the call and the machine.
#pragma once

#include "cpu/schedule.h"

#include <cstdint>

namespace lltm::cpu {

// A set of formats.
constexpr unsigned format_bit(GemmFormat format) {
  return 1u << static_cast<int>(format);
}

// The properties of a call of a sequence that determine its engine.
struct Call {
  LayerShape shape;
  int64_t steps;
  Storage storage;
  bool backward = false;
  bool wide_gradients = false;  // SequenceBackwardArgs::has_wide_gradients
  bool empty = false;           // input, state or a matrix has no elements
  bool stages = false;          // the step has several stages
  bool given = false;           // the step has given gates
  bool forgets = false;         // as CellInfo
  bool small_layer = false;     // cell and arguments suit kernel/small_layer.h
  // Weights with heads, and whether these are packed by head.
  bool heads = false, packs_heads = false;
  unsigned prepacked = 0;  // formats of prepacked weights
  int64_t weights = 0;     // elements, if not prepacked
};

struct Engine {
  enum Kind { kPerStep, kSmallBatch, kSmallLayer, kOneStep, kBlocked, kInt8 } kind;
  Machine machine;      // with the formats that the schedule may use
  bool unpack = false;  // prepacked weights first become matrices
  bool dense = false;   // weights with heads first become a matrix with zeros
  SmallBatchSchedule small_batch = {};
};

Engine choose_engine(const Machine& machine, Call call);

}  // namespace lltm::cpu
