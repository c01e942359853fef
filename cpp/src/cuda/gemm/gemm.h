// GEMMs on a GPU with cuBLAS. A GEMM is one call: the handle is fetched once per sequence.
#pragma once

#include "aten/device_gemm.h"

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace lltm::cuda {

// Of the current device.
std::int64_t l2_cache_bytes();

// On the device and stream at construction, which must stay current. Accumulates in float64 for
// float64, otherwise in float32. float32 follows cuda_float32(), then PyTorch's allow_tf32.
class Gemm final : public DeviceGemm {
 public:
  explicit Gemm(at::ScalarType dtype);

  // TF32 keeps 10 mantissa bits per factor.
  bool uses_tf32() const;

  // A B is zero if K = 0. C can be float32 for 16-bit operands.
  void operator()(const GemmOperand& a, const GemmOperand& b, const GemmResult& c, bool accumulate)
      const override;

  at::ScalarType dtype() const override { return dtype_; }
  // cuBLAS's faster kernels require such starts, strides and lengths.
  std::int64_t alignment() const override { return 16; }
  SumLimits over_rows() const override;
  SumLimits over_gates() const override { return over_rows(); }

 private:
  at::ScalarType dtype_;
  void* handle_ = nullptr;
};

}  // namespace lltm::cuda
