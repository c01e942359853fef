// The LLTM the way PyTorch's tutorial on C++ and CUDA extensions builds one: the
// products in ATen, everything pointwise in one kernel forward and one backward,
// accessors, a grid of (units, batch). A contender of bench_cuda.py, compiled by
// torch.utils.cpp_extension.load; no part of the library.
#include <ATen/OpMathType.h>
#include <torch/extension.h>

#include <vector>

namespace {

template <typename T, int kDims>
using Accessor = torch::PackedTensorAccessor32<T, kDims, torch::RestrictPtrTraits>;

template <typename T>
__device__ __forceinline__ T sigmoid(T z) {
  return T(1) / (T(1) + std::exp(-z));
}

template <typename T>
__device__ __forceinline__ T elu(T z) {
  return z > T(0) ? z : std::expm1(z);
}

template <typename T>
__global__ void forward_kernel(
    const Accessor<T, 3> gates,
    const Accessor<T, 2> old_cell,
    Accessor<T, 2> new_h,
    Accessor<T, 2> new_cell,
    Accessor<T, 2> input_gate,
    Accessor<T, 2> output_gate,
    Accessor<T, 2> candidate) {
  const int n = blockIdx.y;
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= gates.size(2)) return;
  using C = at::opmath_type<T>;
  const C i = sigmoid<C>(gates[n][0][j]);
  const C o = sigmoid<C>(gates[n][1][j]);
  const C g = elu<C>(gates[n][2][j]);
  const C c = static_cast<C>(old_cell[n][j]) + i * g;
  input_gate[n][j] = i;
  output_gate[n][j] = o;
  candidate[n][j] = g;
  new_cell[n][j] = c;
  new_h[n][j] = std::tanh(c) * o;
}

template <typename T>
__global__ void backward_kernel(
    const Accessor<T, 2> grad_h,
    const Accessor<T, 2> grad_cell,
    const Accessor<T, 2> new_cell,
    const Accessor<T, 2> input_gate,
    const Accessor<T, 2> output_gate,
    const Accessor<T, 2> candidate,
    const Accessor<T, 3> gates,
    Accessor<T, 2> d_old_cell,
    Accessor<T, 3> d_gates) {
  const int n = blockIdx.y;
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= gates.size(2)) return;
  using C = at::opmath_type<T>;
  const C i = input_gate[n][j], o = output_gate[n][j], g = candidate[n][j];
  const C z_g = gates[n][2][j], dh = grad_h[n][j];
  const C t = std::tanh(static_cast<C>(new_cell[n][j]));
  const C dc = dh * o * (C(1) - t * t) + static_cast<C>(grad_cell[n][j]);
  d_old_cell[n][j] = dc;
  d_gates[n][0][j] = dc * g * i * (C(1) - i);
  d_gates[n][1][j] = dh * t * o * (C(1) - o);
  d_gates[n][2][j] = dc * i * (z_g > C(0) ? C(1) : std::exp(z_g));
}

constexpr int kThreads = 1024;

dim3 blocks_for(int64_t batch, int64_t hidden) {
  return dim3((hidden + kThreads - 1) / kThreads, batch);
}

template <typename T, int kDims>
Accessor<T, kDims> access(const torch::Tensor& tensor) {
  return tensor.packed_accessor32<T, kDims, torch::RestrictPtrTraits>();
}

std::vector<torch::Tensor> forward(
    torch::Tensor input,
    torch::Tensor weights,
    torch::Tensor bias,
    torch::Tensor old_h,
    torch::Tensor old_cell) {
  const auto X = torch::cat({old_h, input}, 1);
  const int64_t batch = old_cell.size(0);
  const int64_t hidden = old_cell.size(1);
  const auto gates = torch::addmm(bias, X, weights.transpose(0, 1)).reshape({batch, 3, hidden});
  const auto new_h = torch::zeros_like(old_cell), new_cell = torch::zeros_like(old_cell);
  const auto input_gate = torch::zeros_like(old_cell), output_gate = torch::zeros_like(old_cell);
  const auto candidate = torch::zeros_like(old_cell);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "tutorial_forward", [&] {
        forward_kernel<scalar_t><<<blocks_for(batch, hidden), kThreads>>>(
            access<scalar_t, 3>(gates),
            access<scalar_t, 2>(old_cell),
            access<scalar_t, 2>(new_h),
            access<scalar_t, 2>(new_cell),
            access<scalar_t, 2>(input_gate),
            access<scalar_t, 2>(output_gate),
            access<scalar_t, 2>(candidate));
      });
  return {new_h, new_cell, input_gate, output_gate, candidate, X, gates};
}

std::vector<torch::Tensor> backward(
    torch::Tensor grad_h,
    torch::Tensor grad_cell,
    torch::Tensor new_cell,
    torch::Tensor input_gate,
    torch::Tensor output_gate,
    torch::Tensor candidate,
    torch::Tensor X,
    torch::Tensor gates,
    torch::Tensor weights) {
  const auto d_old_cell = torch::zeros_like(new_cell);
  const auto d_gates = torch::zeros_like(gates);
  const int64_t batch = new_cell.size(0);
  const int64_t hidden = new_cell.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, X.scalar_type(), "tutorial_backward", [&] {
        backward_kernel<scalar_t><<<blocks_for(batch, hidden), kThreads>>>(
            access<scalar_t, 2>(grad_h),
            access<scalar_t, 2>(grad_cell),
            access<scalar_t, 2>(new_cell),
            access<scalar_t, 2>(input_gate),
            access<scalar_t, 2>(output_gate),
            access<scalar_t, 2>(candidate),
            access<scalar_t, 3>(gates),
            access<scalar_t, 2>(d_old_cell),
            access<scalar_t, 3>(d_gates));
      });
  const auto d_z = d_gates.flatten(1, 2);
  const auto d_X = d_z.mm(weights);
  return {d_X.slice(1, 0, hidden), d_X.slice(1, hidden), d_z.t().mm(X), d_z.sum(0), d_old_cell};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward);
  m.def("backward", &backward);
}
