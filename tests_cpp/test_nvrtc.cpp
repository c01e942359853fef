// Compiles the kernels of custom cells with NVRTC, without a GPU. test_cuda_elementwise.cpp tests
// their results.
#include "cell/registry.h"
#include "cell_program.h"
#include "cuda/kernel/elementwise_kernels.h"
#include "cuda/kernel/nvrtc.h"
#include "cuda/kernel/program_source.h"

#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace lltm::cuda {
namespace {

// Loads the libraries as PyTorch does on a GPU: one finds the other by name.
const bool kLoaded = [] {
  for (const char* library : {LLTM_NVRTC_BUILTINS, LLTM_NVRTC_LIBRARY}) {
    if (::dlopen(library, RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(::dlerror());
  }
  return true;
}();

struct Kind {
  const char* name;
  ProgramTypes types;
  int width;  // of the wide kernel
};
const Kind kKinds[] = {
    {"float64", {"double", "double"}, 2},
    {"float32", {"float", "float"}, 4},
    {"float16", {"lltm::cuda::Half", "float"}, 8},
    {"float16_step", {"lltm::cuda::Half", "lltm::cuda::Half"}, 8},
    {"bfloat16", {"lltm::cuda::BFloat16", "float"}, 8},
    {"bfloat16_step", {"lltm::cuda::BFloat16", "lltm::cuda::BFloat16"}, 8}};
void PrintTo(const Kind& kind, std::ostream* stream) {
  *stream << kind.name;
}

class ProgramKernels : public testing::TestWithParam<std::tuple<std::string, Kind>> {
 protected:
  const CellInfo& cell() const { return *find_cell(std::get<0>(GetParam())); }
  const Kind& kind() const { return std::get<1>(GetParam()); }
  std::vector<int> widths() const {
    const int hidden = 64;  // any size whose rows consist of full accesses
    const bool fits = kind().width == 2   ? fits_wide<double>(cell(), hidden)
                      : kind().width == 4 ? fits_wide<float>(cell(), hidden)
                                          : fits_wide<c10::Half>(cell(), hidden);
    return fits ? std::vector<int>{1, kind().width} : std::vector<int>{1};
  }
};
INSTANTIATE_TEST_SUITE_P(
    Texts,
    ProgramKernels,
    testing::Combine(testing::ValuesIn(lltm_test::kCellTexts), testing::ValuesIn(kKinds)),
    [](const auto& info) {
      return find_cell(std::get<0>(info.param))->title() + std::string("_") +
             std::get<1>(info.param).name;
    });

// Static assertions that the host and NVRTC use the same argument layout, for any tensors:
// signatures do not contain sizes.
std::string layouts_of(const Kind& kind) {
  const auto same = [](const std::string& type, size_t size) {
    return "static_assert(sizeof(lltm::cuda::" + type + ") == " + std::to_string(size) + ");\n";
  };
  const std::string& t = kind.types.tensor;
  return same("ForwardArgs<" + t + ">", sizeof(ForwardArgs<float>)) +
         same(
             "BackwardArgs<" + t + ", " + kind.types.state + ">",
             sizeof(BackwardArgs<float, float>)) +
         same("ForwardAccess", sizeof(ForwardAccess)) +
         same("BackwardAccess", sizeof(BackwardAccess));
}

int count(const std::string& log, const std::string& text) {
  int count = 0;
  for (size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) ++count;
  return count;
}

TEST_P(ProgramKernels, CompileForEachGpuWithoutSpills) {
  for (const int capability : {80, 90}) {
    for (const int width : widths()) {
      SCOPED_TRACE(testing::Message() << "sm_" << capability << ", width " << width);
      std::string log;
      const std::string code = compile(
          print_kernels(cell(), kind().types, width) + layouts_of(kind()), capability, &log);
      EXPECT_EQ(
          code.substr(0, 4),
          "\x7f"
          "ELF");
      for (const char* kernel : {"lltm_forward", "lltm_backward"}) {
        EXPECT_NE(code.find(kernel), std::string::npos) << kernel;
      }
      // Of each kernel, and of CUDA's function for large arguments of sin and cos in float64.
      const int functions = count(log, "Function properties for ");
      EXPECT_GE(functions, 2) << log;
      EXPECT_EQ(count(log, " 0 bytes spill stores, 0 bytes spill loads"), functions) << log;
    }
  }
}

// The driver compiles this form, with 16-byte accesses.
TEST_P(ProgramKernels, CompileToPtxForFutureGpus) {
  const int width = widths().back();
  const std::string ptx = compile(print_kernels(cell(), kind().types, width), 999);
  EXPECT_NE(ptx.find(".target sm_"), std::string::npos);
  EXPECT_NE(ptx.find(".entry lltm_forward"), std::string::npos);
  const char* const access = width == 2 ? "ld.global.v2.f64" : "ld.global.v4.";
  EXPECT_EQ(ptx.find(access) != std::string::npos, width > 1);
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

TEST(Nvrtc, SourceDependsOnTheCellAndTypes) {
  const std::string source = print_kernels(*find_cell(lltm_test::kDuoText), {"double", "float"}, 2);
  for (const char* part :
       {"#include \"cuda/kernel/program_gpu.h\"\n",
        "const V v3 = math::multiply_add(in[7], in[5], v2);\n",
        "math::multiply_add(V(0.25), in[4], v3);\n",
        "LLTM_PROGRAM_KERNELS(Definition, double, float, 2)\n"}) {
    EXPECT_NE(source.find(part), std::string::npos) << part;
  }
}

}  // namespace
}  // namespace lltm::cuda
