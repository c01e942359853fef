// Compiled kernels in files. The folder is $LLTM_CACHE_DIR (an absolute path; empty: no cache),
// $XDG_CACHE_HOME/lltm or ~/.cache/lltm. Kernels that were compiled with the library are in
// `lltm-kernels` next to it.
//
// Any number of threads and processes may share the folder. Each failure, such as a full disk, only
// costs a compilation. Nothing is removed. No torch or CUDA header.
#pragma once

#include <functional>
#include <string>

namespace lltm::cuda {

// Returns the code of a key from its file, otherwise from `compile`, and writes the file. The key
// contains everything that determines the code. `replace` does not read the file. Throws only
// errors of `compile`.
std::string cached(
    const std::string& key, const std::function<std::string()>& compile, bool replace = false);

// Returns the folder, which it creates, or "none" with the reason.
std::string describe_kernel_cache();

// The folder of the library's kernels, or "".
std::string embedded_folder();
// Returns the code of a key from this folder, or "".
std::string embedded(const std::string& key);

}  // namespace lltm::cuda
