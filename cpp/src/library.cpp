// Every operator of the library, on one page. Kernels stand beside their
// backend: cpu/, cuda/, composite.cpp (any other device), meta.cpp, autograd.cpp,
// autocast.cpp.
#include <torch/library.h>

TORCH_LIBRARY(lltm, m) {
  // What users call.
  m.def(
      "cell(Tensor input, Tensor h, Tensor c, Tensor weights, Tensor? bias=None)"
      " -> (Tensor, Tensor)");
  m.def(
      "sequence(Tensor input, Tensor h_0, Tensor c_0, Tensor weights, Tensor? bias=None, *,"
      " Tensor? batch_sizes=None, bool reverse=False)"
      " -> (Tensor, Tensor, Tensor)");

  // For repeated inference with the same weights: prepack lays them out once, as
  // the kernels of this machine read them, and sequence_prepacked is sequence
  // with what it returned. Neither has derivatives.
  m.def("prepack(Tensor weights) -> Tensor");
  m.def(
      "sequence_prepacked(Tensor input, Tensor h_0, Tensor c_0, Tensor weights, Tensor? bias=None,"
      " *, Tensor? batch_sizes=None, bool reverse=False)"
      " -> (Tensor, Tensor, Tensor)");

  // What training runs: forward also returns the activations (rows, 4H), laid
  // out input gate | output gate | candidate | tanh(c'); backward takes them.
  // A gradient that is None is zero; output_mask says which gradients are
  // wanted, in the order input, h, c, weights, bias, and the others come back
  // as None.
  m.def(
      "cell_forward(Tensor input, Tensor h, Tensor c, Tensor weights, Tensor? bias)"
      " -> (Tensor h_next, Tensor c_next, Tensor activations)");
  m.def(
      "cell_backward(Tensor? grad_h, Tensor? grad_c, Tensor input, Tensor h, Tensor weights,"
      " Tensor activations, bool[5] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "sequence_forward(Tensor input, Tensor h_0, Tensor c_0, Tensor weights, Tensor? bias,"
      " Tensor? batch_sizes, bool reverse)"
      " -> (Tensor output, Tensor h_n, Tensor c_n, Tensor activations)");
  m.def(
      "sequence_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor input,"
      " Tensor h_0, Tensor weights, Tensor output, Tensor activations, Tensor? batch_sizes,"
      " bool reverse, bool[5] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}
