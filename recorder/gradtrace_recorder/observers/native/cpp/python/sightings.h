// What `gradtrace_recorder.state.versions` saw of tensors at calls of modules: a ring of addresses and versions. And whether
// calls of modules still run. Part of observer.cpp; with the GIL.
#pragma once

#include "python/python.h"
#include "autograd/tensors.h"

namespace gradtrace {
namespace {

struct Sighting {
  uint64_t address;
  uint32_t version;
  int64_t number;
  PyObject* how;
  PyObject* where;
};

struct PySightings {
  PyObject_HEAD
  std::vector<Sighting>* ring;
  size_t most, next; // where the next one goes, once the ring is full
  PyObject *tensor_type, *parameter_type;
};

PySightings& sightings_of(PyObject* self) {
  return *reinterpret_cast<PySightings*>(self);
}

// Sightings(most, Tensor, Parameter): of no other classes.
PyObject* sightings_new(PyTypeObject* type, PyObject* args, PyObject*) {
  Py_ssize_t most;
  PyObject *tensor_type, *parameter_type;
  if (!PyArg_ParseTuple(args, "nOO", &most, &tensor_type, &parameter_type)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self) {
    PySightings& own = sightings_of(self);
    own.ring = new std::vector<Sighting>();
    own.most = static_cast<size_t>(most);
    own.tensor_type = Py_NewRef(tensor_type);
    own.parameter_type = Py_NewRef(parameter_type);
  }
  return self;
}

// What was seen where may lead back here: the collector of cycles is told.
int sightings_traverse(PyObject* self, visitproc visit, void* arg) {
  const PySightings& own = sightings_of(self);
  for (size_t i = 0; own.ring && i < own.ring->size(); ++i) {
    Py_VISIT((*own.ring)[i].how);
    Py_VISIT((*own.ring)[i].where);
  }
  Py_VISIT(own.tensor_type);
  Py_VISIT(own.parameter_type);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int sightings_clear(PyObject* self) {
  std::vector<Sighting> all;
  if (sightings_of(self).ring) {
    all.swap(*sightings_of(self).ring);
  }
  for (const Sighting& one : all) {
    Py_DECREF(one.how);
    Py_DECREF(one.where);
  }
  return 0;
}

void sightings_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  PySightings& own = sightings_of(self);
  if (own.ring) {
    sightings_clear(self);
    delete own.ring;
  }
  Py_XDECREF(own.tensor_type);
  Py_XDECREF(own.parameter_type);
  type->tp_free(self);
  Py_DECREF(type);
}

// Whether the tensor has one address and a version, and which: not a wrapper, a sparse one, one of inference mode.
bool address_of(PyObject* object, uint64_t& address, uint32_t& version) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet wrappers({
      DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched, DispatchKey::Batched,
      DispatchKey::Functionalize, DispatchKey::Python});
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->key_set().has_any(wrappers) || impl->layout() != c10::kStrided || !impl->has_storage() ||
      impl->has_symbolic_sizes_strides() || tensor.is_inference()) {
    return false;
  }
  try {
    address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
  } catch (const std::exception&) {
    return false;
  }
  version = impl->version_counter().current_version();
  return true;
}

void see_one(PySightings& own, PyObject* object, int64_t number, PyObject* how, PyObject* where) {
  Sighting seen = {0, 0, number, how, where};
  if (!address_of(object, seen.address, seen.version)) {
    return;
  }
  Py_INCREF(how);
  Py_INCREF(where);
  if (own.ring->size() < own.most) {
    own.ring->push_back(seen);
    return;
  }
  std::swap((*own.ring)[own.next], seen);
  own.next = (own.next + 1) % own.most;
  Py_DECREF(seen.how);
  Py_DECREF(seen.where);
}

// see(number, how, where, tensors): those that are tensors themselves, and those in a short tuple or list among them.
PyObject* sightings_see(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  PySightings& own = sightings_of(self);
  const long long number = count == 4 ? PyLong_AsLongLong(args[0]) : -1;
  if (count != 4 || (number == -1 && PyErr_Occurred())) {
    return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_TypeError, "a number, how, where and tensors");
  }
  constexpr Py_ssize_t kMostInside = 16;
  return guarded([&]() -> PyObject* {
    const auto is_plain_class = [&](PyObject* object) {
      PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
      return type == own.tensor_type || type == own.parameter_type;
    };
    const Owned tensors(PySequence_Fast(args[3], "tensors come in a tuple or list"));
    for (Py_ssize_t i = 0; tensors && i < PySequence_Fast_GET_SIZE(tensors.get()); ++i) {
      PyObject* object = PySequence_Fast_GET_ITEM(tensors.get(), i);
      if (is_plain_class(object)) {
        see_one(own, object, number, args[1], args[2]);
      } else if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) {
        const Py_ssize_t inside = PySequence_Fast_GET_SIZE(object);
        for (Py_ssize_t j = 0; inside <= kMostInside && j < inside; ++j) {
          if (is_plain_class(PySequence_Fast_GET_ITEM(object, j))) {
            see_one(own, PySequence_Fast_GET_ITEM(object, j), number, args[1], args[2]);
          }
        }
      }
    }
    return tensors ? Py_NewRef(Py_None) : nullptr;
  });
}

// __iter__: (address, version, number, how, where), the oldest first.
PyObject* sightings_iter(PyObject* self) {
  const PySightings& own = sightings_of(self);
  const Owned all(PyList_New(0));
  const size_t count = own.ring->size(), first = count < own.most ? 0 : own.next;
  for (size_t i = 0; all && i < count; ++i) {
    const Sighting& one = (*own.ring)[(first + i) % count];
    const Owned entry(Py_BuildValue(
        "(KILOO)", static_cast<unsigned long long>(one.address), one.version, static_cast<long long>(one.number),
        one.how, one.where));
    if (!entry || PyList_Append(all.get(), entry.get()) < 0) {
      return nullptr;
    }
  }
  return all ? PyObject_GetIter(all.get()) : nullptr;
}

PyMethodDef sightings_methods[] = {
    {"see", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(sightings_see)), METH_FASTCALL,
     "Keep what is seen of tensors now."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot sightings_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(sightings_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(sightings_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(sightings_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(sightings_clear)},
    {Py_tp_iter, reinterpret_cast<void*>(sightings_iter)},
    {Py_tp_methods, sightings_methods},
    {Py_tp_doc, const_cast<char*>("What was seen of tensors last.")},
    {0, nullptr}};

PyType_Spec sightings_spec = {
    "gradtrace_native.Sightings", sizeof(PySightings), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    sightings_slots};

// calls_run(count): whether so many frames of `_call_impl` lie on the calling thread's stack.
PyObject* calls_run(PyObject*, PyObject* wanted) {
  static PyObject* const name = PyUnicode_InternFromString("_call_impl");
  long count = PyLong_AsLong(wanted);
  if (count == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && count > 0) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    count -= code->co_name == name;
    Py_DECREF(code);
    PyFrameObject* back = count > 0 ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return PyBool_FromLong(count <= 0);
}

} // namespace
} // namespace gradtrace
