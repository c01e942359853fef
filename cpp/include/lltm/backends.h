// Settings of the backends. They apply to the whole process, like at::globalContext().
#pragma once

#include <lltm/export.h>

#include <optional>
#include <string>

namespace lltm {

/// Returns true if sequences on a GPU may use persistent kernels, which keep the recurrent weights
/// on the chip. Default: true. Persistent kernels support the built-in cells in float32, float16
/// and bfloat16, for the sizes in docs/cuda.md. All other sequences run step by step. In Python:
/// lltm.backends.cuda.persistent.
LLTM_API bool cuda_persistent();

/// Enables or disables persistent kernels for forward and backward calls that begin afterwards. May
/// be called from any thread.
LLTM_API void set_cuda_persistent(bool enabled);

/// Returns how float32 sequences on a GPU multiply matrices: "ieee" (float32 arithmetic, without
/// persistent kernels), "tf32x3" (three TF32 products in persistent kernels, as exact as float32)
/// or "tf32" (10 mantissa bits). Default: none, which follows PyTorch's setting for matmul:
/// "tf32x3" for IEEE precision (PyTorch's default), "tf32" if TF32 is allowed. In Python:
/// lltm.backends.cuda.float32.
LLTM_API std::optional<std::string> cuda_float32();

/// Sets it for forward and backward calls that begin afterwards. May be called from any thread.
/// Throws c10::ValueError for another name.
LLTM_API void set_cuda_float32(const std::optional<std::string>& precision);

}  // namespace lltm
