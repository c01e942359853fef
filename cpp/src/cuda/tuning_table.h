// Measured: benchmarks/tuning_table.py makes this of benchmarks/results/*/sweep.jsonl.
#pragma once

#include "cuda/tuning.h"

#include <array>

namespace lltm::cuda {

inline constexpr std::array<TuningEntry, 0> kTuningTable = {};

}  // namespace lltm::cuda
