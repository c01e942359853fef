// lltm._C.layer and lltm._C.layer_step: what the modules' forward methods ask first.
#pragma once

#include <torch/csrc/utils/pybind.h>

// `argument_error` is raised for wrong shapes and values.
void define_module_calls(pybind11::module_& m, PyObject* argument_error);
