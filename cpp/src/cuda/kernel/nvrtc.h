// CUDA's compiler as a library, NVRTC, which PyTorch brings: loaded when a kernel is compiled, so
// that nothing is linked to it.
//
// No header of torch or CUDA.
#pragma once

#include <string>

namespace lltm::cuda {

// Null where NVRTC can be loaded, else why not.
const char* why_no_nvrtc();

// Machine code for GPUs of a compute capability, 90 for 9.0, in the form that the driver loads; PTX
// where NVRTC does not know the GPU yet. The source may include kProgramHeaders (program_source.h).
// Throws std::runtime_error with what the compiler says. Needs NVRTC, and no GPU.
//
// What the compiler says of a source that it takes goes to `log`, with the registers of each
// kernel.
std::string compile(const std::string& source, int capability, std::string* log = nullptr);

}  // namespace lltm::cuda
