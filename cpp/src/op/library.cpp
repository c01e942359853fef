// All operators. Backends register kernels through backend.h.
#include <torch/library.h>

TORCH_LIBRARY(lltm, m) {
  // For users; documented in lltm/ops.h. c concatenates the states other than h; without them, it
  // is None and returned empty.
  m.def(
      "step(str cell, Tensor input, Tensor h, Tensor? c, Tensor weight_ih, Tensor? weight_hh=None,"
      " Tensor? bias_ih=None, Tensor? bias_hh=None) -> (Tensor, Tensor)");
  // Input (B, I) without batch_sizes is a single step, whose output is empty. Nothing is
  // keyword-only: AOTInductor passes the default of a keyword-only int, which its runtime does not
  // expect.
  m.def(
      "sequence(str cell, Tensor input, Tensor h_0, Tensor? c_0, Tensor weight_ih,"
      " Tensor? weight_hh=None, Tensor? bias_ih=None, Tensor? bias_hh=None,"
      " Tensor? batch_sizes=None, bool reverse=False, Tensor? reset=None,"
      " int checkpoint_steps=0, Tensor? recurrent_mask=None) -> (Tensor, Tensor, Tensor)");

  m.def(
      "prepack(str cell, Tensor weight_ih, Tensor? weight_hh=None, *, ScalarType? dtype=None)"
      " -> Tensor");
  // The saved form of prepacked weights: weight_ih and weight_hh, or the LLTM's concatenated
  // matrix. For int8, rows and scales, which _prepack_int8 packs again, bitwise identical.
  m.def("_unpack(str cell, Tensor packed) -> Tensor[]");
  m.def(
      "_prepack_int8(str cell, Tensor rows_ih, Tensor rows_hh, Tensor scales_ih, Tensor scales_hh)"
      " -> Tensor");

  // The modules' forward (api/layer.cpp): layer_step for single steps, layer for layers and, with
  // prepacked, their inference form. states are h and the others; empty means initial states.
  //
  // parameters, by direction in layer order: weight_ih, weight_hh, with bias also bias_ih and
  // bias_hh, then custom parameters, or a projection's weight_hr. The LLTM has weights and bias.
  // Packed weights replace the matrices. Outside training, both dropouts are 0.
  m.def(
      "layer_step(str cell, Tensor input, Tensor[] states, Tensor[] parameters, int input_size,"
      " int hidden_size) -> Tensor[]");
  m.def(
      "layer(str cell, Tensor input, Tensor[] states, Tensor[] parameters, bool bias,"
      " int input_size, int hidden_size, int num_layers, bool batch_first, bool bidirectional,"
      " float dropout, float recurrent_dropout, int checkpoint_steps=0, bool prepacked=False,"
      " Tensor? batch_sizes=None, Tensor? sorted_indices=None, Tensor? unsorted_indices=None,"
      " Tensor? reset=None) -> (Tensor, Tensor[])");

  // For training. Forward also returns the activations (rows, A * H), A saved values per hidden
  // unit. With checkpoint_steps = n > 0, it instead returns checkpoints (ceil(T / n), B, K * H):
  // the engines' c before steps 0, n, 2 n, ... in execution order.
  //
  // Backward accepts forward's arguments and results, and the results' gradients (None: zero).
  // output_mask selects gradients of input, h, c, weight_ih, weight_hh, bias_ih, bias_hh; others
  // are None.
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

  // For decompositions. _cell returns each pre-activation's block of rows in weight_ih and
  // weight_hh (-1: none), initial values, and the numbers of parameters and saved values.
  // _instructions returns the two programs' lengths.
  m.def(
      "_cell(str cell) -> (int[] x_blocks, int[] h_blocks, float[] states, bool reads_h,"
      " int parameters, int saved, int[] outputs)");
  m.def("_instructions(str cell) -> (int forward, int backward)");
  // For tracing custom cells. _header returns the declarations of a serialized cell: gates by the
  // terms of their pre-activations, initial values by name. _operations returns the words of
  // operations, and those of expensive functions of one operand. _limits are numbers of states,
  // parameters, gates, bytes and the characters of a name.
  m.def(
      "_header(str cell) -> (str name, str[] gates_x, str[] gates_h, str[] gates_input,"
      " str[] products, str[] no_bias, Dict(str, float) states, Dict(str, float) parameters,"
      " str[] scalars, str[] saved, str[] outputs, bool bounded, bool own_gradient)");
  m.def("_operations() -> (str[] words, str[] functions)");
  m.def("_limits() -> (int states, int parameters, int gates, int bytes, int name)");
  // For external loops, in ATen operations. _sequence_operands returns the weights as the steps
  // read them. _sequence_step uses the input projection z_x and the states in the compute dtype;
  // its c begins with h if the cell reads h; z_x ends with the input's columns of given gates.
  // _sequence_gradients returns sequence_backward's results, from dz of all steps and the initial
  // states' gradients.
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
      " Tensor? recurrent_mask, Tensor output, Tensor saved, Tensor dz, Tensor dh, Tensor dc,"
      " bool[7] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

  // For lltm/_binding.py, if the wheel has no lltm._C for the running Python.
  m.def("_version() -> str");
  m.def("_build_info() -> str");
  m.def("_cpu_kernels() -> str");
  m.def("_cuda_persistent() -> bool");
  m.def("_set_cuda_persistent(bool enabled) -> ()");
  m.def("_cuda_float32() -> str?");
  m.def("_set_cuda_float32(str? precision) -> ()");
  m.def(
      "_save_realtime(str cell, Tensor[] parameters, bool bias, int num_layers, int hidden_size,"
      " str path) -> ()");
  m.def(
      "_pair_forward(Tensor input, Tensor weights, Tensor? bias, Tensor old_h, Tensor old_cell)"
      " -> Tensor[]");
  m.def(
      "_pair_backward(Tensor grad_h, Tensor grad_cell, Tensor new_cell, Tensor input_gate,"
      " Tensor output_gate, Tensor candidate_cell, Tensor X, Tensor gate_weights, Tensor weights)"
      " -> Tensor[]");
}
