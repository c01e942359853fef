// In a stream, step by step, the views and checks of the Python modules take longer than the step.
// Where nothing but plain tensors takes part in a call, C++ does the same (layer.h).
//
// What is not plain belongs to the Python code: a function here returns None, and the caller goes
// on as if it had not asked. That holds for whatever wants to see, change or trace each operation,
// and for wrong arguments: the Python code raises their errors.
#include "plain_calls.h"

#include "api/layer.h"
#include "api/plain.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <tuple>

namespace {

namespace py = pybind11;
using at::Tensor;
using lltm::Parameters;
using lltm::State;

struct NotPlain {};

// What an object is, if that is a plain tensor and no subclass of Tensor.
const Tensor& plain_tensor(PyObject* object) {
  if (object == nullptr || !THPVariable_CheckExact(object)) throw NotPlain();
  const Tensor& tensor = THPVariable_Unpack(object);
  if (!lltm::is_plain(tensor)) throw NotPlain();
  return tensor;
}

std::optional<State> plain_state(PyObject* hx) {
  if (hx == Py_None) return std::nullopt;
  if (!PyTuple_CheckExact(hx) || PyTuple_GET_SIZE(hx) != 2) throw NotPlain();
  return State(plain_tensor(PyTuple_GET_ITEM(hx, 0)), plain_tensor(PyTuple_GET_ITEM(hx, 1)));
}

// The __dict__ of a module. What it lacks stands somewhere else, and that is not plain.
class Attributes {
 public:
  explicit Attributes(PyObject* dict) : dict_(dict) {
    if (!PyDict_CheckExact(dict)) throw NotPlain();
  }

  PyObject* operator[](PyObject* name) const {
    PyObject* const value = PyDict_GetItem(dict_, name);
    if (value == nullptr) throw NotPlain();
    return value;
  }
  int64_t integer(PyObject* name) const {
    int overflow = 0;
    PyObject* const value = (*this)[name];
    if (!PyLong_CheckExact(value)) throw NotPlain();
    const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) throw NotPlain();
    return number;
  }
  bool flag(PyObject* name) const {
    PyObject* const value = (*this)[name];
    if (!PyBool_Check(value)) throw NotPlain();
    return value == Py_True;
  }
  double number(PyObject* name) const {
    PyObject* const value = (*this)[name];
    if (!PyFloat_CheckExact(value)) throw NotPlain();
    return PyFloat_AS_DOUBLE(value);
  }
  Parameters parameters(PyObject* weights, PyObject* bias) const {
    PyObject* const bias_or_none = (*this)[bias];
    return {
        plain_tensor((*this)[weights]),
        bias_or_none == Py_None ? Tensor() : plain_tensor(bias_or_none)};
  }

 private:
  PyObject* dict_;
};

// A string that is made once and stays.
PyObject* name(const char* text) {
  return PyUnicode_InternFromString(text);
}

// Whether autograd or forward mode has something to do with a tensor, which may be undefined.
bool is_tracked(const Tensor& tensor) {
  return tensor.defined() && ((at::GradMode::is_enabled() && tensor.requires_grad()) ||
                              tensor._fw_grad(/*level=*/0).defined());
}
bool is_tracked(const Parameters& parameters) {
  return is_tracked(parameters.first) || is_tracked(parameters.second);
}
bool is_tracked(const std::optional<State>& state) {
  return state.has_value() && (is_tracked(std::get<0>(*state)) || is_tracked(std::get<1>(*state)));
}

// Python words the error of another device.
void check_device(const Tensor& input, const Parameters& parameters) {
  if (input.device() != parameters.first.device()) throw NotPlain();
}

py::object wrap(const Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}
template <typename First, typename Second>
py::object wrap(const std::tuple<First, Second>& pair) {
  const auto& [first, second] = pair;
  return py::make_tuple(wrap(first), wrap(second));
}

// The arguments of a function below.
struct Call {
  PyObject *module, *input, *hx;
};

// What `run` makes of a call; None where that is not plain. A function of Python's C API, because
// pybind11 adds as much time to a call as the rest of it here takes.
template <auto run>
PyObject* plain_call(PyObject* /*self*/, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "expected 3 arguments, got ", count);
  if (lltm::is_plain_thread()) {
    try {
      return run(Call{arguments[0], arguments[1], arguments[2]}).release().ptr();
    } catch (const NotPlain&) {
    } catch (const c10::TypeError&) {
    } catch (const c10::ValueError&) {
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// py::gil_scoped_release, which looks for the thread first.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(thread_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

template <typename Module>
py::object forward(
    const Module& module, const Tensor& input, const std::optional<State>& state, bool tracked) {
  const auto run = [&] {
    const WithoutGil without_gil;
    // With nothing to track, autograd would only cost time.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below_autograd;
    if (!tracked) below_autograd.emplace();
    return module.forward(input, state);
  };
  return wrap(run());
}

py::object step(const Call& call) {
  static PyObject* const input_size = name("input_size");
  static PyObject* const hidden_size = name("hidden_size");
  static PyObject* const tensors = name("_parameters");
  static PyObject* const weights = name("weights");
  static PyObject* const bias = name("bias");
  const Attributes attributes(call.module);
  const Tensor& input = plain_tensor(call.input);
  const std::optional<State> state = plain_state(call.hx);
  const Parameters parameters = Attributes(attributes[tensors]).parameters(weights, bias);
  const lltm::StepModule module = {
      attributes.integer(input_size), attributes.integer(hidden_size), parameters};
  check_device(input, parameters);
  const bool tracked = is_tracked(input) || is_tracked(state) || is_tracked(parameters);
  return forward(module, input, state, tracked);
}

// With its tensors among the parameters or, prepacked, the buffers.
template <bool prepacked>
py::object layer(const Call& call) {
  static PyObject* const names = name("_names");
  static PyObject* const tensors = name(prepacked ? "_buffers" : "_parameters");
  static PyObject* const input_size = name("input_size");
  static PyObject* const hidden_size = name("hidden_size");
  static PyObject* const num_layers = name("num_layers");
  static PyObject* const batch_first = name("batch_first");
  static PyObject* const bidirectional = name("bidirectional");
  static PyObject* const dropout = name("dropout");
  static PyObject* const training = name("training");
  static PyObject* const checkpoint_steps = name("checkpoint_steps");
  const Attributes attributes(call.module);
  const Tensor& input = plain_tensor(call.input);
  const std::optional<State> state = plain_state(call.hx);
  const Attributes by_name(attributes[tensors]);
  c10::SmallVector<Parameters, 1> directions;
  bool tracked = is_tracked(input) || is_tracked(state);
  PyObject* const pairs = attributes[names];
  if (!PyList_CheckExact(pairs)) throw NotPlain();
  for (const py::handle item : py::reinterpret_borrow<py::list>(pairs)) {
    PyObject* const pair = item.ptr();
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) throw NotPlain();
    directions.push_back(by_name.parameters(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)));
    tracked = tracked || is_tracked(directions.back());
  }
  const lltm::LayerModule module = {
      attributes.integer(input_size),
      attributes.integer(hidden_size),
      attributes.integer(num_layers),
      attributes.flag(batch_first),
      attributes.flag(bidirectional),
      attributes.number(dropout),
      attributes.flag(training),
      prepacked ? 0 : attributes.integer(checkpoint_steps),
      prepacked,
      directions};
  // Someone may have changed the attributes.
  const int64_t expected = module.num_layers * (module.bidirectional ? 2 : 1);
  if (expected < 1 || static_cast<int64_t>(directions.size()) != expected) throw NotPlain();
  check_device(input, directions.front());
  return forward(module, input, state, tracked);
}

}  // namespace

void define_plain_calls(pybind11::module_& m) {
  constexpr const char* kText =
      "(module, input, hx): what the module with this __dict__ computes; None where its own code"
      " has to.";
  using Function = PyObject* (*)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
  const auto method = [&](const char* name, Function function) {
    void (*const any)() = reinterpret_cast<void (*)()>(function);
    return PyMethodDef{name, reinterpret_cast<PyCFunction>(any), METH_FASTCALL, kText};
  };
  static PyMethodDef methods[] = {
      method("step", &plain_call<step>),
      method("layer", &plain_call<layer<false>>),
      method("prepacked_layer", &plain_call<layer<true>>),
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}
