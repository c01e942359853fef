// Kernels for the stages of steps (program.h), which the ATen fallback runs.
#include "common/steps.h"
#include "cuda/engine/engine.h"
#include "cuda/engine/self_check.h"
#include "cuda/kernel/compiled.h"
#include "cuda/kernel/elementwise_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

namespace lltm::cuda {

using at::Tensor;

aten_fallback::StageKernels stage_kernels() {
  return [stream = current_stream()](const aten_fallback::StageCall& call) {
    int64_t count = call.like.numel();
    if (count == 0) return true;
    StageArgs<> args;
    args.hidden = call.like.size(1);
    StagePort* port = args.ports;
    for (const Tensor& x : call.inputs) {
      const int64_t row_stride = x.dim() > 1 ? x.stride(0) : 0;
      *port++ = {const_cast<void*>(x.const_data_ptr()), row_stride, x.stride(-1)};
    }
    for (const Tensor& y : call.outputs) {
      *port++ = y.defined() ? StagePort{y.mutable_data_ptr(), y.stride(0), 1} : StagePort{};
    }
    KernelForm form = {&call.cell, call.backward, {}, {}, /*width=*/1, &call.stage};
    visit_dtype<c10::Half, c10::BFloat16>(
        call.dtype, [&]<typename T>(T*) { form.tensor = form.state = kKernelType<T>; });
    const Grid grid = {blocks_for(count), 1, 1, kThreads, 0, /*cooperative=*/false};
    char of_type[8] = {};  // the kernel's second argument, unused
    void* parameters[] = {&args, of_type, &count};
    const auto run = [&] { launch_compiled(form, grid, parameters, stream); };
    if (why_not_stage(call, run) != nullptr) return false;
    run();
    return true;
  };
}

}  // namespace lltm::cuda
