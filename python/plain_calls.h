// Calls of modules without Python code between arguments and operators.
#pragma once

#include <torch/csrc/utils/pybind.h>

// Adds step, layer and prepacked_layer to lltm._C.
void define_plain_calls(pybind11::module_& m);
