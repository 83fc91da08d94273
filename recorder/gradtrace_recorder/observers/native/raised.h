// What Python raised while a hook called it. Part of observer.cpp.
#pragma once

#include "python.h"

#include <torch/csrc/Exceptions.h>

#include <stdexcept>
#include <string>

namespace gradtrace {
namespace {

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() {
    PyGILState_Release(state_);
  }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  const PyGILState_STATE state_;
};

// With the GIL. An `Exception` is a failure of ours, which is over when its text is known. All else (an interrupt, an
// exit: Python handles signals wherever it runs) is the job's, and goes on as a `python_error`, which the engine knows.
[[noreturn]] void throw_raised(const char* otherwise = "an exception without a text") {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
    python_error of_the_job;
    of_the_job.persist();
    throw of_the_job;
  }
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  std::string text = type ? reinterpret_cast<PyTypeObject*>(type)->tp_name : otherwise;
  PyObject* said = value ? PyObject_Str(value) : nullptr;
  const char* utf8 = said ? PyUnicode_AsUTF8(said) : nullptr;
  text += utf8 ? std::string(": ") + utf8 : "";
  PyErr_Clear();
  Py_XDECREF(said);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  throw std::runtime_error(text);
}

} // namespace
} // namespace gradtrace
