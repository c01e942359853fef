#include "cuda/kernel/compiled.h"
#include "cuda/kernel/elementwise.h"
#include "cuda/kernel/elementwise_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace lltm::cuda {
namespace {

// From here on, every multiprocessor gets several warps in the wide form. Below, more threads with
// one unit each are faster.
constexpr std::int64_t kWideElements = 1 << 17;

// T of the tensors, D of the states. Fails if the stream does not belong to the current device.
template <typename T, typename D, typename Args>
void launch(const CellInfo& cell, bool backward, const Args& args, Stream stream) {
  if (args.rows == 0 || args.hidden == 0) return;
  const bool is_wide = fits_wide<T>(cell, args.hidden) && args.rows * args.hidden >= kWideElements;
  const int width = is_wide ? kWide<T> : 1;
  std::int64_t count = args.rows * (args.hidden / width);
  auto access = access_of(args);
  void* parameters[] = {const_cast<Args*>(&args), &access, &count};
  const KernelForm form = {&cell, backward, kKernelType<T>, kKernelType<D>, width};
  const Grid grid = {blocks_for(count), 1, 1, kThreads, 0, /*cooperative=*/false};
  launch_compiled(form, grid, parameters, stream);
}

}  // namespace

template <typename T>
void launch_forward(const CellInfo& cell, const ForwardArgs<T>& args, Stream stream) {
  launch<T, compute_t<T>>(cell, /*backward=*/false, args, stream);
}

template <typename T, typename D>
void launch_backward(const CellInfo& cell, const BackwardArgs<T, D>& args, Stream stream) {
  launch<T, D>(cell, /*backward=*/true, args, stream);
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
