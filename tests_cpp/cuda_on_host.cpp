// To test whole calls without a GPU: plans, launches, cuBLAS calls and kernels.
#include "cuda_on_host.h"

#include "cell/cells.h"
#include "cuda/context.h"
#include "cuda/kernel/compiled.h"
#include "cuda/kernel/elementwise.h"
#include "cuda/kernel/elementwise_kernels.h"
#include "cuda/kernel/kernel_cache.h"
#include "cuda/kernel/nvrtc.h"
#include "ptx.h"

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace lltm::cuda {
namespace {

// The memory that kernels may access: of tensors, and of functions below.
std::mutex mutex;
ptx::Memory& device_memory() {
  static ptx::Memory& memory = *new ptx::Memory;
  return memory;
}

struct TensorAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = c10::alloc_cpu(bytes);
    const std::lock_guard<std::mutex> lock(mutex);
    device_memory().add(data, bytes);
    return {data, data, free, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  static void free(void* data) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      device_memory().remove(data);
    }
    c10::free_cpu(data);
  }
};
const bool kRegistered = [] {
  static TensorAllocator& allocator = *new TensorAllocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
  return true;
}();

// Column j starts at data + j * ld; or the transpose.
struct Columns {
  const void* data;
  CudaDataType type;
  int64_t ld;
  CublasOperation op;
};

double element(const Columns& matrix, int64_t row, int64_t col) {
  const int64_t index = matrix.op == kNotTransposed ? col * matrix.ld + row : row * matrix.ld + col;
  switch (matrix.type) {
    case kR64F:
      return static_cast<const double*>(matrix.data)[index];
    case kR32F:
      return static_cast<const float*>(matrix.data)[index];
    case kR16F:
      return static_cast<const c10::Half*>(matrix.data)[index];
    case kR16BF:
      return static_cast<const c10::BFloat16*>(matrix.data)[index];
  }
  TORCH_INTERNAL_ASSERT(false);
}

void set_element(void* data, CudaDataType type, int64_t index, double value) {
  switch (type) {
    case kR64F:
      static_cast<double*>(data)[index] = value;
      return;
    case kR32F:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case kR16F:
      static_cast<c10::Half*>(data)[index] = static_cast<c10::Half>(value);
      return;
    case kR16BF:
      static_cast<c10::BFloat16*>(data)[index] = static_cast<c10::BFloat16>(value);
      return;
  }
}

bool is_valid(int64_t ld, int64_t rows) {
  return ld >= std::max<int64_t>(rows, 1) && ld <= std::numeric_limits<int32_t>::max();
}

// `extent` is the length of a contiguous column.
bool is_aligned(const void* data, CudaDataType type, int64_t ld, int64_t extent) {
  const int64_t size = type == kR64F ? 8 : type == kR32F ? 4 : 2;
  const auto address = static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(data));
  return address % 16 == 0 && ld * size % 16 == 0 && extent * size % 16 == 0;
}

// Ten fraction bits; to nearest, ties away from zero, like cvt.rna.tf32.f32.
float to_tf32(float value) {
  if (std::isnan(value)) return value;
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(value) + 0x1000u) & ~0x1FFFu);
}

// The environment overrides the handle's mode.
bool is_tf32_forbidden() {
  const char* const value = std::getenv("NVIDIA_TF32_OVERRIDE");
  return value != nullptr && std::string_view(value) == "0";
}

bool is_supported(CudaDataType a, CudaDataType b, CudaDataType c, CublasCompute compute) {
  if (a != b) return false;
  if (compute == kCompute64F) return a == kR64F && c == kR64F;
  return a != kR64F && (c == a || c == kR32F);
}

constexpr int kInvalidValue = 7;  // cublasStatus_t

int math_mode = kDefaultMath;

// Rejects empty GEMMs and, like cuBLAS, leading dimensions too small or above 32 bits and
// unsupported types.
int gemm(
    void*,
    int of_a,
    int of_b,
    int64_t m,
    int64_t n,
    int64_t k,
    const void* alpha,
    const void* a,
    int type_of_a,
    int64_t lda,
    const void* b,
    int type_of_b,
    int64_t ldb,
    const void* beta,
    void* c,
    int type_of_c,
    int64_t ldc,
    int compute,
    int) {
  const auto op_a = static_cast<CublasOperation>(of_a), op_b = static_cast<CublasOperation>(of_b);
  const auto a_type = static_cast<CudaDataType>(type_of_a);
  const auto b_type = static_cast<CudaDataType>(type_of_b);
  const auto c_type = static_cast<CudaDataType>(type_of_c);
  const auto compute_type = static_cast<CublasCompute>(compute);
  if (std::min({m, n, k}) < 1 || !is_valid(lda, op_a == kNotTransposed ? m : k) ||
      !is_valid(ldb, op_b == kNotTransposed ? k : n) || !is_valid(ldc, m) ||
      !is_supported(a_type, b_type, c_type, compute_type)) {
    return kInvalidValue;
  }
  lltm_test::last_math_mode = math_mode;
  ++lltm_test::gemm_calls;
  if (!is_aligned(a, a_type, lda, op_a == kNotTransposed ? m : k) ||
      !is_aligned(b, b_type, ldb, op_b == kNotTransposed ? k : n) ||
      !is_aligned(c, c_type, ldc, m)) {
    ++lltm_test::unaligned_gemm_calls;
  }
  const CudaDataType scale = compute_type == kCompute64F ? kR64F : kR32F;
  const double a_scale = element({alpha, scale, 1, kNotTransposed}, 0, 0);
  const double c_scale = element({beta, scale, 1, kNotTransposed}, 0, 0);
  const bool allowed = math_mode == kTf32Math && !is_tf32_forbidden();
  const bool tf32 = a_type == kR32F && (allowed || lltm_test::fault == lltm_test::Fault::tf32);
  const auto read = [tf32](const Columns& matrix, int64_t row, int64_t col) {
    const double value = element(matrix, row, col);
    return tf32 ? to_tf32(static_cast<float>(value)) : value;
  };
  const Columns left{a, a_type, lda, op_a}, right{b, b_type, ldb, op_b};
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      double sum = 0;
      for (int64_t p = 0; p < k; ++p) {
        sum += read(left, i, p) * read(right, p, j);
        if (lltm_test::sums_in_order && scale == kR32F) sum = static_cast<float>(sum);
      }
      sum *= a_scale;
      // With a factor of zero, C is not read: it may be NaN.
      if (c_scale != 0) sum += c_scale * element({c, c_type, ldc, kNotTransposed}, i, j);
      set_element(c, c_type, j * ldc + i, sum);
    }
  }
  return 0;
}

// Sets TF32 mode if allowed, like ATen's.
int blas_handle(void** handle) {
  math_mode = lltm_test::allow_tf32 ? kTf32Math : kDefaultMath;
  *handle = &math_mode;
  return 0;
}

int memset_2d(
    Functions::Address to, size_t pitch, unsigned char value, size_t width, size_t height, void*) {
  if (width > pitch) return 1;
  for (size_t row = 0; row < height; ++row) {
    std::memset(reinterpret_cast<char*>(to) + row * pitch, value, width);
  }
  return 0;
}

Functions functions_on_host() {
  Functions f = {};
  f.aoti_torch_get_current_cuda_stream = [](int32_t, void** stream) {
    *stream = lltm_test::stream;
    return 0;
  };
  f.cuCtxGetDevice = [](int* device) {
    *device = current_device();
    return 0;
  };
  f.cuDeviceGetAttribute = [](int* value, int which, int) {
    const std::map<DeviceAttribute, int64_t> values = {
        {DeviceAttribute::kMultiprocessorCount, lltm_test::multiprocessors},
        {DeviceAttribute::kL2CacheBytes, 48 << 20},
        {DeviceAttribute::kCapabilityMajor, lltm_test::capability / 10},
        {DeviceAttribute::kCapabilityMinor, lltm_test::capability % 10},
        {DeviceAttribute::kCooperativeLaunch, 1},
        {DeviceAttribute::kMaxSharedBytes, lltm_test::shared_bytes}};
    *value = static_cast<int>(values.at(static_cast<DeviceAttribute>(which)));
    return 0;
  };
  f.cuEventCreate = [](void** event, unsigned) {
    *event = new void*(nullptr);
    return 0;
  };
  f.cuEventRecord = [](void* event, void* stream) {
    *static_cast<void**>(event) = stream;
    return 0;
  };
  f.cuStreamWaitEvent = [](void* stream, void* event, unsigned) {
    if (*static_cast<void**>(event) != stream) ++lltm_test::event_waits;
    return 0;
  };
  f.cuGetErrorString = [](int, const char** text) {
    *text = "invalid value";
    return 0;
  };
  f.cuMemHostAlloc = [](void** memory, size_t bytes, unsigned) {
    *memory = std::malloc(bytes);
    const std::lock_guard<std::mutex> lock(mutex);
    device_memory().add(*memory, bytes);
    return 0;
  };
  f.cuMemcpyDtoHAsync_v2 = [](void* to, Functions::Address from, size_t bytes, void*) {
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return 0;
  };
  f.cuMemsetD2D8Async = memset_2d;
  f.cuMemsetD8Async = [](Functions::Address to, unsigned char value, size_t bytes, void*) {
    std::memset(reinterpret_cast<void*>(to), value, bytes);
    lltm_test::filled.emplace_back(lltm_test::persistent_launches, bytes);
    return 0;
  };
  f.cuStreamIsCapturing = [](void*, int* status) {
    *status = lltm_test::capturing ? 1 : 0;
    return 0;
  };
  f.cuStreamSynchronize = [](void*) { return 0; };
  f.cuThreadExchangeStreamCaptureMode = [](int*) { return 0; };
  f.cublasGemmEx_64 = gemm;
  f.cublasGetMathMode = [](void*, int* mode) {
    *mode = math_mode;
    return 0;
  };
  f.cublasSetMathMode = [](void*, int mode) {
    math_mode = mode;
    return 0;
  };
  f.torch_get_current_cuda_blas_handle = blas_handle;
  return f;
}

// Loads NVRTC as PyTorch does on a GPU: one library finds the other by name.
const bool kLoaded = [] {
  for (const char* library : {LLTM_NVRTC_BUILTINS, LLTM_NVRTC_LIBRARY}) {
    if (::dlopen(library, RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(::dlerror());
  }
  return true;
}();

// With another number of polls than persistent_gpu.h, a register is compared with another number.
void replace_polls(std::string& ptx) {
  const std::string polls = ", " + std::to_string(1 << 22) + ";";
  const std::string replaced = ", " + std::to_string(lltm_test::most_polls) + ";";
  int count = 0;
  for (size_t at = ptx.find(polls); at != ptx.npos; at = ptx.find(polls, at), ++count) {
    ptx.replace(at, polls.size(), replaced);
  }
  TORCH_CHECK(count > 0, "the kernel does not limit its polls");
}

const ptx::Kernel& kernel_of(const KernelForm& form) {
  static auto& kernels = *new std::map<std::tuple<KernelForm, int, int>, ptx::Kernel>;
  const auto [found, is_new] =
      kernels.try_emplace({form, lltm_test::capability, lltm_test::most_polls});
  if (is_new) {
    // NVRTC does not know the next capability, so that it generates PTX.
    const int unknown = lltm_test::capability + 1;
    const std::string source = print_kernel(form);
    ::setenv("LLTM_CACHE_DIR", LLTM_PTX_FOLDER, /*overwrite=*/1);
    std::string text =
        cached(compilation_key(source, unknown), [&] { return compile(source, unknown); });
    if (form.is_persistent() && lltm_test::most_polls != 1 << 22) replace_polls(text);
    found->second = ptx::parse(text);
  }
  return found->second;
}

void execute(const KernelForm& form, const Grid& grid, std::vector<const void*> parameters) {
  const std::lock_guard<std::mutex> lock(mutex);
  ptx::Options options;
  options.seed = lltm_test::schedule_seed++;
  options.any_memory = lltm_test::any_memory;
  if (form.is_persistent()) {
    options.late_rounds = lltm_test::late_rounds;
    options.lost = lltm_test::lost;
  }
  const ptx::Launch launch = {
      {static_cast<int>(grid.x), static_cast<int>(grid.y), static_cast<int>(grid.z)},
      grid.threads,
      static_cast<size_t>(grid.shared_bytes),
      std::move(parameters),
      grid.cooperative};
  ptx::run(kernel_of(form), launch, device_memory(), options);
}

template <typename Args>
bool launch_persistent_on_host(KernelForm form, Grid grid, const DirectionArgs<Args>& args) {
  using namespace lltm_test;
  TORCH_CHECK(grid.z * grid.y * grid.x <= multiprocessors, "a launch that would never end");
  TORCH_CHECK(grid.shared_bytes <= lltm_test::shared_bytes, "more shared memory than the GPU has");
  const auto kind_of = [&](int n) {
    const Args& a = args.of[n];
    LaunchKind kind = {form.tiles, args.count, form.backward != 0, n == 1};
    kind.mask = a.recurrent_mask != nullptr;
    if constexpr (Args::kIsForward) kind.checkpoints = a.checkpoints != nullptr;
    kind.ascending = a.steps.ascending;
    kind.later = a.steps.previous_rows > 0;
    kind.later_rows = a.first_row > 0;
    return kind;
  };
  int faulty = 0;  // direction
  while (faulty < args.count && has_fault && !has_fault(kind_of(faulty))) ++faulty;
  const Fault fault = faulty < args.count ? persistent_fault : Fault::none;
  TORCH_CHECK(fault != Fault::fails, "an illegal instruction");
  if (fault == Fault::tf32) form.tf32 = 1;
  if (prefers_shared && form.units > 1) {
    const int chunk = shared_chunk(outputs_of<Args>(*form.cell));
    form.shared_units = (form.units + form.shared_units - 1 + chunk - 1) / chunk * chunk;
    form.units = 1;
    grid.shared_bytes =
        cuda::shared_bytes<Args>({form.cell, form.tiles, form.tf32 != 0, 1, form.shared_units});
  }
  if (launches_left == 0) return false;
  --launches_left;
  ++persistent_launches;
  execute(form, grid, {&args});
  for (int n = 0; n < grid.z; ++n) {
    const LaunchWords& words = args.of[n].words;
    TORCH_CHECK(*words.begun == words.blocks, "blocks are expected that never begin");
  }
  if (fault == Fault::wrong) {  // as after a timeout
    const Args& a = args.of[faulty];
    *a.words.failure = 1;
    if constexpr (Args::kIsForward) {
      const LaunchSteps& steps = a.steps;
      const int64_t row = steps.ascending ? steps.edge : steps.edge - steps.run[0].rows;
      a.h[a.hidden - 1] = a.output[row * a.hidden + a.hidden - 1] = 2.0F;
    }
    if constexpr (!Args::kIsForward) a.dh[a.hidden - 1] += 2.0F;
  }
  return true;
}

template <typename T>
bool launch_persistent_on_host(const KernelForm& form, const Grid& grid, void** parameters) {
  const auto launch = [&]<typename Args>(Args*) {
    return launch_persistent_on_host(
        form, grid, *static_cast<const DirectionArgs<Args>*>(parameters[0]));
  };
  return form.backward ? launch(static_cast<PersistentBackwardArgs<T>*>(nullptr))
                       : launch(static_cast<PersistentForwardArgs<T>*>(nullptr));
}

template <typename T, typename D, bool kBackward>
void launch_stage_on_host(KernelForm form, Grid grid, void** parameters) {
  TORCH_CHECK(lltm_test::fault != lltm_test::Fault::fails, "no kernel image is available");
  ++lltm_test::step_launches;
  const auto& args = *static_cast<const StageArgs<T, D, kBackward>*>(parameters[0]);
  // Wide whenever possible: test sizes are below the GPU's threshold.
  const int64_t units = *static_cast<const int64_t*>(parameters[1]) * form.width;
  form.width = fits_wide<T>(form.stage->program, args.hidden) ? kWide<T> : 1;
  const int64_t count = units / form.width;
  grid.x = blocks_for(count);
  execute(form, grid, {&args, &count});
  if (!kBackward && lltm_test::fault == lltm_test::Fault::wrong) {
    args.h.data[args.hidden - 1] = static_cast<T>(2.0F);
  }
}

}  // namespace

const Functions& functions() {
  static const Functions functions = functions_on_host();
  return functions;
}

const char* why_no_compiled_kernels() {
  return lltm_test::has_nvrtc ? nullptr : "NVRTC was not found: as the test says";
}

std::string describe_compiled_kernels() {
  return {};
}

// Of custom cells.
int local_bytes(const KernelForm& form, std::int64_t) {
  return form.tiles > lltm_test::tiles_without_spills ? 1 << 10 : 0;
}

bool launch_compiled(const KernelForm& form, const Grid& grid, void** parameters, Stream) {
  lltm_test::launched_forms.insert(form);
  return lltm_test::visit_type(form.tensor, [&]<typename T>(T*) {
    if constexpr (sizeof(T) <= sizeof(float)) {
      if (form.is_persistent()) return launch_persistent_on_host<T>(form, grid, parameters);
    }
    if (!form.backward) {
      launch_stage_on_host<T, compute_t<T>, false>(form, grid, parameters);
    } else if (form.state == form.tensor) {
      launch_stage_on_host<T, T, true>(form, grid, parameters);
    } else {
      launch_stage_on_host<T, compute_t<T>, true>(form, grid, parameters);
    }
    return true;
  });
}

}  // namespace lltm::cuda

int64_t lltm_test::device_operations(const std::function<void()>& body) {
  static int64_t aten;
  static bool within;  // an operation that counts
  struct Counted : at::ObserverContext {};
  const auto others = [] {
    return gemm_calls + persistent_launches + step_launches + std::ssize(filled);
  };
  aten = -others();
  const auto begin = [](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
    // Views, memory, and operations that call others.
    const std::string no_kernels =
        " _to_copy _unsafe_view as_strided chunk clone contiguous diag_embed diagonal empty "
        "empty_like empty_strided expand fill_ flatten linear matmul narrow new_empty new_zeros "
        "permute reshape resolve_conj slice split t to transpose unsqueeze view zeros zeros_like ";
    const std::string name = call.name() + std::strlen("aten::");
    if (within || no_kernels.find(' ' + name + ' ') != std::string::npos) return nullptr;
    ++aten;
    within = true;
    return std::make_unique<Counted>();
  };
  const auto end = [](const at::RecordFunction&, at::ObserverContext* counted) {
    if (counted != nullptr) within = false;
  };
  const at::CallbackHandle handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(handle);
  return aten + others();
}
