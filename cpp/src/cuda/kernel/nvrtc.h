// NVRTC, CUDA's compiler as a library, which is part of PyTorch's packages. It is loaded when a
// kernel is compiled, so nothing is linked to it.
//
// No torch or CUDA header.
#pragma once

#include <string>

namespace lltm::cuda {

// Returns null if NVRTC can be loaded, otherwise the reason.
const char* why_no_nvrtc();

// Compiles a source to machine code for a compute capability (90 for 9.0), in the form that the
// driver loads. If NVRTC does not support the GPU yet, returns PTX. The source may include
// kProgramHeaders (program_source.h). Requires NVRTC, but no GPU. Throws std::runtime_error with
// the compiler's message.
//
// `log` receives the compiler's messages if it succeeds, with the number of registers of each
// kernel.
std::string compile(const std::string& source, int capability, std::string* log = nullptr);

}  // namespace lltm::cuda
