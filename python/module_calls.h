// Defines lltm._C.layer and lltm._C.layer_step, which the modules' forward methods call first.
#pragma once

#include <torch/csrc/utils/pybind.h>

// Wrong shapes and values raise `argument_error`.
void define_module_calls(pybind11::module_& m, PyObject* argument_error);
