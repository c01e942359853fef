// Ends the process with a message if liblltm was compiled for another libtorch, or if another
// liblltm is loaded. While a library loads, no caller can catch an exception.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/version.h>

#include <dlfcn.h>
#if defined(__APPLE__)
#include <mach-o/dyld.h>
#else
#include <link.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

// Since libtorch 2.9: major, minor and patch version in the three highest bytes.
extern "C" __attribute__((weak)) std::uint64_t aoti_torch_abi_version();

namespace {

// libtorch's C++ ABI is stable only within a minor release. With another, the process would fail at
// a missing function or use objects of the wrong size. Runs before the static objects that register
// the operators: 101 is the first priority not reserved for the compiler. On macOS, priorities
// order only the constructors of one file, and CMakeLists.txt links this file first.
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

// The first loaded object with the name of this library, or null.
#if defined(__APPLE__)
const char* first_library() {
  for (std::uint32_t k = 0; k < _dyld_image_count(); ++k) {
    const char* const path = _dyld_get_image_name(k);
    if (std::string_view(path).find("/liblltm.") != std::string_view::npos) return path;
  }
  return nullptr;
}
#else
int find_library(dl_phdr_info* object, std::size_t, void* found) {
  const std::string_view path(object->dlpi_name);
  if (path.find("/liblltm.so") == path.npos) return 0;
  *static_cast<const char**>(found) = object->dlpi_name;
  return 1;
}
const char* first_library() {
  const char* found = nullptr;
  dl_iterate_phdr(find_library, &found);
  return found;
}
#endif

// PyTorch's only registry can define each operator once.
__attribute__((constructor(102))) void check_other_copy() {
  if (!c10::Dispatcher::singleton().findSchema({"lltm::step", ""})) return;
  const char* const first = first_library();
  Dl_info here{};
  const bool found = dladdr(reinterpret_cast<void*>(check_other_copy), &here) != 0;
  std::fprintf(
      stderr,
      "lltm: %s cannot be loaded together with %s: both register the operators lltm::*, and a "
      "process has "
      "one registry; load one of them\n",
      found ? here.dli_fname : "liblltm",
      first != nullptr ? first : "another liblltm");
  std::_Exit(EXIT_FAILURE);
}

}  // namespace
