// The Python module lltm._C: fast calls of modules, the tutorial's forward and backward, and the
// members of lltm._binding. Importing it loads liblltm, which registers the operators under
// torch.ops.lltm.
#include "api/pair.h"
#include "module_calls.h"

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>

namespace {

// Raises ArgumentError for wrong shapes and values, from the functions below and, up to PyTorch
// 2.14, from torch.ops. Since 2.15, torch.ops translates errors before pybind11 does
// (_check.call). pybind11 calls the last registered translator first. An exception that it
// throws goes to the next translator, such as PyTorch's own.
void translate_value_error(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const c10::ValueError& error) {
    if (!set_argument_error(error)) throw;
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using no_gil = py::call_guard<py::gil_scoped_release>;

  m.doc() = "The native library liblltm; its operators are torch.ops.lltm.*";

  const auto binding = py::module_::import("lltm._binding");
  py::register_exception_translator(translate_value_error);

  // Calls through torch.ops would add 5 % to the tutorial's time in the benchmarks.
  const py::object getdoc = py::module_::import("inspect").attr("getdoc");
  const auto doc = [&](const char* name) {
    const py::object text = getdoc(binding.attr(name));  // None under python -OO
    return text.is_none() ? std::string() : text.cast<std::string>();
  };
  m.def(
      "forward",
      &lltm::aten_fallback::forward,
      doc("forward").c_str(),
      py::arg("input"),
      py::arg("weights"),
      py::arg("bias"),
      py::arg("old_h"),
      py::arg("old_cell"),
      no_gil());
  m.def(
      "backward",
      &lltm::aten_fallback::backward,
      doc("backward").c_str(),
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
  for (const py::handle name : binding.attr("__all__")) {
    if (!py::hasattr(m, name)) m.attr(name) = binding.attr(name);
  }

  define_module_calls(m, binding.attr("ArgumentError"));
}
