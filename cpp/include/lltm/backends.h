// Settings of the backends, for the whole process, as those of at::globalContext() are.
#pragma once

#include <lltm/export.h>

namespace lltm {

/// Whether sequences on a GPU may run by persistent kernels, which keep the recurrent
/// weights on the chip: in float16 and bfloat16, for the sizes in docs/cuda.md; others run step by
/// step in any case.
/// In Python: lltm.backends.cuda.persistent.
LLTM_API bool cuda_persistent();

/// Sets it, for the calls that begin from now on, forward or backward.
LLTM_API void set_cuda_persistent(bool enabled);

}  // namespace lltm
