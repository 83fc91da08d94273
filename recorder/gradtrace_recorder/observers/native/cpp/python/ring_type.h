// The ring of a journal as Python sees it: methods of `Journal`. Part of journal_type.cpp.
#pragma once

#include "python/held.h"

#include <new>

namespace gradtrace {
namespace {

// With the lock, on Python's behalf: what is kept may want memory.
template <class F>
PyObject* on_ring(PyObject* self, F body) {
  const Held held(core_of(self));
  try {
    return body(core_of(self));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// keep_as_ring(): from now on the newest records are what counts.
PyObject* journal_keep_as_ring(PyObject* self, PyObject*) {
  return on_ring(self, [](Journal& journal) {
    journal.ring.is_kept = true;
    return Py_NewRef(Py_None);
  });
}

// end_step(step): the newest record is the last of this step.
PyObject* journal_end_step(PyObject* self, PyObject* number) {
  long long step;
  if (!as_integer(number, step)) {
    return nullptr;
  }
  return on_ring(self, [&](Journal& journal) {
    Ring::Mark mark;
    mark.step = static_cast<int32_t>(step);
    mark.number = journal.written;
    std::memcpy(mark.counts, journal.counts, sizeof mark.counts);
    journal.ring.marks.push_back(mark);
    return Py_NewRef(Py_None);
  });
}

// keep_steps(count): let go of all but the newest so many that have ended, unless parts are wanted.
PyObject* journal_keep_steps(PyObject* self, PyObject* number) {
  long long steps;
  if (!as_integer(number, steps)) {
    return nullptr;
  }
  return on_ring(self, [&](Journal& journal) {
    while (static_cast<long long>(journal.ring.marks.size()) > steps && journal.ring.may_let_go()) {
      journal.let_go_of_oldest();
    }
    return Py_NewRef(Py_None);
  });
}

PyObject* steps_of(const Ring& ring) {
  const auto& marks = ring.marks;
  return marks.empty() ? Py_NewRef(Py_None) : Py_BuildValue("(ii)", marks.front().step, marks.back().step);
}

// want() -> (first, last) step that has ended: parts are wanted of all of them. None for none.
PyObject* journal_want(PyObject* self, PyObject*) {
  return on_ring(self, [](Journal& journal) {
    Ring& ring = journal.ring;
    ring.wanted = ring.marks.empty() ? 0 : ring.marks.back().number;
    return steps_of(ring);
  });
}

// wrote(last): whether parts that hold all up to `last` hold all that was wanted.
PyObject* journal_wrote(PyObject* self, PyObject* number) {
  long long last;
  if (!as_integer(number, last)) {
    return nullptr;
  }
  return on_ring(self, [&](Journal& journal) { return PyBool_FromLong(journal.ring.wrote(last)); });
}

// mark_drained(last): parts hold all records up to this one.
PyObject* journal_mark_drained(PyObject* self, PyObject* number) {
  long long last;
  if (!as_integer(number, last)) {
    return nullptr;
  }
  return on_ring(self, [&](Journal& journal) {
    journal.mark_drained(last);
    return Py_NewRef(Py_None);
  });
}

// took_not_finite(): whether a hook has seen such a value since this was asked last.
PyObject* journal_took_not_finite(PyObject* self, PyObject*) {
  return PyBool_FromLong(core_of(self).saw_not_finite.exchange(false));
}

// kept -> (first, last) step that has ended and is kept, None for none.
PyObject* journal_kept(PyObject* self, void*) {
  return on_ring(self, [](Journal& journal) { return steps_of(journal.ring); });
}

// ring -> (up to where parts are wanted, how often there was no room, records let go of by kind)
PyObject* journal_ring(PyObject* self, void*) {
  return on_ring(self, [](Journal& journal) -> PyObject* {
    const Ring& ring = journal.ring;
    PyObject* overwritten = PyList_New(kMostKinds);
    for (int kind = 0; overwritten && kind < kMostKinds; ++kind) {
      PyList_SET_ITEM(overwritten, kind, PyLong_FromLongLong(ring.overwritten[kind]));
    }
    return overwritten ? Py_BuildValue(
                             "(LLN)", static_cast<long long>(ring.wanted), static_cast<long long>(ring.shortened),
                             overwritten)
                       : nullptr;
  });
}

} // namespace
} // namespace gradtrace
