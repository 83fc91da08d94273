// The journal's object in Python, for whoever is handed one.
#pragma once

#include "journal/journal.h"

#include <Python.h>

namespace gradtrace {

struct PyJournal {
  PyObject_HEAD
  std::shared_ptr<Journal>* core; // hooks hold it too, as long as they are on a Node
  Py_buffer view;
  PyObject* event;
  PyObject* places[layout::kThreadSlots]; // what `move` was given last, by slot
};

// Adds the types `Journal` and `Event`. Returns the type of a journal, null with an exception set.
PyTypeObject* add_journal_types(PyObject* module);

} // namespace gradtrace
