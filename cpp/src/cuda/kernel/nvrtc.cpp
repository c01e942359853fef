#include "cuda/kernel/nvrtc.h"

#include "cuda/kernel/kernel_cache.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

namespace lltm::cuda {
namespace {

// A toolkit may lack nvrtc.h. 0 means success.
using NvrtcProgram = struct NvrtcProgramOfIts*;
struct Nvrtc {
  int (*nvrtcVersion)(int* major, int* minor);
  int (*nvrtcGetNumSupportedArchs)(int* count);
  int (*nvrtcGetSupportedArchs)(int* capabilities);
  int (*nvrtcCreateProgram)(
      NvrtcProgram* program,
      const char* source,
      const char* name,
      int header_count,
      const char* const* headers,
      const char* const* header_names);
  int (*nvrtcDestroyProgram)(NvrtcProgram* program);
  int (*nvrtcCompileProgram)(NvrtcProgram program, int count, const char* const* options);
  int (*nvrtcGetProgramLogSize)(NvrtcProgram program, std::size_t* size);
  int (*nvrtcGetProgramLog)(NvrtcProgram program, char* log);
  int (*nvrtcGetCUBINSize)(NvrtcProgram program, std::size_t* size);
  int (*nvrtcGetCUBIN)(NvrtcProgram program, char* code);
  int (*nvrtcGetPTXSize)(NvrtcProgram program, std::size_t* size);
  int (*nvrtcGetPTX)(NvrtcProgram program, char* code);
  const char* (*nvrtcGetErrorString)(int result);
};

template <typename Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, name));
  return function != nullptr;
}

// PyTorch's libcaffe2_nvrtc finds NVRTC in its packages, but needs a driver.
struct Loaded {
  Nvrtc nvrtc = {};
  std::string why_not;

  Loaded() {
    void* library = nullptr;
    for (const char* name : {"libcaffe2_nvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"}) {
      if (library == nullptr) library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) {
      const char* const error = ::dlerror();
      why_not = std::string("NVRTC was not found: ") + (error == nullptr ? "" : error);
      return;
    }
#define LLTM_FIND(function) find(library, #function, nvrtc.function)
    const bool complete = LLTM_FIND(nvrtcVersion) && LLTM_FIND(nvrtcGetNumSupportedArchs) &&
                          LLTM_FIND(nvrtcGetSupportedArchs) && LLTM_FIND(nvrtcCreateProgram) &&
                          LLTM_FIND(nvrtcDestroyProgram) && LLTM_FIND(nvrtcCompileProgram) &&
                          LLTM_FIND(nvrtcGetProgramLogSize) && LLTM_FIND(nvrtcGetProgramLog) &&
                          LLTM_FIND(nvrtcGetCUBINSize) && LLTM_FIND(nvrtcGetCUBIN) &&
                          LLTM_FIND(nvrtcGetPTXSize) && LLTM_FIND(nvrtcGetPTX) &&
                          LLTM_FIND(nvrtcGetErrorString);
#undef LLTM_FIND
    if (!complete) why_not = "this NVRTC lacks a required function";
  }
};

const Loaded& loaded() {
  static const Loaded loaded;
  return loaded;
}

class Compilation {
 public:
  explicit Compilation(const std::string& source) {
    std::vector<const char*> names, texts;
    for (const ProgramHeader& header : kProgramHeaders) {
      names.push_back(header.name);
      texts.push_back(header.text);
    }
    check(nvrtc_.nvrtcCreateProgram(
        &program_,
        source.c_str(),
        "lltm_cell.cu",
        static_cast<int>(names.size()),
        texts.data(),
        names.data()));
  }
  ~Compilation() { nvrtc_.nvrtcDestroyProgram(&program_); }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  void run(const std::vector<std::string>& options) const {
    std::vector<const char*> texts;
    for (const std::string& option : options) texts.push_back(option.c_str());
    check(nvrtc_.nvrtcCompileProgram(program_, static_cast<int>(texts.size()), texts.data()));
  }
  std::string log() const { return text(nvrtc_.nvrtcGetProgramLogSize, nvrtc_.nvrtcGetProgramLog); }
  std::string machine_code() const { return text(nvrtc_.nvrtcGetCUBINSize, nvrtc_.nvrtcGetCUBIN); }
  std::string ptx() const { return text(nvrtc_.nvrtcGetPTXSize, nvrtc_.nvrtcGetPTX); }

 private:
  void check(int result) const {
    if (result == 0) return;
    std::string message = std::string("NVRTC: ") + nvrtc_.nvrtcGetErrorString(result);
    if (program_ != nullptr) message += "\n" + log();
    throw std::runtime_error(message);
  }

  template <typename Size, typename Get>
  std::string text(Size* get_size, Get* get) const {
    std::size_t size = 0;
    if (get_size(program_, &size) != 0) return {};
    std::string text(size, '\0');
    return get(program_, text.data()) == 0 ? text : std::string();
  }

  const Nvrtc& nvrtc_ = loaded().nvrtc;
  NvrtcProgram program_ = nullptr;
};

// The largest that NVRTC supports up to `capability`; without any, `capability`.
int known_capability(int capability) {
  const Nvrtc& nvrtc = loaded().nvrtc;
  int count = 0;
  if (nvrtc.nvrtcGetNumSupportedArchs(&count) != 0) return capability;
  std::vector<int> known(count);
  if (nvrtc.nvrtcGetSupportedArchs(known.data()) != 0) return capability;
  const auto above = std::upper_bound(known.begin(), known.end(), capability);
  return above == known.begin() ? capability : above[-1];
}

std::vector<std::string> options_for(int capability) {
  if (const char* const why_not = why_no_nvrtc()) throw std::runtime_error(why_not);
  const int known = known_capability(capability);
  return {
      "--gpu-architecture=" + std::string(known == capability ? "sm_" : "compute_") +
          std::to_string(known),
      "--std=c++20",
      "--device-as-default-execution-space"};
}

}  // namespace

const char* why_no_nvrtc() {
  const std::string& why_not = loaded().why_not;
  return why_not.empty() ? nullptr : why_not.c_str();
}

std::string nvrtc_version() {
  int major = 0, minor = 0;
  loaded().nvrtc.nvrtcVersion(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string kernel_key(const std::string& source, int capability) {
  std::string key = source;
  for (const ProgramHeader& header : kProgramHeaders) {
    for (const char* const part : {header.name, header.text}) key += '\0' + std::string(part);
  }
  return key + '\0' + std::to_string(capability);
}

std::string compilation_key(const std::string& source, int capability) {
  std::string key = kernel_key(source, capability);
  for (const std::string& option : options_for(capability)) key += '\0' + option;
  return key + '\0' + nvrtc_version();
}

std::string compile(const std::string& source, int capability, std::string* log) {
  std::vector<std::string> options = options_for(capability);
  const bool to_ptx = known_capability(capability) != capability;
  if (log != nullptr && !to_ptx) options.emplace_back("--ptxas-options=-v");
  const Compilation compilation(source);
  compilation.run(options);
  if (log != nullptr) *log = compilation.log();
  return to_ptx ? compilation.ptx() : compilation.machine_code();
}

int load_kernel(
    const KernelForm& form,
    int capability,
    std::string& code,
    const std::function<int(const std::string&)>& load) {
  const std::string source = print_kernel(form);
  const auto compiled = [&](bool replace) {
    return cached(
        compilation_key(source, capability), [&] { return compile(source, capability); }, replace);
  };
  // A GPU also runs code for earlier minor versions.
  for (int known = capability; code.empty() && known >= capability / 10 * 10; --known) {
    code = embedded(kernel_key(source, known));
  }
  if (code.empty()) code = compiled(/*replace=*/false);
  int result = load(code);
  if (result != 0 && why_no_nvrtc() == nullptr) {
    code = compiled(/*replace=*/true);
    result = load(code);
  }
  return result;
}

}  // namespace lltm::cuda
