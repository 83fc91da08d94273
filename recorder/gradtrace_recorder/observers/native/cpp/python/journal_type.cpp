// The journal as Python sees it: `Journal`, to be written into, and `Event`, which wakes the drain thread.
#include "python/event_type.h"
#include "python/packing.h"
#include "python/ring_type.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace gradtrace {
namespace {

PyObject* journal_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) {
    return nullptr;
  }
  of(self)->event = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(event_type));
  if (!of(self)->event) {
    Py_DECREF(self);
    return nullptr;
  }
  of(self)->core = new std::shared_ptr<Journal>(std::make_shared<Journal>());
  core_of(self).half_is_full = *reinterpret_cast<PyEvent*>(of(self)->event)->event;
  return self;
}

int journal_traverse(PyObject* self, visitproc visit, void* arg) {
  for (PyObject* place : of(self)->places) {
    Py_VISIT(place);
  }
  Py_VISIT(of(self)->view.obj);
  Py_VISIT(of(self)->event);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int journal_clear(PyObject* self) {
  for (PyObject*& place : of(self)->places) {
    Py_CLEAR(place);
  }
  return 0;
}

void journal_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  PyJournal* journal = of(self);
  if (journal->core) {
    Journal& core = core_of(self);
    journal_clear(self);
    core.close();
    if (journal->view.obj) {
      PyBuffer_Release(&journal->view);
    }
    delete journal->core;
  }
  Py_XDECREF(journal->event);
  type->tp_free(self);
  Py_DECREF(type);
}

// open(map, running_offset, held_offset, records_offset, half_records)
PyObject* journal_open(PyObject* self, PyObject* args) {
  PyObject* map;
  long long running, held, records, half;
  if (!PyArg_ParseTuple(args, "OLLLL", &map, &running, &held, &records, &half)) {
    return nullptr;
  }
  Py_buffer view;
  if (PyObject_GetBuffer(map, &view, PyBUF_WRITABLE) < 0) {
    return nullptr;
  }
  if (!core_of(self).open(static_cast<char*>(view.buf), view.len, Parts{running, held, records, half})) {
    PyBuffer_Release(&view);
    return PyErr_Format(
        PyExc_ValueError, "parts at %lld, %lld and %lld of two times %lld records do not lie in this memory, or the journal was opened before",
        running, held, records, half);
  }
  of(self)->view = view;
  Py_RETURN_NONE;
}

// Nothing is written any more, and the map is let go of.
PyObject* journal_let_go(PyObject* self, PyObject*) {
  const Held held(core_of(self));
  core_of(self).close();
  if (of(self)->view.obj) {
    PyBuffer_Release(&of(self)->view);
  }
  Py_RETURN_NONE;
}

PyObject* journal_forget(PyObject* self, PyObject* elsewhere) {
  Py_buffer view;
  if (PyObject_GetBuffer(elsewhere, &view, PyBUF_WRITABLE) < 0) {
    return nullptr;
  }
  if (of(self)->view.obj && view.len < of(self)->view.len) {
    PyBuffer_Release(&view);
    return PyErr_Format(PyExc_ValueError, "less memory than the journal has");
  }
  core_of(self).forget(static_cast<char*>(view.buf));
  if (of(self)->view.obj) {
    PyBuffer_Release(&of(self)->view);
  }
  of(self)->view = view;
  Py_RETURN_NONE;
}

// A record as Python's values make it, all but its two numbers.
struct Packing {
  alignas(8) char record[layout::kRecordBytes] = {};
  int kind = 0;
  int32_t step = 0;

  // kind, step, *values. False with an exception set.
  bool take(PyObject* const* args, Py_ssize_t count) {
    long long number;
    if (count < 2 || !as_integer(args[0], number) || number < 0 || number >= kMostKinds || !layout::kFormats[number]) {
      if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "what kind of record?");
      }
      return false;
    }
    const char* codes = layout::kFormats[number];
    if (static_cast<Py_ssize_t>(std::strlen(codes)) != count) {
      PyErr_Format(PyExc_ValueError, "a record of kind %lld has %zu values", number, std::strlen(codes));
      return false;
    }
    char* at = record + offsetof(layout::NodeEvents, record_kind);
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!put(at, codes[i], args[i])) {
        return false;
      }
    }
    kind = static_cast<int>(number);
    std::memcpy(&step, record + offsetof(layout::NodeEvents, step), sizeof step);
    return true;
  }
};

// append(kind, step, *values): the same as `JournalWriter.append`, or `append_lasting`.
template <bool is_lasting>
PyObject* journal_append(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Packing made;
  if (!made.take(args, count)) {
    return nullptr;
  }
  return on_ring(self, [&](Journal& journal) {
    if constexpr (is_lasting) {
      journal.append_lasting(made.kind, made.step, made.record);
    } else {
      journal.append(made.kind, made.step, made.record);
    }
    return Py_NewRef(Py_None);
  });
}

// hold(kind, step, *values) -> the place of a row that `settle` will complete, None where all are taken.
PyObject* journal_hold(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Packing made;
  if (!made.take(args, count)) {
    return nullptr;
  }
  const Held held(core_of(self));
  const int place = core_of(self).hold(made.record);
  return place < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(place);
}

// A place that `hold` gave, -1 for None. False with an exception set.
bool as_place(PyObject* value, int& place) {
  long long number = -1;
  if (value != Py_None && !as_integer(value, number)) {
    return false;
  }
  if (number < -1 || number >= layout::kHeldPlaces) {
    PyErr_Format(PyExc_ValueError, "no row is held at %lld", number);
    return false;
  }
  place = static_cast<int>(number);
  return true;
}

// settle(place, kind, step, *values)
PyObject* journal_settle(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Packing made;
  int place;
  if (count < 1 || !as_place(args[0], place) || !made.take(args + 1, count - 1)) {
    return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "a place and a row");
  }
  return on_ring(self, [&](Journal& journal) {
    journal.settle(place, made.kind, made.step, made.record);
    return Py_NewRef(Py_None);
  });
}

// release(place)
PyObject* journal_release(PyObject* self, PyObject* value) {
  int place;
  if (!as_place(value, place)) {
    return nullptr;
  }
  const Held held(core_of(self));
  core_of(self).release(place);
  Py_RETURN_NONE;
}

// A buffer of contiguous memory, which is given back.
struct Memory {
  Py_buffer view = {};
  ~Memory() {
    if (view.obj) {
      PyBuffer_Release(&view);
    }
  }
};

// amend(numbers, offsets, data): words of 8 bytes each, and the same number of bytes for each of them.
PyObject* journal_amend(PyObject* self, PyObject* args) {
  PyObject *numbers, *offsets, *data;
  if (!PyArg_ParseTuple(args, "OOO", &numbers, &offsets, &data)) {
    return nullptr;
  }
  Memory of_numbers, of_offsets, of_data;
  if (PyObject_GetBuffer(numbers, &of_numbers.view, PyBUF_C_CONTIGUOUS) < 0 ||
      PyObject_GetBuffer(offsets, &of_offsets.view, PyBUF_C_CONTIGUOUS) < 0 ||
      PyObject_GetBuffer(data, &of_data.view, PyBUF_C_CONTIGUOUS) < 0) {
    return nullptr;
  }
  const Py_ssize_t count = of_numbers.view.len / 8, width = count ? of_data.view.len / count : 0;
  const bool is_whole = of_numbers.view.len == count * 8 && of_offsets.view.len == count * 8 && of_data.view.len == count * width;
  bool is_done = is_whole;
  if (is_whole && count) {
    const Unlocked unlocked;
    is_done = core_of(self).amend(
        static_cast<const uint64_t*>(of_numbers.view.buf), static_cast<const int64_t*>(of_offsets.view.buf),
        static_cast<const char*>(of_data.view.buf), count, width);
  }
  if (!is_done) {
    return PyErr_Format(PyExc_ValueError, "what is to be written does not lie in records");
  }
  Py_RETURN_NONE;
}

// map_ahead() -> whether there are more pages that nobody has written to. Of one thread; without the GIL meanwhile.
PyObject* journal_map_ahead(PyObject* self, PyObject*) {
  constexpr int64_t kAtOnce = 1 << 18;
  constexpr int kPopulateWrite = 23; // MADV_POPULATE_WRITE of Linux 5.14: it changes nothing that lies there
  Journal& core = core_of(self);
  char* at = nullptr;
  int64_t length = 0;
  {
    Held held(core);
    core.mapped = std::max(core.mapped, std::min(core.written, core.places) * layout::kRecordBytes / kAtOnce * kAtOnce);
    length = std::min(kAtOnce, core.places * layout::kRecordBytes - core.mapped);
    if (core.limit < 0 || length <= 0) {
      Py_RETURN_FALSE;
    }
    at = core.map + core.parts.records_offset + core.mapped;
    core.mapped += length;
  }
  int failed = 0;
  {
    const Unlocked unlocked;
    // Should the file be let go of meanwhile, there is nothing to map, and that is said.
    failed = madvise(at, static_cast<size_t>(length), kPopulateWrite);
  }
  return PyBool_FromLong(!failed);
}

PyObject* journal_drop(PyObject* self, PyObject* args) {
  int kind, step;
  if (!PyArg_ParseTuple(args, "ii", &kind, &step)) {
    return nullptr;
  }
  if (kind < 0 || kind >= kMostKinds) {
    return PyErr_Format(PyExc_ValueError, "what kind of record?");
  }
  Held held(core_of(self));
  core_of(self).drop(kind, step);
  Py_RETURN_NONE;
}

// Values into the fields of a packed structure that lie behind each other, one letter of `codes` each.
bool put_all(char* at, const char* codes, PyObject* const* values) {
  for (; *codes; ++codes, ++values) {
    if (!put(at, *codes, *values)) {
      return false;
    }
  }
  return true;
}

// push_running(thread, *fields of RUNNING but the spare one)
PyObject* journal_push(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  constexpr Py_ssize_t fields = sizeof layout::kRunningFormat - 1;
  long long thread;
  if (count != fields + 1 || !as_integer(args[0], thread)) {
    return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "a thread, and what it runs");
  }
  layout::Running entry;
  if (!put_all(reinterpret_cast<char*>(&entry), layout::kRunningFormat, args + 1)) {
    return nullptr;
  }
  const Held held(core_of(self));
  core_of(self).push(thread, entry);
  Py_RETURN_NONE;
}

PyObject* journal_pop(PyObject* self, PyObject* thread) {
  long long number;
  if (!as_integer(thread, number)) {
    return nullptr;
  }
  Held held(core_of(self));
  core_of(self).pop(number);
  Py_RETURN_NONE;
}

// move(thread, moved_ns, place)
PyObject* journal_move(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  constexpr Py_ssize_t fields = sizeof layout::kPlaceFormat - 1;
  long long thread, moved;
  if (count != 3 || !as_integer(args[0], thread) || !as_integer(args[1], moved) || !PyTuple_Check(args[2]) ||
      PyTuple_GET_SIZE(args[2]) != fields) {
    return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "a thread, a time and a place");
  }
  layout::Place place;
  place.moved_ns = place.moved_ns_again = moved;
  char* const after_time = reinterpret_cast<char*>(&place) + offsetof(layout::Place, kind);
  if (!put_all(after_time, layout::kPlaceFormat, &PyTuple_GET_ITEM(args[2], 0))) {
    return nullptr;
  }
  PyObject* before = nullptr;
  {
    const Held held(core_of(self));
    const int slot = core_of(self).move(thread, place);
    if (slot >= 0) {
      before = std::exchange(of(self)->places[slot], Py_NewRef(args[2]));
    }
  }
  Py_XDECREF(before); // not under the lock: it may be anybody's
  Py_RETURN_NONE;
}

// place_of(thread): the very object of its last `move`, None for none.
PyObject* journal_place_of(PyObject* self, PyObject* thread) {
  long long number;
  if (!as_integer(thread, number)) {
    return nullptr;
  }
  Held held(core_of(self));
  const Journal& core = core_of(self);
  const int slot = core.known_slot(number);
  if (slot < 0 || !core.place_kinds[slot] || !of(self)->places[slot]) {
    Py_RETURN_NONE;
  }
  return Py_NewRef(of(self)->places[slot]);
}

template <int64_t Journal::*field>
PyObject* number_of(PyObject* self, void*) {
  Held held(core_of(self));
  return PyLong_FromLongLong(core_of(self).*field);
}

// Counts of records by kind.
PyObject* journal_counts(PyObject* self, void*) {
  PyObject* counts = PyList_New(kMostKinds);
  for (int kind = 0; counts && kind < kMostKinds; ++kind) {
    PyList_SET_ITEM(counts, kind, PyLong_FromLongLong(core_of(self).counts[kind]));
  }
  return counts;
}

// (count, first step, last step) of what was dropped, by kind.
PyObject* journal_drops(PyObject* self, void*) {
  PyObject* drops = PyList_New(kMostKinds);
  for (int kind = 0; drops && kind < kMostKinds; ++kind) {
    const layout::Drop drop = core_of(self).drops[kind];
    PyList_SET_ITEM(
        drops, kind, Py_BuildValue("Lii", static_cast<long long>(drop.count), drop.first_step, drop.last_step));
  }
  return drops;
}

PyObject* journal_event(PyObject* self, void*) {
  return Py_NewRef(of(self)->event);
}

template <class F>
PyCFunction fast(F function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef journal_methods[] = {
    {"open", journal_open, METH_VARARGS, "Where everything lies: called once, before anything is written."},
    {"let_go", journal_let_go, METH_NOARGS, "Write nothing any more."},
    {"forget", journal_forget, METH_O, "In a forked child: write elsewhere."},
    {"append", fast(journal_append<false>), METH_FASTCALL, "Write one record."},
    {"append_lasting", fast(journal_append<true>), METH_FASTCALL, "Write one that a ring keeps."},
    {"keep_as_ring", journal_keep_as_ring, METH_NOARGS, "The newest records are what counts."},
    {"end_step", journal_end_step, METH_O, "The newest record is the last of this step."},
    {"keep_steps", journal_keep_steps, METH_O, "Let go of all but the newest so many steps."},
    {"want", journal_want, METH_NOARGS, "Parts are wanted of every step that has ended."},
    {"wrote", journal_wrote, METH_O, "Whether parts up to there hold all that was wanted."},
    {"mark_drained", journal_mark_drained, METH_O, "Parts hold all records up to this one."},
    {"took_not_finite", journal_took_not_finite, METH_NOARGS, "Whether a hook saw such a value."},
    {"map_ahead", journal_map_ahead, METH_NOARGS, "Bring some pages into memory; whether there are more."},
    {"drop", journal_drop, METH_VARARGS, "Count a record that had no room."},
    {"push_running", fast(journal_push), METH_FASTCALL, "Note what a thread is about to run."},
    {"pop_running", journal_pop, METH_O, "The thread has finished what it noted last."},
    {"move", fast(journal_move), METH_FASTCALL, "Note where a thread is."},
    {"place_of", journal_place_of, METH_O, "Where a thread is, by its last move."},
    {"hold", fast(journal_hold), METH_FASTCALL, "Keep a row that will be completed."},
    {"settle", fast(journal_settle), METH_FASTCALL, "Write the complete row in place of a held one."},
    {"release", journal_release, METH_O, "Forget a held row."},
    {"amend", journal_amend, METH_VARARGS, "Write over parts of records."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef journal_fields[] = {
    {"written", number_of<&Journal::written>, nullptr, "The newest record.", nullptr},
    {"limit", number_of<&Journal::limit>, nullptr, "The last that has room.", nullptr},
    {"next_half", number_of<&Journal::next_half>, nullptr, "Fills a half.", nullptr},
    {"drained", number_of<&Journal::drained>, nullptr, "Up to where all lies in parts, or is over.", nullptr},
    {"kept", journal_kept, nullptr, "First and last step that a ring keeps.", nullptr},
    {"ring", journal_ring, nullptr, "What a ring wants, how often it was full, what it let go of.", nullptr},
    {"counts", journal_counts, nullptr, "Records by kind.", nullptr},
    {"drops", journal_drops, nullptr, "What was dropped, by kind.", nullptr},
    {"half_is_full", journal_event, nullptr, "Set when a half is full.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot journal_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(journal_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(journal_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(journal_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(journal_clear)},
    {Py_tp_methods, journal_methods},
    {Py_tp_getset, journal_fields},
    {Py_tp_doc, const_cast<char*>("The mapped journal, for threads with and without the GIL.")},
    {0, nullptr}};

PyType_Spec journal_spec = {
    "gradtrace_native.Journal", sizeof(PyJournal), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, journal_slots};

} // namespace

PyTypeObject* add_journal_types(PyObject* module) {
  event_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&event_spec));
  PyObject* journal_type = PyType_FromSpec(&journal_spec);
  if (!event_type || !journal_type || PyModule_AddObjectRef(module, "Journal", journal_type) < 0) {
    return nullptr;
  }
  return reinterpret_cast<PyTypeObject*>(journal_type);
}

} // namespace gradtrace
