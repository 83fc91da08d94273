// `Pass` as Python sees it: one backward pass under watch. Part of observer.cpp.
#pragma once

#include "python/attaching.h"

namespace gradtrace {
namespace {

struct PySettings {
  PyObject_HEAD
  std::shared_ptr<Settings>* settings;
};

PyTypeObject* settings_type = nullptr;

struct LetGo {
  void operator()(Pass* pass) const {
    pass->let_go();
  }
};

// Pass(settings, step, microbatch, backward_index, phase, stage_index)
PyObject* pass_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* settings;
  int step, microbatch, backward_index, stage_index;
  unsigned int phase;
  layout::Running about;
  if (!PyArg_ParseTuple(
          args, "O!iiiIi", settings_type, &settings, &step, &microbatch, &backward_index, &phase, &stage_index)) {
    return nullptr;
  }
  about.step = step;
  about.microbatch = microbatch;
  about.backward_index = backward_index;
  about.phase = phase;
  about.stage_index = stage_index;
  return guarded([&]() -> PyObject* {
    if (!reinterpret_cast<PySettings*>(settings)->settings) {
      throw std::logic_error("settings that the collector has cleared");
    }
    std::unique_ptr<Pass, LetGo> pass(new Pass(*reinterpret_cast<PySettings*>(settings)->settings, about));
    PyObject* self = type->tp_alloc(type, 0);
    if (self) {
      reinterpret_cast<PyPass*>(self)->own = new Attached();
      of(self).pass = pass.release();
    }
    return self;
  });
}

// The calls whose Nodes are watched. They go when the pass is over, so there is nothing to clear.
int pass_traverse(PyObject* self, visitproc visit, void* arg) {
  const Attached* own = reinterpret_cast<PyPass*>(self)->own;
  for (size_t i = 0; own && own->buffers && i < own->buffers->frames.size(); ++i) {
    Py_VISIT(own->buffers->frames[i]);
  }
  Py_VISIT(Py_TYPE(self));
  return 0;
}

void pass_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (reinterpret_cast<PyPass*>(self)->own) {
    // Hooks that are still on a Node hold the pass, which is closed: they do nothing.
    of(self).pass->is_open.store(false);
    end(of(self));
    of(self).pass->let_go();
    delete reinterpret_cast<PyPass*>(self)->own;
  }
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* sizes_of(const NodeState& state) {
  PyObject* all = PyList_New(0);
  const CameIn none, &came_in = state.came_in ? *state.came_in : none;
  for (size_t at = 0; all && at < came_in.size();) {
    const int64_t count = came_in[at++];
    PyObject* entry = nullptr;
    if (count == -1) {
      entry = Py_NewRef(Py_None);
    } else {
      const auto type = static_cast<at::ScalarType>(came_in[at++]);
      if (count == -2) {
        entry = Py_NewRef(Py_None);
      } else {
        PyObject* sizes = PyTuple_New(count);
        for (int64_t d = 0; sizes && d < count; ++d) {
          PyTuple_SET_ITEM(sizes, d, PyLong_FromLongLong(came_in[at++]));
        }
        entry = sizes ? Py_BuildValue("(ON)", reinterpret_cast<PyObject*>(torch::getTHPDtype(type)), sizes) : nullptr;
      }
    }
    if (!entry || PyList_Append(all, entry) < 0) {
      Py_CLEAR(all);
    }
    Py_XDECREF(entry);
  }
  return all;
}

// Nanoseconds that the hooks took.
long long own_ns(const Pass& pass) {
  const BothClocks both = both_clocks();
  const double elapsed_ticks = static_cast<double>(both.ticks - pass.began.ticks);
  const double elapsed_ns = static_cast<double>(both.ns - pass.began.ns);
  const double own = static_cast<double>(pass.own_ticks());
  return elapsed_ticks > 0 ? std::llround(own * elapsed_ns / elapsed_ticks) : 0;
}

// close() -> ([(index, name, number or None, frame or None, occurrence, parameter, start, thread, is making, came in)] of
// the Nodes that have begun and not ended, what the hooks took in nanoseconds, how many gradients a hook saw before ours,
// what went wrong or None). No hook does anything from here on.
PyObject* pass_close(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    Pass& pass = *of(self).pass;
    pass.is_open.store(false);
    pass.gradients.forget();
    const Owned running(PyList_New(0));
    for (size_t i = 0; running && i < pass.state_count; ++i) {
      const NodeState& state = pass.state(i);
      const int32_t index = state.index.load();
      if (index < 0) {
        continue;
      }
      const Owned entry(Py_BuildValue(
          "(iILOIILLON)", index, state.name, static_cast<long long>(state.number),
          state.frame ? state.frame : Py_None, state.occurrence, state.parameter_fqn,
          static_cast<long long>(state.start), static_cast<long long>(state.thread),
          state.maker && state.maker->is_making ? Py_True : Py_False, sizes_of(state)));
      if (!entry || PyList_Append(running.get(), entry.get()) < 0) {
        return nullptr;
      }
    }
    const std::string error = pass.error();
    Owned text(Py_NewRef(Py_None));
    if (!error.empty()) {
      text = Owned(PyUnicode_DecodeUTF8(error.data(), error.size(), "replace"));
    }
    const long long late = pass.late_hooks.load();
    return running && text ? Py_BuildValue("(OLLO)", running.get(), own_ns(pass), late, text.get()) : nullptr;
  });
}

// ended() -> the numbers of the Nodes that have run.
PyObject* pass_ended(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const Pass& pass = *of(self).pass;
    PyObject* numbers = PyList_New(0);
    for (size_t i = 0; numbers && i < pass.state_count; ++i) {
      if (pass.state(i).has_ended) {
        const Owned number(PyLong_FromLongLong(pass.state(i).number));
        if (!number || PyList_Append(numbers, number.get()) < 0) {
          Py_CLEAR(numbers);
        }
      }
    }
    return numbers;
  });
}

// release(open, own) -> whether the hooks have left their Nodes: not while another pass than these runs.
PyObject* pass_release(PyObject* self, PyObject* args) {
  PyObject *open, *own_numbers;
  if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &open, &PyTuple_Type, &own_numbers)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    if (!of(self).buffers) {
      Py_RETURN_TRUE;
    }
    if (!are_all_among(open, own_numbers)) {
      Py_RETURN_FALSE;
    }
    take_off(of(self));
    end(of(self));
    Py_RETURN_TRUE;
  });
}

PyObject* pass_next(PyObject* self) {
  return PyLong_FromLong(of(self).pass->next_index.fetch_add(1));
}

PyObject* pass_task(PyObject* self, void*) {
  const int task = of(self).pass->task.load();
  if (task == -1) {
    Py_RETURN_NONE;
  }
  return PyLong_FromLong(task);
}

int set_pass_task(PyObject* self, PyObject* value, void*) {
  const long task = value == Py_None ? -1 : PyLong_AsLong(value);
  if (task == -1 && PyErr_Occurred()) {
    return -1;
  }
  of(self).pass->task.store(static_cast<int>(task));
  return 0;
}

PyMethodDef pass_methods[] = {
    {"walk", pass_walk, METH_VARARGS, "Find every Node that can be reached from the roots."},
    {"is_apart_from", pass_is_apart_from, METH_O, "Whether none of them is the one that another pass runs."},
    {"attach", pass_attach, METH_VARARGS, "Name the Nodes that walk found."},
    {"attach_leaves", pass_attach_leaves, METH_VARARGS, "Name every AccumulateGrad that walk found, as far as it can."},
    {"attach_leaf", pass_attach_leaf, METH_VARARGS, "Name an AccumulateGrad that walk found."},
    {"put_on", pass_put_on, METH_VARARGS, "Hook what has names."},
    {"leaf", pass_leaf, METH_O, "An AccumulateGrad that walk found."},
    {"close", pass_close, METH_NOARGS, "Record no more; what is running, and what the hooks took and missed."},
    {"ended", pass_ended, METH_NOARGS, "What has run."},
    {"release", pass_release, METH_VARARGS, "Take the hooks off."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef pass_fields[] = {
    {"task", pass_task, set_pass_task, "The engine's task, once a Node ran.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot pass_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(pass_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(pass_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(pass_traverse)},
    {Py_tp_methods, pass_methods},
    {Py_tp_getset, pass_fields},
    {Py_tp_iternext, reinterpret_cast<void*>(pass_next)},
    {Py_tp_doc, const_cast<char*>("One backward pass under watch. Its next is the next event_index.")},
    {0, nullptr}};

PyType_Spec pass_spec = {"gradtrace_native.Pass", sizeof(PyPass), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, pass_slots};

} // namespace
} // namespace gradtrace
