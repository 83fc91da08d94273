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

// How many bytes values of these kinds take.
int64_t bytes_of(const char* codes, int summary_bytes) {
  int64_t bytes = 0;
  for (; *codes; ++codes) {
    const bool is_four = *codes == 'I' || *codes == 'i';
    bytes += *codes == 'B' ? 1 : *codes == 'H' ? 2 : is_four ? 4 : *codes == 's' ? summary_bytes : 8;
  }
  return bytes;
}

bool put(char*& at, char code, PyObject* value, int summary_bytes) {
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
