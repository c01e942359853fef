// NVRTC, CUDA's compiler as a library from PyTorch's packages, loaded at the first compilation. No
// torch or CUDA header.
#pragma once

#include "cuda/kernel/program_source.h"

#include <functional>
#include <string>

namespace lltm::cuda {

// Null if NVRTC can be loaded, otherwise the reason.
const char* why_no_nvrtc();

// For example "13.0". Requires NVRTC.
std::string nvrtc_version();

// Compiles a source, which may include kProgramHeaders, to machine code for a
// compute capability (90 for 9.0), or to PTX if NVRTC does not support the GPU yet. Needs no GPU.
// Throws std::runtime_error with the compiler's message. `log` gets the messages, with each
// kernel's registers.
std::string compile(const std::string& source, int capability, std::string* log = nullptr);

// Everything that determines the result except NVRTC: source, kProgramHeaders, GPU.
std::string kernel_key(const std::string& source, int capability);
// With NVRTC's options and version.
std::string compilation_key(const std::string& source, int capability);

// Calls load(code), which returns a CUresult, with the kernel's `code`. If it is empty, sets it
// from the library or the cache (kernel_cache.h), otherwise compiles. If `load` fails, compiles
// again, replaces the cached code and calls it once more. Returns the last result.
int load_kernel(
    const KernelForm& form,
    int capability,
    std::string& code,
    const std::function<int(const std::string&)>& load);

}  // namespace lltm::cuda
