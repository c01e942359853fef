// Every operator of the library, on one page. Their kernels are registered through backend.h,
// in cpu/operators.cpp, cuda/operators.cpp, composite.cpp (any other device) and meta.cpp;
// derivatives and transforms in autograd.cpp, autocast.cpp and vmap.cpp.
#include <torch/library.h>

TORCH_LIBRARY(lltm, m) {
  // What users call. `cell` is the name of a cell: lltm, lstm, gru, rnn_tanh, rnn_relu. A cell
  // without c takes none and returns an empty one. Without weight_hh, weight_ih is the joined
  // matrix [weight_hh, weight_ih]. With checkpoint_steps = n > 0 training takes less memory: it
  // saves c before every n-th step instead of the activations of every step, and backward runs the
  // steps in between once more.
  m.def(
      "step(str cell, Tensor input, Tensor h, Tensor? c, Tensor weight_ih, Tensor? weight_hh=None,"
      " Tensor? bias_ih=None, Tensor? bias_hh=None) -> (Tensor, Tensor)");
  // reset is bool, (T, B) or packed (N): where it is true, the state of that row starts anew before
  // the step. recurrent_mask (B, H) multiplies h where the GEMM of every step reads it: dropout.
  // Nothing here is keyword-only: to such an int AOTInductor passes its default, and its runtime
  // does not expect that.
  m.def(
      "sequence(str cell, Tensor input, Tensor h_0, Tensor? c_0, Tensor weight_ih,"
      " Tensor? weight_hh=None, Tensor? bias_ih=None, Tensor? bias_hh=None,"
      " Tensor? batch_sizes=None, bool reverse=False, Tensor? reset=None,"
      " int checkpoint_steps=0, Tensor? recurrent_mask=None) -> (Tensor, Tensor, Tensor)");

  // For repeated inference with the same weights: prepack packs them once, for the kernels
  // of this machine, with dtype qint8 quantised. The result goes in the place of weight_ih of
  // sequence, without weight_hh, and has no derivatives.
  m.def(
      "prepack(str cell, Tensor weight_ih, Tensor? weight_hh=None, *, ScalarType? dtype=None)"
      " -> Tensor");
  // What modules save of prepacked weights, to pack it again where it is loaded: weight_ih and
  // weight_hh, or the joined matrix of the LLTM; of those in int8 the rows of weight_ih and
  // weight_hh and their scales, which _prepack_int8 packs again, to the same bits.
  m.def("_unpack(str cell, Tensor packed) -> Tensor[]");
  m.def(
      "_prepack_int8(str cell, Tensor rows_ih, Tensor rows_hh, Tensor scales_ih, Tensor scales_hh)"
      " -> Tensor");

  // What the modules compute with these, as plain compositions of them (api/layer.cpp): those of
  // one step, and those of layers or, with prepacked, their form for inference. An input without a
  // batch is one dimension short. states are h and the cell's others; none stands for those that a
  // sequence begins with. parameters are those of each direction, by layer: weight_ih, weight_hh,
  // with bias bias_ih, bias_hh, and the cell's own; of the LLTM weights and bias; of a prepacked
  // layer the packed weights in the place of the matrices. dropout and recurrent_dropout are those
  // of this call: 0 outside of training.
  m.def(
      "layer_step(str cell, Tensor input, Tensor[] states, Tensor[] parameters, int input_size,"
      " int hidden_size) -> Tensor[]");
  m.def(
      "layer(str cell, Tensor input, Tensor[] states, Tensor[] parameters, bool bias,"
      " int input_size, int hidden_size, int num_layers, bool batch_first, bool bidirectional,"
      " float dropout, float recurrent_dropout, int checkpoint_steps=0, bool prepacked=False,"
      " Tensor? batch_sizes=None, Tensor? sorted_indices=None, Tensor? unsorted_indices=None,"
      " Tensor? reset=None) -> (Tensor, Tensor[])");

  // What training runs. Forward also returns the activations (rows, A * H) of cell.h; of a
  // sequence with checkpoint_steps = n > 0 checkpoints instead, what engines call c before steps 0,
  // n, 2 n, ... in the order of execution, (ceil(T / n), B, K * H). Backward takes the arguments of
  // forward, results of forward, and the gradients of what users see of them; one that is None is
  // zero. output_mask says which gradients are wanted, in the order input, h, c, weight_ih,
  // weight_hh, bias_ih, bias_hh; the others are returned as None.
  m.def(
      "step_forward(str cell, Tensor input, Tensor h, Tensor? c, Tensor weight_ih,"
      " Tensor? weight_hh, Tensor? bias_ih, Tensor? bias_hh)"
      " -> (Tensor h_next, Tensor c_next, Tensor activations)");
  m.def(
      "step_backward(str cell, Tensor input, Tensor h, Tensor? c, Tensor weight_ih,"
      " Tensor? weight_hh, Tensor? bias_ih, Tensor? bias_hh, Tensor activations, Tensor? grad_h,"
      " Tensor? grad_c, bool[7] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "sequence_forward(str cell, Tensor input, Tensor h_0, Tensor? c_0, Tensor weight_ih,"
      " Tensor? weight_hh, Tensor? bias_ih, Tensor? bias_hh, Tensor? batch_sizes, bool reverse,"
      " Tensor? reset, int checkpoint_steps, Tensor? recurrent_mask)"
      " -> (Tensor output, Tensor h_n, Tensor c_n, Tensor saved)");
  m.def(
      "sequence_backward(str cell, Tensor input, Tensor h_0, Tensor? c_0, Tensor weight_ih,"
      " Tensor? weight_hh, Tensor? bias_ih, Tensor? bias_hh, Tensor? batch_sizes, bool reverse,"
      " Tensor? reset, int checkpoint_steps, Tensor? recurrent_mask, Tensor output, Tensor saved,"
      " Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, bool[7] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

  // For what decomposes the operators, in the words of cell.h. _cell: for each slot of a cell the
  // block of rows of weight_ih and of weight_hh, -1 for none; what each of its states begins with;
  // how many parameters and saved values it has. _instructions: how many forward and backward of
  // its programs execute.
  m.def(
      "_cell(str cell) -> (int[] x_blocks, int[] h_blocks, float[] states, bool reads_h,"
      " int parameters, int saved)");
  m.def("_instructions(str cell) -> (int forward, int backward)");
  // A sequence in ATen operations, for loops that are not ours: the weights as the steps read them;
  // a step, from what x adds to the pre-activations and the states in the compute dtype, of which c
  // begins with h where the cell reads that; a step of backward; and, from dz of all steps and the
  // gradients of the states before the first one, the results of sequence_backward.
  m.def(
      "_sequence_operands(str cell, Tensor weight_ih, Tensor? weight_hh, Tensor? bias_ih,"
      " Tensor? bias_hh)"
      " -> (Tensor weight_x, Tensor weight_h, Tensor bias_x, Tensor bias_h, Tensor parameters)");
  m.def(
      "_sequence_step(str cell, Tensor z_x, Tensor h, Tensor c, Tensor weight_h,"
      " Tensor? bias_h=None, Tensor? parameters=None, Tensor? reset=None,"
      " Tensor? recurrent_mask=None) -> (Tensor h, Tensor c, Tensor activations)");
  m.def(
      "_sequence_step_backward(str cell, Tensor activations, Tensor dh, Tensor dc,"
      " Tensor weight_h, Tensor? parameters=None, Tensor? reset=None,"
      " Tensor? recurrent_mask=None) -> (Tensor dz, Tensor dh, Tensor dc)");
  m.def(
      "_sequence_gradients(str cell, Tensor input, Tensor h_0, Tensor? c_0, Tensor weight_ih,"
      " Tensor? weight_hh, Tensor? bias_ih, Tensor? bias_hh, bool reverse, Tensor? reset,"
      " Tensor? recurrent_mask, Tensor output, Tensor dz, Tensor dh, Tensor dc,"
      " bool[7] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

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
