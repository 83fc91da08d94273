// What C++ needs to speak for Python: exceptions, references, fields of objects. Part of observer.cpp.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <structmember.h>
#include <unistd.h>

#include <exception>
#include <utility>

namespace gradtrace {
namespace {

// Runs what may come for the GIL: a call into Python, or taking the lock itself.
//
// CPython until 3.13 ends a thread that comes for the GIL while the interpreter goes down, by `pthread_exit`
// (`take_gil` in Python/ceval_gil.c): a forced unwind, through whatever C++ stands on that thread's stack. A destructor
// (none of which may throw), a `noexcept` or a `catch` that keeps it ends the process; a destructor that gives back a
// reference would do that without the GIL. So such a thread stays here for good, as CPython itself lets it from 3.14 on:
// the process ends without waiting for it. Nothing with a destructor of ours may be made inside `body`.
template <class F>
auto coming_for_gil(F body) {
  try {
    return body();
  } catch (const abi::__forced_unwind&) {
    for (;;) {
      sleep(1000);
    }
  }
}

// Whether the interpreter goes down: nobody comes for the GIL any more.
bool is_python_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Without the GIL, where that is wanted.
class Unlocked {
 public:
  explicit Unlocked(bool wanted = true) : state_(wanted ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (state_) {
      coming_for_gil([this] { PyEval_RestoreThread(state_); });
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* const state_;
};

// What a callable of Python's gives for these, null with an exception set. With the GIL.
template <class... Arguments>
PyObject* called(PyObject* callable, Arguments*... arguments) {
  return coming_for_gil(
      [&] { return PyObject_CallFunctionObjArgs(callable, arguments..., static_cast<PyObject*>(nullptr)); });
}

// Runs what may throw on Python's behalf.
template <class F>
PyObject* guarded(F body) {
  try {
    return body();
  } catch (const std::exception& failure) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_RuntimeError, failure.what());
    }
    return nullptr;
  }
}

// A reference that is given back. With the GIL.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  ~Owned() {
    Py_XDECREF(object_);
  }
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  PyObject* get() const {
    return object_;
  }
  explicit operator bool() const {
    return object_ != nullptr;
  }

 private:
  PyObject* object_;
};

// An attribute of Python's objects that is mostly a slot (`__slots__`), which is read where it lies in the object. With
// the GIL.
class Attribute {
 public:
  explicit Attribute(const char* text) : text_(text) {}

  // Empty with an exception set where there is none.
  Owned of(PyObject* object) {
    if (Py_TYPE(object) != type_) {
      learn(Py_TYPE(object));
    }
    if (offset_ >= 0) {
      PyObject* value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
      if (value) {
        return Owned(Py_NewRef(value));
      }
    }
    return Owned(coming_for_gil([&] { return PyObject_GetAttr(object, name()); }));
  }

  // The same, but a class's own `__getattr__`, which is for what an object lacks, is asked last.
  Owned of_instance(PyObject* object) {
    PyObject* value = coming_for_gil([&] { return PyObject_GenericGetAttr(object, name()); });
    if (!value && PyErr_ExceptionMatches(PyExc_AttributeError)) {
      PyErr_Clear();
      value = coming_for_gil([&] { return PyObject_GetAttr(object, name()); });
    }
    return Owned(value);
  }

  PyObject* name() {
    if (!name_) {
      name_ = PyUnicode_InternFromString(text_);
    }
    return name_;
  }

 private:
  const char* const text_;
  PyObject* name_ = nullptr;
  PyTypeObject* type_ = nullptr;
  Py_ssize_t offset_ = -1;

  void learn(PyTypeObject* type) {
    Py_XDECREF(type_);
    type_ = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
    offset_ = -1;
    const Owned slot(coming_for_gil([&] { return PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name()); }));
    if (!slot) {
      PyErr_Clear();
    } else if (Py_TYPE(slot.get()) == &PyMemberDescr_Type) {
      const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(slot.get())->d_member;
      offset_ = member->type == T_OBJECT_EX ? member->offset : -1;
    }
  }
};

bool integer_of(Attribute& attribute, PyObject* object, long long& number) {
  const Owned value = attribute.of(object);
  number = value ? PyLong_AsLongLong(value.get()) : -1;
  return !(number == -1 && PyErr_Occurred());
}

// What a weak reference refers to, empty where that is gone.
Owned target_of(PyObject* reference) {
  if (!PyWeakref_CheckRef(reference)) {
    return Owned(nullptr);
  }
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* target = nullptr;
  PyWeakref_GetRef(reference, &target);
  return Owned(target);
#else
  PyObject* target = PyWeakref_GetObject(reference);
  return Owned(target == Py_None ? nullptr : Py_NewRef(target));
#endif
}

} // namespace
} // namespace gradtrace
