// Values of Python's into the fields of a record. Part of journal_type.cpp.
#pragma once

#include "journal/journal.h"

#include <cstring>

namespace gradtrace {
namespace {

bool as_integer(PyObject* value, long long& number) {
  int overflow = 0;
  if (PyLong_Check(value)) {
    number = PyLong_AsLongLongAndOverflow(value, &overflow);
  } else {
    PyObject* index = PyNumber_Index(value);
    if (!index) {
      return false;
    }
    number = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
  }
  if (overflow) {
    PyErr_SetString(PyExc_OverflowError, "a number that no field of a record holds");
    return false;
  }
  return !(number == -1 && PyErr_Occurred());
}

template <class T>
bool put_integer(char*& at, PyObject* value) {
  long long number;
  if (!as_integer(value, number)) {
    return false;
  }
  const T narrow = static_cast<T>(number);
  if (static_cast<long long>(narrow) != number) {
    PyErr_Format(PyExc_OverflowError, "%lld does not fit its field of a record", number);
    return false;
  }
  std::memcpy(at, &narrow, sizeof narrow);
  at += sizeof narrow;
  return true;
}

// A value into a field, which `at` goes past: what it is, as record_layouts.h has it. False with an exception set.
bool put(char*& at, char code, PyObject* value) {
  constexpr Py_ssize_t summary_bytes = sizeof(layout::Summary);
  switch (code) {
    case 'B':
      return put_integer<uint8_t>(at, value);
    case 'H':
      return put_integer<uint16_t>(at, value);
    case 'I':
      return put_integer<uint32_t>(at, value);
    case 'i':
      return put_integer<int32_t>(at, value);
    case 'q':
      return put_integer<int64_t>(at, value);
    case 'd': {
      const double number = PyFloat_AsDouble(value);
      if (number == -1.0 && PyErr_Occurred()) {
        return false;
      }
      std::memcpy(at, &number, 8);
      at += 8;
      return true;
    }
    case 's':
      if (!PyBytes_Check(value) || PyBytes_GET_SIZE(value) != summary_bytes) {
        PyErr_SetString(PyExc_ValueError, "a summary is so many bytes");
        return false;
      }
      std::memcpy(at, PyBytes_AS_STRING(value), summary_bytes);
      at += summary_bytes;
      return true;
    default:
      PyErr_Format(PyExc_ValueError, "a field of kind %c", code);
      return false;
  }
}

} // namespace
} // namespace gradtrace
