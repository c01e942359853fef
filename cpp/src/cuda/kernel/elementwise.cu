// The element-wise kernels and their launches; elementwise_kernels.h has the code of a
// thread. Those of users' cells are launched here too, and compiled elsewhere (program_launch.h).
// c10 headers only, which keeps nvcc quick.
#include "cuda/kernel/elementwise.h"

#include "cell/cells.h"
#include "cuda/kernel/elementwise_kernels.h"
#include "cuda/kernel/program_launch.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

namespace lltm::cuda {
namespace {

// `count` is the number of pieces of work (elementwise_kernels.h).
template <typename Page, int kWidth, typename T>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    lltm_forward(const ForwardArgs<T> args, const ForwardAccess wide, const std::int64_t count) {
  grid_stride(blockIdx.x, gridDim.x, threadIdx.x, blockDim.x, count, [&](std::int64_t n) {
    forward_at<PageRegisters<Page>, kWidth>(args, wide, n);
  });
}

template <typename Page, int kWidth, typename T, typename D>
__global__ void __launch_bounds__(kThreads, kResidentBlocks) lltm_backward(
    const BackwardArgs<T, D> args, const BackwardAccess wide, const std::int64_t count) {
  grid_stride(blockIdx.x, gridDim.x, threadIdx.x, blockDim.x, count, [&](std::int64_t n) {
    backward_at<PageRegisters<Page>, kWidth>(args, wide, n);
  });
}

// The wide form is faster where every multiprocessor gets several warps of it. Fewer
// elements than this take less time with more threads of one unit each.
constexpr std::int64_t kWideElements = 1 << 17;

template <typename T, typename Args>
bool takes_wide(const CellInfo& cell, const Args& args) {
  return fits_wide<T>(cell, args.hidden) && args.rows * args.hidden >= kWideElements;
}

// Launches `kernel` for (rows, hidden) elements, `width` to a piece. Fails on a stream of
// another device than the current one.
template <typename Kernel, typename Args, typename Wide>
void launch(Kernel kernel, const Args& args, const Wide& wide, int width, Stream stream) {
  const std::int64_t count = args.rows * (args.hidden / width);
  const Grid grid = grid_for(count);
  kernel<<<
      static_cast<unsigned>(grid.blocks),
      grid.threads,
      0,
      static_cast<cudaStream_t>(stream.handle)>>>(args, wide, count);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename T>
constexpr ProgramType kProgramType = std::is_same_v<T, double>      ? ProgramType::kDouble
                                     : std::is_same_v<T, float>     ? ProgramType::kFloat
                                     : std::is_same_v<T, c10::Half> ? ProgramType::kHalf
                                                                    : ProgramType::kBFloat16;

// The same of a kernel of the cell's programs, for tensors of type T and states of type D.
template <typename T, typename D, typename Args, typename Wide>
void launch_program_for(
    const CellInfo& cell, bool backward, const Args& args, const Wide& wide, Stream stream) {
  const int width = takes_wide<T>(cell, args) ? kWide<T> : 1;
  const ProgramKernel kernel = {cell, kProgramType<T>, kProgramType<D>, backward, width};
  std::int64_t count = args.rows * (args.hidden / kernel.width);
  const Grid grid = grid_for(count);
  void* parameters[] = {const_cast<Args*>(&args), const_cast<Wide*>(&wide), &count};
  launch_program(kernel, grid.blocks, grid.threads, parameters, stream);
}

}  // namespace

Stream current_stream() {
  return {c10::cuda::getCurrentCUDAStream().stream()};
}

template <typename T>
void launch_forward(const CellInfo& cell, const ForwardArgs<T>& args, Stream stream) {
  if (args.rows == 0 || args.hidden == 0) return;
  const ForwardAccess wide = access_of(args);
  if (cell.programs != nullptr) {
    return launch_program_for<T, compute_t<T>>(cell, /*backward=*/false, args, wide, stream);
  }
  visit_cell(cell, [&]<typename Page>(Page) {
    if (takes_wide<T>(cell, args)) {
      launch(lltm_forward<Page, kWide<T>, T>, args, wide, kWide<T>, stream);
    } else {
      launch(lltm_forward<Page, 1, T>, args, wide, 1, stream);
    }
  });
}

template <typename T, typename D>
void launch_backward(const CellInfo& cell, const BackwardArgs<T, D>& args, Stream stream) {
  if (args.rows == 0 || args.hidden == 0) return;
  const BackwardAccess wide = access_of(args);
  if (cell.programs != nullptr) {
    return launch_program_for<T, D>(cell, /*backward=*/true, args, wide, stream);
  }
  visit_cell(cell, [&]<typename Page>(Page) {
    if (takes_wide<T>(cell, args)) {
      launch(lltm_backward<Page, kWide<T>, T, D>, args, wide, kWide<T>, stream);
    } else {
      launch(lltm_backward<Page, 1, T, D>, args, wide, 1, stream);
    }
  });
}

template void launch_forward(const CellInfo&, const ForwardArgs<double>&, Stream);
template void launch_forward(const CellInfo&, const ForwardArgs<float>&, Stream);
template void launch_forward(const CellInfo&, const ForwardArgs<c10::Half>&, Stream);
template void launch_forward(const CellInfo&, const ForwardArgs<c10::BFloat16>&, Stream);

template void launch_backward(const CellInfo&, const BackwardArgs<double, double>&, Stream);
template void launch_backward(const CellInfo&, const BackwardArgs<float, float>&, Stream);
template void launch_backward(const CellInfo&, const BackwardArgs<c10::Half, c10::Half>&, Stream);
template void launch_backward(const CellInfo&, const BackwardArgs<c10::Half, float>&, Stream);
template void launch_backward(
    const CellInfo&, const BackwardArgs<c10::BFloat16, c10::BFloat16>&, Stream);
template void launch_backward(const CellInfo&, const BackwardArgs<c10::BFloat16, float>&, Stream);

}  // namespace lltm::cuda
