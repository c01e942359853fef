// The Python module lltm._C. Importing it loads liblltm, which registers the operators under
// torch.ops.lltm. The functions below call the library.
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

// lltm.ArgumentError, never released.
PyObject* argument_error = nullptr;

// Raises ArgumentError for wrong shapes and values, from the functions below and, up to PyTorch
// 2.14, from torch.ops. Since 2.15, torch.ops translates errors before pybind11 does
// (_check.of_operator). pybind11 calls the last registered translator first. An exception that it
// throws goes to the next translator, such as PyTorch's own.
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

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using no_gil = py::call_guard<py::gil_scoped_release>;

  m.doc() = "The native library liblltm; its operators are torch.ops.lltm.*";

  // lltm._binding implements the same functions for other Pythons and has their docstrings.
  const auto binding = py::module_::import("lltm._binding");
  const py::object getdoc = py::module_::import("inspect").attr("getdoc");
  const auto doc = [&](const char* name) {
    const py::object text = getdoc(binding.attr(name));  // None under python -OO
    return text.is_none() ? std::string() : text.cast<std::string>();
  };

  argument_error = py::object(binding.attr("ArgumentError")).release().ptr();
  m.attr("ArgumentError") = py::handle(argument_error);
  py::register_exception_translator(translate_value_error);

  m.def("version", &lltm::version, doc("version").c_str());
  m.def("build_info", &lltm::build_info, doc("build_info").c_str());
  m.def("cpu_kernels", &lltm::cpu_kernels, doc("cpu_kernels").c_str());
  m.def("cuda_persistent", &lltm::cuda_persistent, doc("cuda_persistent").c_str());
  m.def(
      "set_cuda_persistent",
      &lltm::set_cuda_persistent,
      doc("set_cuda_persistent").c_str(),
      py::arg("enabled").noconvert());

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

  define_module_calls(m, argument_error);
}
