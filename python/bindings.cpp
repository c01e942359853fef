// The Python module lltm._C. It holds no arithmetic: loading it loads liblltm, which
// registers the operators under torch.ops.lltm, and the functions below belong
// to the library.
#include "api/pair.h"
#include "module_calls.h"

#include <lltm/backends.h>
#include <lltm/version.h>

#include <c10/util/Exception.h>
#include <torch/csrc/utils/cpp_stacktraces.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>

namespace {

constexpr const char* kArgumentError =
    R"(A wrong shape or value of an argument.

A ValueError, which it is, and a RuntimeError too, because torch.nn's layers and PyTorch's operators
raise that: code that handles theirs handles this one.)";

// lltm.ArgumentError, for as long as the process lives.
PyObject* argument_error = nullptr;

// Lets wrong shapes and values arrive in Python as an ArgumentError: those that the
// functions below find and, up to PyTorch 2.14, those that torch.ops finds. From
// 2.15 on torch.ops translates errors before pybind11 does: _check.of_operator.
// Translators that were registered later are asked first, and what one throws goes
// to the next: PyTorch's own has the rest.
void translate_value_error(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const c10::ValueError& error) {
    const std::string text =
        torch::get_cpp_stacktraces_enabled() ? error.what() : error.what_without_backtrace();
    if (text.rfind("lltm::", 0) != 0) throw;
    PyErr_SetString(argument_error, text.c_str());
  }
}

constexpr const char* kForward =
    R"(One step by plain ATen operations, on any device, with everything backward() needs.

Args:
    input: (B, I)
    weights: (3H, H+I); rows by gate: input, output, candidate
    bias: (3H) or None
    old_h: (B, H)
    old_cell: (B, H)

Returns:
    [new_h, new_cell, input_gate, output_gate, candidate_cell, X, gate_weights]:
    the states and the activated gates (B, H), X = cat([old_h, input]) (B, H+I) and the gates
    before activation, gate_weights = X weights^T + bias (B, 3H).

lltm.functional.cell computes the same states with fused kernels.)";

constexpr const char* kBackward =
    R"(The gradients of one step, from what forward() returned.

Args:
    grad_h: (B, H), gradient of new_h
    grad_cell: (B, H), gradient of new_cell
    new_cell, input_gate, output_gate, candidate_cell: (B, H)
    X: (B, H+I)
    gate_weights: (B, 3H)
    weights: (3H, H+I)

Returns:
    [d_old_h, d_input, d_weights, d_bias, d_old_cell], each shaped as what it is the gradient of.)";

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using no_gil = py::call_guard<py::gil_scoped_release>;

  m.doc() = "The native library liblltm; its operators are torch.ops.lltm.*";

  const py::tuple bases =
      py::make_tuple(py::handle(PyExc_ValueError), py::handle(PyExc_RuntimeError));
  argument_error =
      PyErr_NewExceptionWithDoc("lltm.ArgumentError", kArgumentError, bases.ptr(), nullptr);
  if (argument_error == nullptr) throw py::error_already_set();
  m.attr("ArgumentError") = py::handle(argument_error);
  py::register_exception_translator(translate_value_error);

  m.def("version", &lltm::version, "Version of liblltm, \"major.minor.patch\".");
  m.def("build_info", &lltm::build_info, "How liblltm was built, one \"name: value\" a line.");
  m.def(
      "cpu_kernels",
      &lltm::cpu_kernels,
      "The CPU kernels in use: \"DEFAULT\", \"AVX2\", \"AVX512\" or \"AMX\"; \"NEON\" on ARM.");

  m.def(
      "cuda_persistent",
      &lltm::cuda_persistent,
      "Whether sequences on a GPU may run by persistent kernels.");
  m.def(
      "set_cuda_persistent",
      &lltm::set_cuda_persistent,
      "Sets it, for the whole process.",
      py::arg("enabled").noconvert());

  m.def(
      "forward",
      &lltm::composite::forward,
      kForward,
      py::arg("input"),
      py::arg("weights"),
      py::arg("bias"),
      py::arg("old_h"),
      py::arg("old_cell"),
      no_gil());
  m.def(
      "backward",
      &lltm::composite::backward,
      kBackward,
      py::arg("grad_h"),
      py::arg("grad_cell"),
      py::arg("new_cell"),
      py::arg("input_gate"),
      py::arg("output_gate"),
      py::arg("candidate_cell"),
      py::arg("X"),
      py::arg("gate_weights"),
      py::arg("weights"),
      no_gil());

  define_module_calls(m, argument_error);
}
