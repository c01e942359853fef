// Calls the operators of modules directly with the modules' attributes. In single-step streaming,
// PyTorch's argument parser and the surrounding Python code take as long as the step itself.
//
// A call is equivalent to the operator's: it reads attributes like getattr and goes through the
// dispatcher. Some cases need PyTorch's parser: a Tensor subclass, a mode that overrides functions,
// a wrong type. torch.jit.trace needs the callers, which support ONNX. The functions then return
// None, and the caller calls torch.ops.
#include "module_calls.h"

#include "api/layer.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/cpp_stacktraces.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

namespace py = pybind11;
using at::Tensor;
using Tensors = c10::SmallVector<Tensor, 4>;

PyObject* argument_error = nullptr;  // lltm.ArgumentError
PyObject* module_getattr = nullptr;  // of torch.nn.Module when lltm was imported

// Thrown for an argument that needs PyTorch's parser.
struct NotPlain {};

// ---- Python values as arguments of operators --------------------------------

template <typename T>
using As = std::type_identity<T>;

const Tensor& to(As<const Tensor&>, PyObject* object) {
  if (!THPVariable_CheckExact(object)) throw NotPlain();
  const Tensor& tensor = THPVariable_Unpack(object);
  if (tensor.is_nested()) throw NotPlain();  // the modules report how to pack it
  return tensor;
}
std::optional<Tensor> to(As<const std::optional<Tensor>&>, PyObject* object) {
  if (object == Py_None) return std::nullopt;
  return to(As<const Tensor&>(), object);
}
bool to(As<bool>, PyObject* object) {
  if (!PyBool_Check(object)) throw NotPlain();
  return object == Py_True;
}
std::string_view to(As<std::string_view>, PyObject* object) {  // valid while the object lives
  if (!PyUnicode_CheckExact(object)) throw NotPlain();
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
  if (text == nullptr) throw py::error_already_set();
  return {text, static_cast<size_t>(size)};
}
double to(As<double>, PyObject* object) {
  if (!PyFloat_CheckExact(object)) throw NotPlain();
  return PyFloat_AS_DOUBLE(object);
}
int64_t to(As<int64_t>, PyObject* object) {
  int overflow = 0;
  if (!PyLong_CheckExact(object)) throw NotPlain();
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) throw NotPlain();
  return value;
}

// ---- attributes -------------------------------------------------------------

PyObject* lookup(PyObject* dict, PyObject* name) {
  PyObject* const value = PyDict_GetItemWithError(dict, name);  // borrowed
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// Equivalent to getattr(module, name). torch.nn.Module.__getattr__, which finds parameters and
// buffers, is written in Python. If it would be called, this class searches the same places in the
// same order.
class Attributes {
 public:
  explicit Attributes(PyObject* module) : module_(module), dict_(_PyObject_GetDictPtr(module)) {
    static PyObject* const getattr = PyUnicode_InternFromString("__getattr__");
    static PyObject* const getattribute = PyUnicode_InternFromString("__getattribute__");
    static PyObject* const of_object = _PyType_Lookup(&PyBaseObject_Type, getattribute);
    PyTypeObject* const type = Py_TYPE(module);
    usual_ = dict_ != nullptr && _PyType_Lookup(type, getattr) == module_getattr &&
             _PyType_Lookup(type, getattribute) == of_object;
  }

  py::object operator[](PyObject* name) const {
    if (usual_ && *dict_ != nullptr && _PyType_Lookup(Py_TYPE(module_), name) == nullptr) {
      static PyObject* const places[] = {
          PyUnicode_InternFromString("_parameters"), PyUnicode_InternFromString("_buffers")};
      PyObject* value = lookup(*dict_, name);
      for (PyObject* const place : places) {
        if (value != nullptr) break;
        PyObject* const values = lookup(*dict_, place);
        if (values == nullptr || !PyDict_CheckExact(values)) break;
        value = lookup(values, name);
      }
      if (value != nullptr) return py::reinterpret_borrow<py::object>(value);
    }
    PyObject* const value = PyObject_GetAttr(module_, name);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }

 private:
  PyObject* const module_;
  PyObject** const dict_;
  bool usual_;
};

// ---- calls ------------------------------------------------------------------

// Like py::gil_scoped_release, without its search for the thread.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(thread_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

py::object wrap(const Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}
// A single state, as in torch.nn.GRU, is a tensor; several states are a tuple.
py::object wrap(const std::vector<Tensor>& states) {
  if (states.size() == 1) return wrap(states[0]);
  py::tuple all(states.size());
  for (size_t k = 0; k < states.size(); ++k) all[k] = wrap(states[k]);
  return all;
}
py::object wrap(const std::tuple<Tensor, std::vector<Tensor>>& results) {
  const auto& [output, states] = results;
  return py::make_tuple(wrap(output), wrap(states));
}

// Arguments of a module's forward. hx is None or a tuple of states. `parameters` and `options` are
// the names of the attributes that the operator needs, in schema order; a parameter may be None.
// `last` is the operator's last argument (reset of a layer), or null.
struct Call {
  PyObject *module, *input, *hx, *parameters, *options, *last;
};

// An operator whose arguments are cell, input, states, parameters and options.
template <const auto& name, typename Signature>
struct Operator;
template <const auto& name, typename Results, typename... Options>
struct Operator<
    name,
    Results(std::string_view, const Tensor&, at::TensorList, at::TensorList, Options...)> {
  using Signature =
      Results(std::string_view, const Tensor&, at::TensorList, at::TensorList, Options...);

  static py::object run(const Call& call) {
    return run(call, std::index_sequence_for<Options...>());
  }

 private:
  template <size_t... k>
  static py::object run(const Call& call, std::index_sequence<k...>) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
    const Tensor& input = to(As<const Tensor&>(), call.input);
    const Tensors states = states_of(call.hx);
    static PyObject* const cell_name = PyUnicode_InternFromString("_CELL");
    const Attributes attributes(call.module);
    const py::object cell = attributes[cell_name];
    Tensors parameters;
    for (Py_ssize_t p = 0; p < PySequence_Fast_GET_SIZE(call.parameters); ++p) {
      const py::object value = attributes[PySequence_Fast_GET_ITEM(call.parameters, p)];
      if (!value.is_none()) parameters.push_back(to(As<const Tensor&>(), value.ptr()));
    }
    const auto option = [&](size_t index) {
      const auto at = static_cast<Py_ssize_t>(index);
      if (at < PyTuple_GET_SIZE(call.options)) {
        return attributes[PyTuple_GET_ITEM(call.options, at)];
      }
      const bool is_last = call.last != nullptr && index + 1 == sizeof...(Options);
      return py::reinterpret_borrow<py::object>(is_last ? call.last : Py_None);
    };
    const auto options =
        std::tuple<decltype(to(As<Options>(), nullptr))...>(to(As<Options>(), option(k).ptr())...);
    const std::string_view name_of_cell = to(As<std::string_view>(), cell.ptr());
    const auto call_op = [&] {
      const WithoutGil without_gil;
      return op.call(name_of_cell, input, states, parameters, std::get<k>(options)...);
    };
    return wrap(call_op());
  }

  static Tensors states_of(PyObject* hx) {
    Tensors states;
    if (hx == Py_None) return states;
    if (!PyTuple_CheckExact(hx) || PyTuple_GET_SIZE(hx) == 0) throw NotPlain();
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(hx); ++k) {
      states.push_back(to(As<const Tensor&>(), PyTuple_GET_ITEM(hx, k)));
    }
    return states;
  }
};

// Uses Python's C API, because pybind11 adds as much time to a call as everything else here.
template <typename Operator>
PyObject* call_operator(PyObject* /*self*/, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      (count == 5 || count == 6) && (PyTuple_Check(arguments[3]) || PyList_Check(arguments[3])) &&
          PyTuple_Check(arguments[4]),
      "expected a module, its input and state, two tuples of names, and a last argument or none");
  if (at::impl::torch_function_mode_enabled() || at::tracer::impl::is_dispatch_enabled()) {
    Py_RETURN_NONE;
  }
  try {
    PyObject* const last = count == 6 ? arguments[5] : nullptr;
    return Operator::run(
               {arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], last})
        .release()
        .ptr();
  } catch (const NotPlain&) {
    Py_RETURN_NONE;
  } catch (const c10::TypeError& error) {
    // The module's own check names the argument hx.
    const std::string text = error.what_without_backtrace();
    if (text.find(": expected state to be ") == std::string::npos) throw;
    Py_RETURN_NONE;
  } catch (const c10::ValueError& error) {
    if (!set_argument_error(error)) throw;
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

constexpr char kLayer[] = "lltm::layer";
constexpr char kStep[] = "lltm::layer_step";

}  // namespace

bool set_argument_error(const c10::Error& error) {
  const std::string text =
      torch::get_cpp_stacktraces_enabled() ? error.what() : error.what_without_backtrace();
  if (text.rfind("lltm::", 0) != 0) return false;
  PyErr_SetString(argument_error, text.c_str());
  return true;
}

void define_module_calls(py::module_& m, py::object error_class) {
  argument_error = error_class.release().ptr();
  const auto torch_module = py::module_::import("torch.nn").attr("Module");
  module_getattr = py::object(torch_module.attr("__getattr__")).release().ptr();
  constexpr const char* kText =
      "(module, input, hx, parameters, options, last=None): what the module's forward returns,"
      " where no argument overrides functions; else None. parameters and options are the names of"
      " the attributes that the operator takes, last is its last argument.";
  using Function = PyObject* (*)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
  const auto method = [&](const char* name, Function function) {
    void (*const any)() = reinterpret_cast<void (*)()>(function);
    return PyMethodDef{name, reinterpret_cast<PyCFunction>(any), METH_FASTCALL, kText};
  };
  static PyMethodDef methods[] = {
      method("layer", &call_operator<Operator<kLayer, decltype(lltm::layer)>>),
      method("layer_step", &call_operator<Operator<kStep, decltype(lltm::layer_step)>>),
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}
