// Nodes that may make others while they run: Functions defined in Python, and every Node of a pass that makes a graph.
// What they make belongs to the module's call that made them, which Python notes. Part of observer.cpp.
#pragma once

#include "autograd/gradients.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>

namespace gradtrace {
namespace {

struct Maker {
  const bool is_python;
  bool is_making = false; // Python was told that the Node began
  Packed before = {};     // of a Function: what came in, as it was before the Function could change it

  explicit Maker(bool python) : is_python(python) {}
};

// The Node of that call is about to run. Without the GIL, or with it.
void begin_making(const Settings& settings, Maker& maker, PyObject* frame) {
  if (!frame || !(maker.is_python || at::GradMode::is_enabled())) {
    return;
  }
  const Gil gil;
  const Owned number(PyLong_FromUnsignedLongLong(at::sequence_number::peek()));
  const Owned told(number ? called(settings.begins, number.get(), frame) : nullptr);
  check_answer(told.get());
  maker.is_making = true;
}

// It has run, on the same thread.
void end_making(const Settings& settings, Maker& maker) {
  if (!std::exchange(maker.is_making, false)) {
    return;
  }
  const Gil gil;
  const Owned number(PyLong_FromUnsignedLongLong(at::sequence_number::peek()));
  const Owned told(number ? called(settings.ends, number.get()) : nullptr);
  check_answer(told.get());
}

} // namespace
} // namespace gradtrace
