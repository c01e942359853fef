#pragma once

#include "common/operator_args.h"

#include <cstdint>
#include <vector>

namespace lltm::cpu {

// Replaces the results of `rows` (ascending), in all steps, by `forward` of these rows. Inference
// only.
void recompute_rows(
    const SequenceArgs& args,
    const std::vector<int64_t>& rows,
    SequenceResult& result,
    SequenceResult (*forward)(const SequenceArgs&));

}  // namespace lltm::cpu
