// Some rows of a batch, computed once more as a sequence of their own.
#pragma once

#include "common/operator_args.h"

#include <cstdint>
#include <vector>

namespace lltm::cpu {

// Replaces the results of `rows`, in ascending order, by those that `forward` computes of them
// alone, all their steps. Not for results that backward needs.
void recompute_rows(
    const SequenceArgs& args,
    const std::vector<int64_t>& rows,
    SequenceResult& result,
    SequenceResult (*forward)(const SequenceArgs&));

}  // namespace lltm::cpu
