#pragma once

#include "common/operator_args.h"

#include <cstdint>
#include <vector>

namespace lltm::cpu {

// Replaces the results of `rows` (ascending), in all steps, with `forward` for these rows only.
// Does not support results that backward needs.
void recompute_rows(
    const SequenceArgs& args,
    const std::vector<int64_t>& rows,
    SequenceResult& result,
    SequenceResult (*forward)(const SequenceArgs&));

}  // namespace lltm::cpu
