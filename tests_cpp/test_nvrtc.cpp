// Compiles all kernels with NVRTC, without a GPU.
// test_cuda_engine.cpp, test_cuda_custom_cells.cpp and test_cuda_persistent.cpp test their results.
#include "cell/cells.h"
#include "cell/registry.h"
#include "cell_program.h"
#include "cuda/functions.h"
#include "cuda/kernel/elementwise_kernels.h"
#include "cuda/kernel/kernel_cache.h"
#include "cuda/kernel/nvrtc.h"
#include "cuda/kernel/persistent.h"
#include "cuda/kernel/program_source.h"

#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <dlfcn.h>

#if __has_include(<cuda.h>)
#include <cuda.h>
#include <library_types.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm::cuda {
namespace {

#if __has_include(<cuda.h>)
static_assert(kCooperativeLaunchTooLarge == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
static_assert(kLaunchOutOfResources == CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
static_assert(kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(kLocalBytes == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
static_assert(kMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(kHostAllocDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
constexpr bool equals(DeviceAttribute ours, CUdevice_attribute theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(
    equals(DeviceAttribute::kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
static_assert(equals(DeviceAttribute::kL2CacheBytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE));
static_assert(
    equals(DeviceAttribute::kCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR));
static_assert(
    equals(DeviceAttribute::kCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
static_assert(equals(DeviceAttribute::kCooperativeLaunch, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH));
static_assert(equals(
    DeviceAttribute::kMaxSharedBytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN));
static_assert(int{kR32F} == int{CUDA_R_32F} && int{kR64F} == int{CUDA_R_64F});
static_assert(int{kR16F} == int{CUDA_R_16F} && int{kR16BF} == int{CUDA_R_16BF});
#endif

// Loads the libraries as PyTorch does on a GPU: one finds the other by name.
const bool kLoaded = [] {
  for (const char* library : {LLTM_NVRTC_BUILTINS, LLTM_NVRTC_LIBRARY}) {
    if (::dlopen(library, RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(::dlerror());
  }
  return true;
}();

// `make check-cuda-build` compiles the largest persistent kernels, and for one GPU; .ci/nightly
// compiles all.
const bool kCompilesAll = std::getenv("LLTM_COMPILE_ALL_KERNELS") != nullptr;
const std::vector<int> kGpus =
    kCompilesAll ? std::vector<int>{75, 80, 86, 89, 90, 100, 120} : std::vector<int>{90};

struct Kind {
  const char* name;
  KernelType tensor, state;
  int width;  // of the wide kernel
};
const Kind kKinds[] = {
    {"float64", KernelType::kDouble, KernelType::kDouble, 2},
    {"float32", KernelType::kFloat, KernelType::kFloat, 4},
    {"float16", KernelType::kHalf, KernelType::kFloat, 8},
    {"float16_step", KernelType::kHalf, KernelType::kHalf, 8},
    {"bfloat16", KernelType::kBFloat16, KernelType::kFloat, 8},
    {"bfloat16_step", KernelType::kBFloat16, KernelType::kBFloat16, 8}};
void PrintTo(const Kind& kind, std::ostream* stream) {
  *stream << kind.name;
}

const bool kOneCell = std::getenv("LLTM_TEST_CELL") != nullptr;

std::vector<const CellInfo*> cells(bool staged) {
  std::vector<std::string> texts = lltm_test::kCellTexts;
  for (const CellInfo* const cell : kCells) texts.emplace_back(cell->name);
  if (staged) texts.push_back(lltm_test::kStagedText);
  std::vector<const CellInfo*> cells;
  for (const std::string& text : lltm_test::given_cell_or(texts)) cells.push_back(find_cell(text));
  return cells;
}
class ElementwiseKernels : public testing::TestWithParam<std::tuple<const CellInfo*, Kind>> {};
INSTANTIATE_TEST_SUITE_P(
    Cells,
    ElementwiseKernels,
    testing::Combine(testing::ValuesIn(cells(/*staged=*/true)), testing::ValuesIn(kKinds)),
    [](const auto& info) {
      return std::get<0>(info.param)->title() + std::string("_") + std::get<1>(info.param).name;
    });

int count(const std::string& log, const std::string& text) {
  int count = 0;
  for (size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++count;
  return count;
}

// `sizes`: types whose layout the host and NVRTC share; signatures do not contain sizes.
void expect_no_spills(
    const KernelForm& form, const std::vector<std::pair<std::string, size_t>>& sizes) {
  std::string source = print_kernel(form);
  for (const auto& [type, size] : sizes) {
    source += "static_assert(sizeof(lltm::cuda::" + type + ") == " + std::to_string(size) + ");\n";
  }
  for (const int capability : kGpus) {
    if (capability < 80 && form.is_persistent() && form.tensor != KernelType::kHalf) continue;
    SCOPED_TRACE(testing::Message() << "sm_" << capability);
    std::string log;
    const std::string code = compile(source, capability, &log);
    EXPECT_EQ(
        code.substr(0, 4),
        "\x7f"
        "ELF");
    EXPECT_NE(code.find(kernel_name(form)), std::string::npos);
    // Also of CUDA's function for large arguments of sin and cos in float64.
    const int functions = count(log, "Function properties for ");
    EXPECT_GE(functions, 1) << log;
    EXPECT_EQ(count(log, " 0 bytes spill stores, 0 bytes spill loads"), functions) << log;
  }
}

void check_elementwise(KernelForm form, int wide_width) {
  const int hidden = 64;  // any size whose rows consist of full accesses
  const Program& program = form.stage->program;
  const bool fits = wide_width == 2   ? fits_wide<double>(program, hidden)
                    : wide_width == 4 ? fits_wide<float>(program, hidden)
                                      : fits_wide<c10::Half>(program, hidden);
  for (const int width : fits ? std::vector<int>{1, wide_width} : std::vector<int>{1}) {
    SCOPED_TRACE(testing::Message() << kernel_name(form) << ", width " << width);
    form.width = width;
    expect_no_spills(form, {{"Args", sizeof(StageArgs<float, float, false>)}});
  }
  // The driver compiles this form for future GPUs.
  const std::string ptx = compile(print_kernel(form), 999);
  EXPECT_NE(ptx.find(".target sm_"), std::string::npos);
  EXPECT_NE(ptx.find(std::string(".entry ") + kernel_name(form)), std::string::npos);
  for (const std::string access : {"ld.global.", "st.global."}) {
    const std::string wide = access + (wide_width == 2 ? "v2.f64" : "v4.");
    EXPECT_EQ(ptx.find(wide) != std::string::npos, fits) << kernel_name(form) << ": " << wide;
  }
}

TEST_P(ElementwiseKernels, CompileForEachGpuWithoutSpillsAndWithWideAccesses) {
  const auto& [cell, kind] = GetParam();
  for (const bool backward : {false, true}) {
    const bool is_step = kind.tensor == kind.state && kind.width == 8;
    if (is_step && !backward) continue;  // forward has no state gradients
    const Pass& pass = backward ? cell->backward() : cell->forward();
    EXPECT_TRUE(pass.count == 3 || cell->name != lltm_test::kStagedText);
    for (int stage = 0; stage < pass.count; ++stage) {
      SCOPED_TRACE(testing::Message() << "stage " << stage);
      check_elementwise(
          {cell, backward, kind.tensor, kind.state, 1, &pass.stages[stage]}, kind.width);
    }
  }
}

struct PersistentType {
  const char* name;
  KernelType type;
  bool tf32;
};
std::vector<PersistentType> persistent_types() {
  std::vector<PersistentType> types = {
      {"float16", KernelType::kHalf, false},
      {"float32", KernelType::kFloat, false},
      {"tf32", KernelType::kFloat, true}};
  if (kCompilesAll) types.push_back({"bfloat16", KernelType::kBFloat16, false});
  return types;
}
class PersistentKernels
    : public testing::TestWithParam<std::tuple<const CellInfo*, PersistentType, bool>> {};
INSTANTIATE_TEST_SUITE_P(
    Cells,
    PersistentKernels,
    testing::Combine(
        testing::ValuesIn(cells(/*staged=*/false)),
        testing::ValuesIn(persistent_types()),
        testing::Bool()),
    [](const auto& info) {
      const char* const direction = std::get<2>(info.param) ? "backward_" : "forward_";
      return std::string(direction) + std::get<0>(info.param)->title() + "_" +
             std::get<1>(info.param).name;
    });

template <typename Args>
void check_persistent(const CellInfo& cell, const PersistentType& type) {
  if (cell.h.count() == 0 || !cell.is_element_wise()) return;  // not in the persistent engine
  const int outputs = outputs_of<Args>(cell);
  if (outputs > 8 && type.type == KernelType::kFloat) return;  // the engine falls back
  const std::int64_t piece = kWarps * kWarpUnits<typename Args::Element>;
  const auto hidden_of = [&](std::int64_t units) {
    return units * piece / (Args::kIsForward ? 1 : cell.h.count());
  };
  const auto kernel_of = [&](std::int64_t units, int tiles) {
    return persistent_kernel<Args>(cell, hidden_of(units), tiles, type.tf32);
  };
  int most = 1;
  while (kernel_of(most + 1, 1).shared_units == 0) ++most;
  // The largest weights in registers, and several chunks in shared memory.
  const int chunk = shared_chunk(outputs);
  std::vector<int> unit_counts = {most, most + 3 * chunk}, tile_counts = {1, 4};
  // The engine checks the registers of custom cells.
  if (!is_built_in(cell)) unit_counts = tile_counts = {1};
  if (kCompilesAll && is_built_in(cell)) {
    unit_counts.insert(unit_counts.end(), {most - 1, most + 1, most + chunk + 1});
    tile_counts.push_back(2);
  }
  for (const int units : unit_counts) {
    for (const int tiles : tile_counts) {
      const PersistentKernel kernel = kernel_of(units, tiles);
      SCOPED_TRACE(
          testing::Message() << kernel.units << " + " << kernel.shared_units << " units, " << tiles
                             << " tiles");
      KernelForm form = {&cell, !Args::kIsForward, type.type, type.type};
      form.units = kernel.units;
      form.shared_units = kernel.shared_units;
      form.tiles = tiles;
      form.tf32 = type.tf32;
      expect_no_spills(form, {{"Args", sizeof(Args)}});
      if (!is_built_in(cell)) {
        form.heads = 1;
        expect_no_spills(form, {{"Args", sizeof(Args)}});
      }
      constexpr std::int64_t kMostMultiprocessors = 188;  // of a GPU, for both directions
      if (tiles != 1 && 2 * slices_of(hidden_of(units)) > kMostMultiprocessors) continue;
      if (tiles != 1) {
        form.directions = 2;
        form.tiles = std::min(tiles, most_tiles<typename Args::Element>(2));
        expect_no_spills(form, {{"Args", sizeof(DirectionArgs<Args>)}});
        continue;
      }
      const std::string ptx = compile(print_kernel(form), 999);
      const char* const mma = type.tf32 || type.type == KernelType::kFloat ? "m16n8k8" : "m16n8k16";
      for (const char* instruction : {mma, "ld.relaxed.gpu.global.v4", "st.relaxed.gpu.global"}) {
        EXPECT_NE(ptx.find(instruction), std::string::npos) << instruction;
      }
      // Each wait reports its timeout; more would wait for words one after another, as only the
      // exact GEMM of 3xTF32 does, for infinities in its two rows.
      const int waits = count(ptx, "st.relaxed.sys.global");
      EXPECT_GE(waits, 1);
      const int exact = type.type == KernelType::kFloat && !type.tf32 ? 2 : 0;
      EXPECT_LE(waits, (kernel.shared_units > 0 ? 3 : 1) + exact);
    }
  }
}

TEST_P(PersistentKernels, CompileForEachGpuWithoutSpills) {
  const auto& [cell, type, backward] = GetParam();
  if (type.type == KernelType::kFloat) {
    backward ? check_persistent<PersistentBackwardArgs<float>>(*cell, type)
             : check_persistent<PersistentForwardArgs<float>>(*cell, type);
  } else {
    backward ? check_persistent<PersistentBackwardArgs<c10::Half>>(*cell, type)
             : check_persistent<PersistentForwardArgs<c10::Half>>(*cell, type);
  }
}

// For benchmarks/sass.py, which counts their instructions: H = 768, and B = 16 on an H100.
template <typename Args>
void write_kernel(const char* cell_name, const char* type_name) {
  const CellInfo& cell = *find_cell(cell_name);
  constexpr bool kFloat = sizeof(typename Args::Element) == sizeof(float);
  constexpr KernelType kType = kFloat ? KernelType::kFloat : KernelType::kHalf;
  const PersistentKernel kernel = persistent_kernel<Args>(cell, 768, /*tiles=*/1);
  KernelForm form = {&cell, !Args::kIsForward, kType, kType};
  form.units = kernel.units;
  form.shared_units = kernel.shared_units;
  form.tiles = kernel.tiles;
  std::string log;
  const std::string code = compile(print_kernel(form), 90, &log);
  const std::string direction = Args::kIsForward ? "forward" : "backward";
  const std::string name = std::string(cell_name) + "-" + type_name + "-" + direction;
  std::ofstream(std::getenv("LLTM_WRITE_KERNELS") + ("/" + name + ".cubin")) << code;
  const int products = kFloat ? 3 : 1;  // 3xTF32
  const int mma = 2 * (kernel.units + kernel.shared_units) * outputs_of<Args>(cell) * products;
  std::cout << "\nkernel " << name << " NVRTC " << nvrtc_version() << " mma " << mma << ' ' << log;
}

TEST(Nvrtc, WritesKernels) {
  if (std::getenv("LLTM_WRITE_KERNELS") == nullptr) GTEST_SKIP();
  for (const char* const cell : {"lstm", "gru"}) {
    write_kernel<PersistentForwardArgs<float>>(cell, "float32");
    write_kernel<PersistentBackwardArgs<float>>(cell, "float32");
    write_kernel<PersistentForwardArgs<c10::Half>>(cell, "float16");
    write_kernel<PersistentBackwardArgs<c10::Half>>(cell, "float16");
  }
}

TEST(Nvrtc, ReportsErrors) {
  ASSERT_EQ(why_no_nvrtc(), nullptr);
  try {
    compile("extern \"C\" __global__ void kernel() { nothing; }", 90);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find("NVRTC: NVRTC_ERROR_COMPILATION\n"), 0) << message;
    EXPECT_NE(message.find("identifier \"nothing\" is undefined"), std::string::npos) << message;
  }
}

TEST(Nvrtc, TheKeyContainsEverythingThatDeterminesTheCode) {
  const std::string key = compilation_key("source", 90);
  for (const std::string& part : {std::string("source"), nvrtc_version(), std::string("sm_90")}) {
    EXPECT_NE(key.find(part), std::string::npos) << part;
  }
  for (const ProgramHeader& header : kProgramHeaders) {
    EXPECT_NE(key.find(header.text), std::string::npos) << header.name;
  }
  EXPECT_NE(compilation_key("source", 999).find("compute_"), std::string::npos);
  EXPECT_GE(std::stoi(nvrtc_version()), 12);
}

// As LLTM_CUDA_EMBED does, in the folder of this program.
TEST(Nvrtc, KernelsOfTheLibraryAreNotCompiled) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::read_symlink("/proc/self/exe").parent_path() / "lltm-kernels";
  const CellInfo& cell = *find_cell("lltm");
  KernelForm form = {
      &cell, /*backward=*/false, KernelType::kHalf, KernelType::kFloat, 1, cell.forward().stages};
  ::setenv("LLTM_CACHE_DIR", folder.c_str(), /*overwrite=*/1);
  cached(kernel_key(print_kernel(form), 86), [] { return "compiled before"; });
  ::setenv("LLTM_CACHE_DIR", "", /*overwrite=*/1);
  EXPECT_TRUE(fs::equivalent(embedded_folder(), folder));
  const auto code_of = [&](int capability, int failures = 0) {
    std::string code;
    const auto load = [&](const std::string&) { return failures-- > 0 ? 200 : 0; };
    EXPECT_EQ(load_kernel(form, capability, code, load), 0);
    return code;
  };
  for (const int capability : {86, 89}) EXPECT_EQ(code_of(capability), "compiled before");
  const auto expect_compiled = [&](int capability, int failures = 0) {
    EXPECT_EQ(code_of(capability, failures).substr(1, 3), "ELF") << capability;
  };
  expect_compiled(86, /*failures=*/1);
  // A file whose code the driver rejects is replaced.
  ::setenv("LLTM_CACHE_DIR", (folder / "cache").c_str(), /*overwrite=*/1);
  cached(compilation_key(print_kernel(form), 80), [] { return "rejected"; });
  EXPECT_EQ(code_of(80), "rejected");
  for (const int failures : {1, 0}) expect_compiled(80, failures);
  ::setenv("LLTM_CACHE_DIR", "", /*overwrite=*/1);
  expect_compiled(90);
  form.width = 8;
  expect_compiled(86);
  fs::remove_all(folder);
  EXPECT_EQ(embedded_folder(), "");
  ::unsetenv("LLTM_CACHE_DIR");
}

}  // namespace
}  // namespace lltm::cuda
