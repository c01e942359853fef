// Every operator of the library, on one page. Their kernels are registered through backend.h,
// in cpu/operators.cpp, cuda/operators.cpp, composite.cpp (any other device) and meta.cpp;
// derivatives and transforms in autograd.cpp, autocast.cpp and vmap.cpp.
#include <torch/library.h>

TORCH_LIBRARY(lltm, m) {
  // What users call. With checkpoint_steps = n > 0 training takes less memory: it saves c before
  // every n-th step instead of the activations of every step, and backward runs the steps in
  // between once more.
  m.def(
      "cell(Tensor input, Tensor h, Tensor c, Tensor weights, Tensor? bias=None)"
      " -> (Tensor, Tensor)");
  // Nothing here is keyword-only: to such an int AOTInductor passes its default, and its runtime
  // does not expect that.
  m.def(
      "sequence(Tensor input, Tensor h_0, Tensor c_0, Tensor weights, Tensor? bias=None,"
      " Tensor? batch_sizes=None, bool reverse=False, int checkpoint_steps=0)"
      " -> (Tensor, Tensor, Tensor)");

  // For repeated inference with the same weights: prepack packs them once, for the kernels
  // of this machine, with dtype qint8 quantised, and sequence_prepacked is sequence with the
  // packed weights. Neither has derivatives.
  m.def("prepack(Tensor weights, *, ScalarType? dtype=None) -> Tensor");
  m.def(
      "sequence_prepacked(Tensor input, Tensor h_0, Tensor c_0, Tensor weights, Tensor? bias=None,"
      " *, Tensor? batch_sizes=None, bool reverse=False)"
      " -> (Tensor, Tensor, Tensor)");

  // What the modules compute with these, as plain compositions of them (api/layer.cpp): LLTMCell,
  // and LLTM or, with prepacked, its form for inference. An input without a batch is one dimension
  // short. parameters are weights and, with bias, bias of each direction, by layer.
  // dropout is that of this call: 0 outside of training.
  m.def(
      "layer_step(Tensor input, Tensor? h, Tensor? c, Tensor[] parameters, int input_size,"
      " int hidden_size) -> (Tensor, Tensor)");
  m.def(
      "layer(Tensor input, Tensor? h_0, Tensor? c_0, Tensor[] parameters, bool bias,"
      " int input_size, int hidden_size, int num_layers, bool batch_first, bool bidirectional,"
      " float dropout, int checkpoint_steps=0, bool prepacked=False, Tensor? batch_sizes=None,"
      " Tensor? sorted_indices=None, Tensor? unsorted_indices=None)"
      " -> (Tensor, Tensor, Tensor)");

  // What training runs. Forward also returns the activations (rows, S * H) of cell.h; of a
  // sequence with checkpoint_steps = n > 0 checkpoints instead, c before steps 0, n, 2 n, ... in
  // the order of execution, (ceil(T / n), B, H). Backward takes the arguments of forward, results
  // of forward, and the gradients of what users see of them; one that is None is zero. output_mask
  // says which gradients are wanted, in the order input, h, c, weights, bias; the others are
  // returned as None.
  m.def(
      "cell_forward(Tensor input, Tensor h, Tensor c, Tensor weights, Tensor? bias)"
      " -> (Tensor h_next, Tensor c_next, Tensor activations)");
  m.def(
      "cell_backward(Tensor input, Tensor h, Tensor c, Tensor weights, Tensor? bias,"
      " Tensor activations, Tensor? grad_h, Tensor? grad_c, bool[5] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "sequence_forward(Tensor input, Tensor h_0, Tensor c_0, Tensor weights, Tensor? bias,"
      " Tensor? batch_sizes, bool reverse, int checkpoint_steps)"
      " -> (Tensor output, Tensor h_n, Tensor c_n, Tensor saved)");
  m.def(
      "sequence_backward(Tensor input, Tensor h_0, Tensor c_0, Tensor weights, Tensor? bias,"
      " Tensor? batch_sizes, bool reverse, int checkpoint_steps, Tensor output, Tensor saved,"
      " Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, bool[5] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Used by lltm/_binding.py, where the wheel has no compiled lltm._C for the running Python
  // (version.cpp, backends.cpp, pair.cpp).
  m.def("_version() -> str");
  m.def("_build_info() -> str");
  m.def("_cpu_kernels() -> str");
  m.def("_cuda_persistent() -> bool");
  m.def("_set_cuda_persistent(bool enabled) -> ()");
  m.def(
      "_pair_forward(Tensor input, Tensor weights, Tensor? bias, Tensor old_h, Tensor old_cell)"
      " -> Tensor[]");
  m.def(
      "_pair_backward(Tensor grad_h, Tensor grad_cell, Tensor new_cell, Tensor input_gate,"
      " Tensor output_gate, Tensor candidate_cell, Tensor X, Tensor gate_weights, Tensor weights)"
      " -> Tensor[]");
}
