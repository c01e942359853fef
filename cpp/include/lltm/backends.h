// Settings of the backends. They apply to the whole process, like at::globalContext().
#pragma once

#include <lltm/export.h>

namespace lltm {

/// Returns true if sequences on a GPU may use persistent kernels, which keep the recurrent weights
/// on the chip. Default: true. Persistent kernels support LLTM, LSTM and GRU in float16 and
/// bfloat16, for the sizes in docs/cuda.md, without recurrent dropout. All other sequences run step
/// by step. In Python: lltm.backends.cuda.persistent.
LLTM_API bool cuda_persistent();

/// Enables or disables persistent kernels for forward and backward calls that begin afterwards. May
/// be called from any thread.
LLTM_API void set_cuda_persistent(bool enabled);

}  // namespace lltm
