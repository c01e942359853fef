#include "cuda/kernel/compiled.h"

#include "cuda/context.h"
#include "cuda/kernel/kernel_cache.h"
#include "cuda/kernel/nvrtc.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace lltm::cuda {
namespace {

// Loads the kernel into the current device's context. `code` is compiled if it is empty.
void* loaded(const KernelForm& form, std::string& code, std::int64_t shared_bytes) {
  const int capability = compute_capability();
  const OutsideOfCapture outside;
  void *module = nullptr, *function = nullptr;
  try {
    check_driver(load_kernel(form, capability, code, [&](const std::string& image) {
      return functions().cuModuleLoadData(&module, image.data());
    }));
  } catch (const std::runtime_error& error) {
    TORCH_CHECK(
        false,
        "lltm: a kernel of the cell '",
        form.cell->title(),
        "' could not be compiled for compute capability ",
        capability / 10,
        ".",
        capability % 10,
        ": ",
        error.what());
  }
  check_driver(functions().cuModuleGetFunction(&function, module, kernel_name(form)));
  // More than 48 KiB must be requested.
  check_driver(
      functions().cuFuncSetAttribute(
          function, kMaxDynamicSharedBytes, static_cast<int>(shared_bytes)));
  return function;
}

// A kernel's code by compute capability and functions by device. Its lock is held while it is
// compiled: only calls of the same kernel wait.
struct CompiledKernel {
  std::mutex mutex;
  std::map<int, std::string> codes;
  std::map<c10::DeviceIndex, void*> functions;

  void* function(const KernelForm& form, std::int64_t shared_bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    void*& function = functions[current_device()];
    if (function == nullptr) {
      function = loaded(form, codes[compute_capability()], shared_bytes);
    }
    return function;
  }
};

CompiledKernel& kernel_of(const KernelForm& form) {
  // Never destroyed: other threads may still run when static objects are destroyed.
  static std::mutex& mutex = *new std::mutex;
  static auto& kernels = *new std::map<KernelForm, CompiledKernel>;
  const std::lock_guard<std::mutex> lock(mutex);
  return kernels[form];
}

// Remembers the last kernel: the steps of a sequence launch the same one, without a lock.
void* find(const KernelForm& form, std::int64_t shared_bytes) {
  struct Found {
    KernelForm form = {};
    c10::DeviceIndex device = -1;
    void* function = nullptr;
  };
  thread_local Found last;
  const c10::DeviceIndex device = current_device();
  if (last.device != device || last.form != form) {
    last = {form, device, kernel_of(form).function(form, shared_bytes)};
  }
  return last.function;
}

}  // namespace

const char* why_no_compiled_kernels() {
  const char* const why_not = why_no_functions();
  return why_not == nullptr && embedded_folder().empty() ? why_no_nvrtc() : why_not;
}

std::string describe_compiled_kernels() {
  if (const char* const why_not = why_no_compiled_kernels()) {
    return std::string("none (") + why_not + ")\n";
  }
  const std::string folder = embedded_folder();
  std::string text = folder.empty() ? "" : "in " + folder + ", others ";
  if (const char* const why_not = why_no_nvrtc()) return text + "none (" + why_not + ")\n";
  return text + "compiled by NVRTC " + nvrtc_version() +
         " at their first use\nCUDA kernel cache: " + describe_kernel_cache() + "\n";
}

int local_bytes(const KernelForm& form, std::int64_t shared_bytes) {
  int bytes = 0;
  check_driver(functions().cuFuncGetAttribute(&bytes, kLocalBytes, find(form, shared_bytes)));
  return bytes;
}

bool launch_compiled(const KernelForm& form, const Grid& grid, void** parameters, Stream stream) {
  void* const function = find(form, grid.shared_bytes);
  const auto launch = [&](auto* kind, auto... extra) {
    return kind(
        function,
        static_cast<unsigned>(grid.x),
        static_cast<unsigned>(grid.y),
        static_cast<unsigned>(grid.z),
        static_cast<unsigned>(grid.threads),
        1,
        1,
        static_cast<unsigned>(grid.shared_bytes),
        stream.handle,
        parameters,
        extra...);
  };
  const int result = grid.cooperative ? launch(functions().cuLaunchCooperativeKernel)
                                      : launch(functions().cuLaunchKernel, nullptr);
  if (grid.cooperative &&
      (result == kCooperativeLaunchTooLarge || result == kLaunchOutOfResources)) {
    return false;
  }
  check_driver(result);
  return true;
}

}  // namespace lltm::cuda
