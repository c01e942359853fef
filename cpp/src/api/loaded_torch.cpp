// Compares the libtorch that this process has loaded with the one that liblltm was
// compiled for, as soon as liblltm is loaded.
#include <torch/version.h>

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

// Of libtorch since 2.9: major, minor and patch release, a byte each from the left.
extern "C" __attribute__((weak)) std::uint64_t aoti_torch_abi_version();

namespace {

// The C++ ABI of libtorch holds for one minor release. With another one the process would
// end wherever it calls a function that is not there, or go on with objects of the wrong
// size. This runs while the library is loaded, where no caller could catch an exception, and
// before the static objects of the library register its operators (101 is the first priority
// that is not the compiler's own).
__attribute__((constructor(101))) void check_loaded_torch() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned patch = 0;
  if (aoti_torch_abi_version != nullptr) {
    const std::uint64_t version = aoti_torch_abi_version();
    major = version >> 56;
    minor = version >> 48 & 0xff;
    patch = version >> 40 & 0xff;
  }
  if (major == TORCH_VERSION_MAJOR && minor == TORCH_VERSION_MINOR) return;

  std::fprintf(
      stderr,
      "lltm: liblltm was built for libtorch %d.%d and cannot run with ",
      TORCH_VERSION_MAJOR,
      TORCH_VERSION_MINOR);
  Dl_info found{};
  if (major == 0) {
    std::fputs("a libtorch older than 2.9", stderr);
  } else {
    std::fprintf(stderr, "libtorch %u.%u.%u", major, minor, patch);
    if (dladdr(reinterpret_cast<void*>(aoti_torch_abi_version), &found) != 0) {
      std::fprintf(stderr, " (%s)", found.dli_fname);
    }
  }
  std::fprintf(
      stderr,
      ": run it with libtorch %d.%d, or build lltm again for this libtorch\n",
      TORCH_VERSION_MAJOR,
      TORCH_VERSION_MINOR);
  std::_Exit(EXIT_FAILURE);
}

}  // namespace
