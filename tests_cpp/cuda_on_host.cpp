// The products and the pointwise kernels of the CUDA engine, in plain loops on
// the CPU: with them, the engine's own work (offsets, directions, packed batches,
// which rows belong together) is tested without a GPU. The kernels' threads run
// one after another.
#include "cuda/dispatch.h"
#include "cuda/pointwise.h"
#include "cuda/pointwise_kernels.h"
#include "cuda/products.h"

#include <gtest/gtest.h>

#include <limits>

namespace lltm::cuda {
namespace {

template <typename T>
double element(const Operand& a, int64_t row, int64_t col) {
  const int64_t index = a.transposed ? col * a.stride + row : row * a.stride + col;
  return static_cast<double>(static_cast<const T*>(a.data)[index]);
}

template <typename T, typename R>
void multiply_as(const Operand& a, const Operand& b, const Result& c, bool accumulate) {
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.cols; ++j) {
      R& result = static_cast<R*>(c.data)[i * c.stride + j];
      double sum = accumulate ? static_cast<double>(result) : 0;
      for (int64_t k = 0; k < a.cols; ++k) sum += element<T>(a, i, k) * element<T>(b, k, j);
      result = static_cast<R>(sum);
    }
  }
}

// What cuBLAS asks of the stride of rows of `length` elements.
void expect_valid(int64_t stride, int64_t length) {
  EXPECT_GE(stride, std::max<int64_t>(length, 1));
  EXPECT_LE(stride, std::numeric_limits<int32_t>::max());
}

// Every index of the grid, in the order of its blocks and threads.
template <typename Body>
void for_each_thread(int64_t count, const Body& body) {
  const Grid grid = grid_for(count);
  for (int64_t block = 0; block < grid.blocks; ++block) {
    for (int thread = 0; thread < grid.threads; ++thread) {
      grid_stride(block, grid.blocks, thread, grid.threads, count, body);
    }
  }
}

}  // namespace

Products::Products(at::ScalarType dtype) : dtype_(dtype), handle_(nullptr) {}

void Products::multiply(
    const Operand& a, const Operand& b, const Result& c, bool accumulate) const {
  ASSERT_EQ(handle_, nullptr);
  ASSERT_EQ(a.rows, c.rows);
  ASSERT_EQ(a.cols, b.rows);
  ASSERT_EQ(b.cols, c.cols);
  expect_valid(a.stride, a.transposed ? a.rows : a.cols);
  expect_valid(b.stride, b.transposed ? b.rows : b.cols);
  expect_valid(c.stride, c.cols);
  visit_dtype(dtype_, [&]<typename T>(T*) {
    if (c.dtype == dtype_) {
      multiply_as<T, T>(a, b, c, accumulate);
    } else {
      ASSERT_EQ(c.dtype, at::kFloat);
      ASSERT_NE(dtype_, at::kDouble);
      multiply_as<T, float>(a, b, c, accumulate);
    }
  });
}

Stream current_stream() {
  return {nullptr};
}

// Wide wherever it fits: the tests' sizes are far below those for which a GPU
// takes it.
template <typename T>
void launch_forward(const ForwardArgs<T>& args, Stream) {
  if (args.rows == 0 || args.hidden == 0) return;
  const ForwardAccess wide = access_of(args);
  if (fits_wide<T>(args.hidden)) {
    for_each_thread(args.rows * args.hidden / kWide<T>, [&](int64_t n) {
      forward_at<kWide<T>>(args, wide, n);
    });
  } else {
    for_each_thread(args.rows * args.hidden, [&](int64_t n) { forward_at<1>(args, wide, n); });
  }
}

template <typename T, typename S>
void launch_backward(const BackwardArgs<T, S>& args, Stream) {
  if (args.rows == 0 || args.hidden == 0) return;
  const BackwardAccess wide = access_of(args);
  if (fits_wide<T>(args.hidden)) {
    for_each_thread(args.rows * args.hidden / kWide<T>, [&](int64_t n) {
      backward_at<kWide<T>>(args, wide, n);
    });
  } else {
    for_each_thread(args.rows * args.hidden, [&](int64_t n) { backward_at<1>(args, wide, n); });
  }
}

template void launch_forward(const ForwardArgs<double>&, Stream);
template void launch_forward(const ForwardArgs<float>&, Stream);
template void launch_forward(const ForwardArgs<c10::Half>&, Stream);
template void launch_forward(const ForwardArgs<c10::BFloat16>&, Stream);
template void launch_backward(const BackwardArgs<double, double>&, Stream);
template void launch_backward(const BackwardArgs<float, float>&, Stream);
template void launch_backward(const BackwardArgs<c10::Half, c10::Half>&, Stream);
template void launch_backward(const BackwardArgs<c10::Half, float>&, Stream);
template void launch_backward(const BackwardArgs<c10::BFloat16, c10::BFloat16>&, Stream);
template void launch_backward(const BackwardArgs<c10::BFloat16, float>&, Stream);

}  // namespace lltm::cuda
