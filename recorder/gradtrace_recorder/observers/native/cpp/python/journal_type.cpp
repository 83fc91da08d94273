// The journal as Python sees it: `Journal`, to be written into, and `Event`, which wakes the drain thread.
#include "python/event_type.h"
#include "python/packing.h"
#include "python/ring_type.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace gradtrace {
namespace {

#pragma pack(push, 1)
struct PlaceEntry {
  int64_t moved_ns;
  uint32_t kind, name;
  int32_t root, call_index, step, microbatch, backward_index, spare;
  int64_t moved_ns_again;
};
#pragma pack(pop)

constexpr int64_t kMostRecordBytes = 2048;

// Whether the layout is the one that is compiled in here, as far as that shows.
bool is_known(const Layout& l) {
  return l.thread_slots <= kMostSlots && l.drop_bytes == sizeof(Journal::Drop) &&
      l.place_bytes == sizeof(PlaceEntry) &&
      l.thread_bytes == l.thread_head + l.thread_depth * static_cast<int64_t>(sizeof(RunningEntry)) &&
      l.record_bytes >= 64 && l.record_bytes <= kMostRecordBytes && l.record_bytes % 8 == 0 && l.records_offset % 8 == 0;
}

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
  of(self)->formats = new std::vector<std::string>(kMostKinds);
  core_of(self).half_is_full = *reinterpret_cast<PyEvent*>(of(self)->event)->event;
  return self;
}

void journal_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyJournal* journal = of(self);
  if (journal->core) {
    Journal& core = core_of(self);
    for (PyObject*& place : core.place_objects) {
      Py_CLEAR(place);
    }
    core.limit = -1;
    core.map = nullptr;
    if (journal->view.obj) {
      PyBuffer_Release(&journal->view);
    }
    delete journal->core;
    delete journal->formats;
  }
  Py_XDECREF(journal->event);
  type->tp_free(self);
  Py_DECREF(type);
}

// open(map, layout: dict, formats: dict of kind to codes, summary_bytes)
PyObject* journal_open(PyObject* self, PyObject* args) {
  PyObject *map, *layout, *formats;
  int summary_bytes;
  if (!PyArg_ParseTuple(args, "OO!O!i", &map, &PyDict_Type, &layout, &PyDict_Type, &formats, &summary_bytes)) {
    return nullptr;
  }
  Journal& core = core_of(self);
  Layout& l = core.layout;
  const struct {
    const char* name;
    int64_t* place;
  } fields[] = {
      {"records_offset", &l.records_offset}, {"record_bytes", &l.record_bytes},
      {"running_offset", &l.running_offset}, {"thread_bytes", &l.thread_bytes},
      {"thread_head", &l.thread_head},       {"places_offset", &l.places_offset},
      {"place_bytes", &l.place_bytes},       {"drops_offset", &l.drops_offset},
      {"drop_bytes", &l.drop_bytes},         {"dropped_offset", &l.dropped_offset},
      {"thread_slots", &l.thread_slots},     {"thread_depth", &l.thread_depth},
      {"first_inside", &l.first_inside},     {"last_inside", &l.last_inside},
      {"half_records", &core.half_records},   {"drained_offset", &l.drained_offset},
  };
  for (const auto& field : fields) {
    PyObject* value = PyDict_GetItemString(layout, field.name);
    if (!value) {
      PyErr_SetString(PyExc_KeyError, field.name);
      return nullptr;
    }
    *field.place = PyLong_AsLongLong(value);
  }
  if (PyErr_Occurred()) {
    return nullptr;
  }
  if (!is_known(l)) {
    PyErr_SetString(PyExc_ValueError, "a layout of the journal that this library does not know");
    return nullptr;
  }
  PyObject *kind, *codes;
  for (Py_ssize_t at = 0; PyDict_Next(formats, &at, &kind, &codes);) {
    const long number = PyLong_AsLong(kind);
    const char* text = PyUnicode_AsUTF8(codes);
    if (!text || number < 0 || number >= kMostKinds || bytes_of(text, summary_bytes) > l.record_bytes - 16) {
      return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "kind %ld", number);
    }
    (*of(self)->formats)[number] = text;
  }
  if (PyObject_GetBuffer(map, &of(self)->view, PyBUF_WRITABLE) < 0) {
    return nullptr;
  }
  of(self)->summary_bytes = summary_bytes;
  core.map = static_cast<char*>(of(self)->view.buf);
  core.places = 2 * core.half_records;
  Py_RETURN_NONE;
}

// Nothing is written any more, and the map is let go of.
PyObject* journal_let_go(PyObject* self, PyObject*) {
  Held held(core_of(self));
  core_of(self).limit = -1;
  core_of(self).map = nullptr;
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
  core_of(self).forget(static_cast<char*>(view.buf));
  if (of(self)->view.obj) {
    PyBuffer_Release(&of(self)->view);
  }
  of(self)->view = view;
  Py_RETURN_NONE;
}

// append(kind, step, *values): the same as `JournalWriter.append`, or `append_lasting`.
template <bool is_lasting>
PyObject* journal_append(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Journal& core = core_of(self);
  long long kind;
  if (count < 2 || !as_integer(args[0], kind) || kind < 0 || kind >= kMostKinds) {
    return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "what kind of record?");
  }
  const std::string& codes = (*of(self)->formats)[kind];
  if (static_cast<Py_ssize_t>(codes.size()) != count) {
    return PyErr_Format(PyExc_ValueError, "a record of kind %lld has %zu values", kind, codes.size());
  }
  alignas(8) char record[kMostRecordBytes];
  char* at = record + 8;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!put(at, codes[i], args[i], of(self)->summary_bytes)) {
      return nullptr;
    }
  }
  std::memset(at, 0, record + core.layout.record_bytes - at);
  int32_t step;
  std::memcpy(&step, record + 10, 4);
  return on_ring(self, [&](Journal& journal) {
    if constexpr (is_lasting) {
      journal.append_lasting(static_cast<int>(kind), step, record);
    } else {
      journal.append(static_cast<int>(kind), step, record);
    }
    return Py_NewRef(Py_None);
  });
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
    core.mapped = std::max(core.mapped, std::min(core.written, core.places) * core.layout.record_bytes / kAtOnce * kAtOnce);
    length = std::min(kAtOnce, core.places * core.layout.record_bytes - core.mapped);
    if (core.limit < 0 || length <= 0) {
      Py_RETURN_FALSE;
    }
    at = core.map + core.layout.records_offset + core.mapped;
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
  Held held(core_of(self));
  core_of(self).drop(kind, step);
  Py_RETURN_NONE;
}

PyObject* journal_push(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  long long thread;
  if (count != 14 || !as_integer(args[0], thread)) {
    return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "a thread, and what it runs");
  }
  RunningEntry entry = {};
  char* at = reinterpret_cast<char*>(&entry);
  static const char codes[] = "IIiiiiiiIIqqi";
  for (Py_ssize_t i = 1; i < count; ++i) {
    if (!put(at, codes[i - 1], args[i], 0)) {
      return nullptr;
    }
  }
  Held held(core_of(self));
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
  Journal& core = core_of(self);
  long long thread, moved;
  if (count != 3 || !as_integer(args[0], thread) || !as_integer(args[1], moved) || !PyTuple_Check(args[2]) ||
      PyTuple_GET_SIZE(args[2]) != kPlaceFields) {
    return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "a thread, a time and a place");
  }
  PlaceEntry entry = {};
  entry.moved_ns = entry.moved_ns_again = moved;
  char* at = reinterpret_cast<char*>(&entry.kind);
  static const char codes[] = "IIiiiii";
  for (int i = 0; i < kPlaceFields; ++i) {
    if (!put(at, codes[i], PyTuple_GET_ITEM(args[2], i), 0)) {
      return nullptr;
    }
  }
  PyObject* before = nullptr;
  {
    Held held(core);
    if (core.limit >= 0) {
      const int slot = core.slot_of(thread);
      if (slot >= 0) {
        // First and last the time: a place of which they differ was being written.
        char* to = core.map + core.layout.places_offset + slot * core.layout.place_bytes;
        std::memcpy(to, &entry.moved_ns, 8);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        std::memcpy(to + 8, &entry.kind, sizeof entry - 16);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        std::memcpy(to + sizeof entry - 8, &entry.moved_ns_again, 8);
        core.place_kinds[slot] = entry.kind;
        before = core.place_objects[slot];
        core.place_objects[slot] = Py_NewRef(args[2]);
      }
    }
  }
  Py_XDECREF(before);
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
  if (slot < 0 || !core.place_kinds[slot] || !core.place_objects[slot]) {
    Py_RETURN_NONE;
  }
  return Py_NewRef(core.place_objects[slot]);
}

PyObject* journal_enter(PyObject* self, PyObject*) {
  Held::take(core_of(self));
  return Py_NewRef(self);
}

PyObject* journal_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  core_of(self).lock.unlock();
  Py_RETURN_NONE;
}

template <int64_t Journal::*field>
PyObject* number_of(PyObject* self, void*) {
  Held held(core_of(self));
  return PyLong_FromLongLong(core_of(self).*field);
}

template <int64_t Journal::*field>
int set_number(PyObject* self, PyObject* value, void*) {
  long long number;
  if (!value || !as_integer(value, number)) {
    return -1;
  }
  Held held(core_of(self));
  core_of(self).*field = number;
  return 0;
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
    const Journal::Drop& drop = core_of(self).drops[kind];
    PyList_SET_ITEM(
        drops, kind, Py_BuildValue("Lii", static_cast<long long>(drop.count), drop.first, drop.last));
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
    {"__enter__", journal_enter, METH_NOARGS, "Take the lock."},
    {"__exit__", fast(journal_exit), METH_FASTCALL, "Give the lock back."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef journal_fields[] = {
    {"written", number_of<&Journal::written>, set_number<&Journal::written>, "The newest record.", nullptr},
    {"limit", number_of<&Journal::limit>, set_number<&Journal::limit>, "The last that has room.", nullptr},
    {"next_half", number_of<&Journal::next_half>, set_number<&Journal::next_half>, "Fills a half.", nullptr},
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
    {Py_tp_methods, journal_methods},
    {Py_tp_getset, journal_fields},
    {Py_tp_doc, const_cast<char*>("The mapped journal, for threads with and without the GIL.")},
    {0, nullptr}};

PyType_Spec journal_spec = {
    "gradtrace_native.Journal", sizeof(PyJournal), 0, Py_TPFLAGS_DEFAULT, journal_slots};

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
