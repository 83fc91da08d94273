// An event that threads set with and without the GIL, as Python sees it. Part of journal_type.cpp.
#pragma once

#include "journal/journal.h"
#include "python/python.h"

namespace gradtrace {
namespace {

struct PyEvent {
  PyObject_HEAD
  std::shared_ptr<Event>* event;
};

PyTypeObject* event_type = nullptr;

PyObject* event_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self) {
    reinterpret_cast<PyEvent*>(self)->event = new std::shared_ptr<Event>(std::make_shared<Event>());
  }
  return self;
}

void event_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PyEvent*>(self)->event;
  type->tp_free(self);
  Py_DECREF(type);
}

Event& event_of(PyObject* self) {
  return **reinterpret_cast<PyEvent*>(self)->event;
}

PyObject* event_wait(PyObject* self, PyObject* seconds) {
  const double limit = PyFloat_AsDouble(seconds);
  if (limit == -1.0 && PyErr_Occurred()) {
    return nullptr;
  }
  bool is_set;
  {
    const Unlocked unlocked;
    is_set = event_of(self).wait(limit);
  }
  return PyBool_FromLong(is_set);
}

PyObject* event_set(PyObject* self, PyObject*) {
  event_of(self).set();
  Py_RETURN_NONE;
}

PyObject* event_clear(PyObject* self, PyObject*) {
  event_of(self).clear();
  Py_RETURN_NONE;
}

PyObject* event_is_set(PyObject* self, PyObject*) {
  return PyBool_FromLong(event_of(self).is_set());
}

PyMethodDef event_methods[] = {
    {"wait", event_wait, METH_O, "Wait for so many seconds at most; whether it is set."},
    {"set", event_set, METH_NOARGS, "Wake whoever waits."},
    {"clear", event_clear, METH_NOARGS, "Wait for the next time."},
    {"is_set", event_is_set, METH_NOARGS, "Whether it is set."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot event_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(event_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(event_dealloc)},
    {Py_tp_methods, event_methods},
    {Py_tp_doc, const_cast<char*>("An event that is set by threads without the GIL too.")},
    {0, nullptr}};

PyType_Spec event_spec = {"gradtrace_native.Event", sizeof(PyEvent), 0, Py_TPFLAGS_DEFAULT, event_slots};

} // namespace
} // namespace gradtrace
