// Defines lltm._C.layer and lltm._C.layer_step, which the modules' forward methods call first.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

// Wrong shapes and values raise `error_class`, lltm.ArgumentError.
void define_module_calls(pybind11::module_& m, pybind11::object error_class);

// Sets the Python exception lltm.ArgumentError. Returns false if the error is not lltm's.
bool set_argument_error(const c10::Error& error);
