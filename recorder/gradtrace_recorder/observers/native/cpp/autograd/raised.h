// What Python answers a hook. Part of observer.cpp.
#pragma once

#include "python/python.h"

#include <torch/csrc/Exceptions.h>

#include <stdexcept>
#include <string>

namespace gradtrace {
namespace {

// Throws where Python is going down: a hook that wanted to ask it has nothing to write any more.
class Gil {
 public:
  Gil() {
    if (is_python_ending()) {
      throw std::runtime_error("Python is going down");
    }
    state_ = coming_for_gil(PyGILState_Ensure);
  }
  ~Gil() {
    PyGILState_Release(state_);
  }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// With the GIL: what Python gave back that a hook asked. A text tells a failure of ours, and is thrown as a
// std::runtime_error. What was raised is the job's, Ctrl-C or what its signal handler raises (Python handles signals wherever
// it runs), and goes on as a `python_error`, which the engine knows.
void check_answer(PyObject* answer) {
  if (!answer) {
    python_error of_the_job;
    of_the_job.persist();
    throw of_the_job;
  }
  if (PyUnicode_Check(answer)) {
    const char* utf8 = PyUnicode_AsUTF8(answer);
    if (!utf8) {
      PyErr_Clear();
    }
    throw std::runtime_error(utf8 ? utf8 : "a failure whose text is none");
  }
}

} // namespace
} // namespace gradtrace
