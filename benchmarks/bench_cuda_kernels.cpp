// The CUDA element-wise kernels of the LLTM alone: bytes moved per second beside a copy within
// the card's memory, in the same rounds. Prints a JSON array, one object per
// kernel: {"title", "bytes", "seconds": [one figure per round]}.
//
// Arguments are larger than any cache: each is read or written once.
#include "cell/lltm.h"
#include "common/tensor_views.h"
#include "cuda/kernel/elementwise.h"
#include "cuda_timing.h"

#include <ATen/ATen.h>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using namespace lltm;
using namespace lltm::cuda;

constexpr int kRounds = 15;
constexpr int kRuns = 5;  // per round

struct Contender {
  std::string title;
  double bytes;
  std::function<void()> run;
  std::vector<double> seconds = {};
};

double bytes(const std::vector<Tensor>& tensors) {
  double sum = 0;
  for (const Tensor& tensor : tensors) sum += static_cast<double>(tensor.nbytes());
  return sum;
}

// The kernels of one dtype for `rows` rows of `hidden` units, as a sequence calls
// them: forward without and with saved activations, and backward.
template <typename T>
void measure(const char* dtype_name, at::ScalarType dtype, int64_t rows, int64_t hidden) {
  using C = compute_t<T>;
  constexpr const CellInfo& cell = Lltm::kCell;
  const auto options = at::TensorOptions(at::kCUDA).dtype(dtype);
  const auto compute_options = options.dtype(compute_dtype(dtype));
  const auto random = [&](int64_t columns, const at::TensorOptions& o) {
    return at::randn({rows, columns}, o);
  };
  const Tensor gates = random(cell.slots * hidden, compute_options), c = random(hidden, options);
  const Tensor bias = at::randn({cell.slots * hidden}, options);
  const Tensor h_next = at::empty_like(c), h_operand = at::empty_like(c),
               c_next = at::empty_like(c);
  const Tensor activations = random(cell.saved * hidden, options), grad_h = random(hidden, options);
  const Tensor grad_h_state = random(hidden, compute_options);
  const Tensor grad_c = random(hidden, compute_options), grad_c_prev = at::empty_like(grad_c);
  const Tensor grad_gates = at::empty({rows, cell.slots * hidden}, options);

  ForwardArgs<T> forward;
  forward.rows = rows;
  forward.hidden = hidden;
  forward.gates = read<C>(gates);
  forward.bias_ih = read_row<T>(bias);
  forward.c = read<T>(c);
  forward.h_next = write<T>(h_next);
  forward.h_operand = write<T>(h_operand);
  forward.c_next = write<T>(c_next);
  ForwardArgs<T> saving = forward;
  saving.activations = write<T>(activations);
  BackwardArgs<T, C> backward;
  backward.rows = rows;
  backward.hidden = hidden;
  backward.activations = read<T>(activations);
  backward.grad_h = read<T>(grad_h);
  backward.grad_h_state = read<C>(grad_h_state);
  backward.grad_c = read<C>(grad_c);
  backward.grad_gates = write<T>(grad_gates);
  backward.grad_c_prev = write<C>(grad_c_prev);

  const Stream stream = current_stream();
  const double forward_bytes = bytes({gates, c, h_next, h_operand, c_next});
  // Of random bytes: zeros are stored compressed.
  const Tensor source = at::zeros({int64_t{1} << 29}, options.dtype(at::kByte)).random_(0, 256);
  const Tensor target = at::zeros_like(source);
  const std::string size =
      std::string(", ") + dtype_name + ", " + std::to_string(rows) + " x " + std::to_string(hidden);
  std::vector<Contender> contenders = {
      {"copy" + size, bytes({source, target}), [&] { Tensor(target).copy_(source); }},
      {"forward" + size, forward_bytes, [&] { launch_forward(cell, forward, stream); }},
      {"forward, saving activations" + size,
       forward_bytes + bytes({activations}),
       [&] { launch_forward(cell, saving, stream); }},
      {"backward" + size,
       bytes({activations, grad_h, grad_h_state, grad_c, grad_gates, grad_c_prev}),
       [&] { launch_backward(cell, backward, stream); }},
  };
  for (const Contender& contender : contenders) lltm_benchmark::time(contender.run, kRuns);
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& contender : contenders)
      contender.seconds.push_back(lltm_benchmark::time(contender.run, kRuns));
  }
  static bool first = true;
  for (const Contender& contender : contenders) {
    std::cout << (first ? "[" : ",\n") << "{\"title\": \"" << contender.title
              << "\", \"bytes\": " << contender.bytes << ", \"seconds\": [";
    for (size_t k = 0; k < contender.seconds.size(); ++k) {
      std::cout << (k == 0 ? "" : ", ") << contender.seconds[k];
    }
    std::cout << "]}";
    first = false;
  }
}

}  // namespace

int main() {
  if (!lltm_benchmark::has_gpu()) return 1;
  std::cout.precision(9);
  // 65 million elements, and fewer of a size that fills no 16-byte access.
  for (const auto& [rows, hidden] : {std::pair<int64_t, int64_t>{65536, 1024}, {32768, 1023}}) {
    measure<double>("float64", at::kDouble, rows / 2, hidden);
    measure<float>("float32", at::kFloat, rows, hidden);
    measure<c10::Half>("float16", at::kHalf, rows, hidden);
    measure<c10::BFloat16>("bfloat16", at::kBFloat16, rows, hidden);
  }
  std::cout << "]\n";
}
