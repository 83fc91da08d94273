// The library's face in Python: `Settings`, `Pass` (pass_type.h), `Sightings` (sightings.h) and summaries.
#include "python/journal_object.h"
#include "python/pass_type.h"
#include "python/sightings.h"

namespace gradtrace {
namespace {

PyTypeObject* journal_type = nullptr;
PyTypeObject* pass_type = nullptr;

// A record of Python's, which is one of that kind.
bool record_of(PyObject* bytes, uint16_t kind, Record& record) {
  uint16_t number = 0;
  if (PyBytes_Check(bytes) && PyBytes_GET_SIZE(bytes) == static_cast<Py_ssize_t>(record.size())) {
    std::memcpy(record.data(), PyBytes_AS_STRING(bytes), record.size());
    number = row_in<layout::NodeEvents>(record.data()).record_kind;
  }
  if (number != kind) {
    PyErr_Format(PyExc_ValueError, "a record of kind %d is %zu bytes that say so", static_cast<int>(kind), record.size());
  }
  return number == kind;
}

// Settings(journal, zero_ns, records of a Node, a tensor and a gradient, summary: str, names: tuple of 6,
// foreign, (begins, ends))
PyObject* settings_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *journal, *node, *tensor, *gradient, *names, *foreign, *begins, *ends;
  long long zero_ns;
  const char* summary;
  if (!PyArg_ParseTuple(
          args, "O!L(OOO)sO!O(OO)", journal_type, &journal, &zero_ns, &node, &tensor, &gradient, &summary,
          &PyTuple_Type, &names, &foreign, &begins, &ends)) {
    return nullptr;
  }
  auto settings = std::make_shared<Settings>();
  settings->journal = *reinterpret_cast<PyJournal*>(journal)->core;
  settings->zero_ns = zero_ns;
  if (!record_of(node, layout::kKindNodeEvents, settings->node) ||
      !record_of(tensor, layout::kKindNodeTensors, settings->tensor) ||
      !record_of(gradient, layout::kKindGradients, settings->gradient)) {
    return nullptr;
  }
  settings->is_off = std::strcmp(summary, "off") == 0;
  settings->is_whole = std::strcmp(summary, "full") == 0;
  unsigned int numbers[6];
  if (!PyArg_ParseTuple(
          names, "IIIIII", &numbers[0], &numbers[1], &numbers[2], &numbers[3], &numbers[4], &numbers[5])) {
    return nullptr;
  }
  std::copy(numbers, numbers + 4, settings->dtypes);
  settings->incoming = numbers[4];
  settings->outgoing = numbers[5];
  settings->foreign = Py_NewRef(foreign);
  settings->begins = Py_NewRef(begins);
  settings->ends = Py_NewRef(ends);
  PyObject* self = type->tp_alloc(type, 0);
  if (self) {
    reinterpret_cast<PySettings*>(self)->settings = new std::shared_ptr<Settings>(std::move(settings));
  }
  return self;
}

// Of what passes share, where no pass has it too: then nothing can change or drop it meanwhile.
int settings_traverse(PyObject* self, visitproc visit, void* arg) {
  const auto* shared = reinterpret_cast<PySettings*>(self)->settings;
  if (shared && shared->use_count() == 1) {
    const Settings& own = **shared;
    Py_VISIT(own.foreign);
    Py_VISIT(own.begins);
    Py_VISIT(own.ends);
    for (const auto& [named, names] : own.leaves) {
      Py_VISIT(names.named);
      Py_VISIT(names.frame);
    }
    for (const auto& [variable, place] : own.leaf_places) {
      Py_VISIT(place.module);
      Py_VISIT(place.own);
    }
  }
  Py_VISIT(Py_TYPE(self));
  return 0;
}

// No pass can begin with it any more.
int settings_clear(PyObject* self) {
  auto*& shared = reinterpret_cast<PySettings*>(self)->settings;
  delete std::exchange(shared, nullptr);
  return 0;
}

void settings_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  settings_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot settings_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(settings_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(settings_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(settings_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(settings_clear)},
    {Py_tp_doc, const_cast<char*>("What all passes of a recording share.")},
    {0, nullptr}};

PyType_Spec settings_spec = {
    "gradtrace_native.Settings", sizeof(PySettings), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, settings_slots};

// Elements that are summarised without letting go of the GIL: some 20 microseconds.
constexpr int64_t kMostUnderLock = 65536;

PyObject* tuple_of(const Numbers& numbers) {
  Owned lanes(PyTuple_New(kLanes));
  for (int lane = 0; lanes && lane < kLanes; ++lane) {
    PyObject* value = PyFloat_FromDouble(narrowed(numbers.lanes[lane]));
    if (!value) {
      return nullptr;
    }
    PyTuple_SET_ITEM(lanes.get(), lane, value);
  }
  return lanes ? Py_BuildValue(
                     "(dddLLLO)", std::sqrt(numbers.square), numbers.abs_max, numbers.sum,
                     static_cast<long long>(numbers.nans), static_cast<long long>(numbers.infs),
                     static_cast<long long>(numbers.fingerprint), lanes.get())
               : nullptr;
}

// A tensor, and where it lies if it is a plain one: null data where it is no such tensor.
struct Plain {
  Kind kind = Kind::f32;
  const void* data = nullptr;
  at::Tensor tensor;

  explicit Plain(PyObject* object) : tensor(THPVariable_Unpack(object)) {
    data = readable(tensor, kind);
  }
};

// summary(tensor, whole) -> (norm, abs_max, sum, nan_count, inf_count, fingerprint, lanes), None for another tensor
// than a plain one of a floating dtype in this process's memory.
PyObject* summary(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !THPVariable_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "a tensor, and whether fingerprint and sketch are wanted");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const Plain plain(args[0]);
    if (!plain.data) {
      Py_RETURN_NONE;
    }
    const bool whole = args[1] == Py_True;
    Numbers numbers;
    {
      const Unlocked unlocked(plain.tensor.numel() >= kMostUnderLock);
      numbers = numbers_of(plain.tensor, plain.kind, plain.data, whole);
    }
    return tuple_of(numbers);
  });
}

// summaries(tensors, whole) -> a list of what `summary` gives for each, None for what is no tensor.
PyObject* summaries(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "a list of tensors, and whether fingerprints and sketches are wanted");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const bool whole = args[1] == Py_True;
    const Py_ssize_t length = PyList_GET_SIZE(args[0]);
    std::vector<Plain> plain;
    int64_t elements = 0;
    plain.reserve(length);
    for (Py_ssize_t i = 0; i < length; ++i) {
      PyObject* object = PyList_GET_ITEM(args[0], i);
      if (!THPVariable_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a list of tensors");
        return nullptr;
      }
      plain.emplace_back(object);
      elements += plain.back().data ? plain.back().tensor.numel() : 0;
    }
    std::vector<Numbers> numbers(length);
    {
      const Unlocked unlocked(elements >= kMostUnderLock);
      for (Py_ssize_t i = 0; i < length; ++i) {
        if (plain[i].data) {
          numbers[i] = numbers_of(plain[i].tensor, plain[i].kind, plain[i].data, whole);
        }
      }
    }
    Owned made(PyList_New(length));
    for (Py_ssize_t i = 0; made && i < length; ++i) {
      PyObject* one = plain[i].data ? tuple_of(numbers[i]) : Py_NewRef(Py_None);
      if (!one) {
        return nullptr;
      }
      PyList_SET_ITEM(made.get(), i, one);
    }
    return made ? Py_NewRef(made.get()) : nullptr;
  });
}

// scalar(tensor) -> its only value, None for another tensor than a plain one that has one of a floating dtype.
PyObject* scalar(PyObject*, PyObject* object) {
  if (!THPVariable_Check(object)) {
    Py_RETURN_NONE;
  }
  return guarded([&]() -> PyObject* {
    const Plain plain(object);
    if (!plain.data || plain.tensor.numel() != 1) {
      Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(value_of(plain.kind, plain.data));
  });
}

struct MovesIncoming : torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list& incoming) override {
    return handed_back(incoming);
  }
};

struct MovesOutgoing : torch::autograd::FunctionPostHook {
  variable_list operator()(const variable_list& outgoing, const variable_list&) override {
    return handed_back(outgoing);
  }
};

// move_lists(node): hooks that hand back what they get as ours do, and do nothing else. `build.py` tries them.
PyObject* move_lists(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const NodePtr node = pointer_to(object);
    if (!node) {
      return PyErr_Format(PyExc_TypeError, "no Node");
    }
    node->add_pre_hook(std::make_unique<MovesIncoming>());
    node->add_post_hook(std::make_unique<MovesOutgoing>());
    Py_RETURN_NONE;
  });
}

// traits(node) -> (is defined in Python, accumulates a gradient, others have hooks on it, how many hooks of ours are).
// `build.py` tries them: they rest on names of types that torch does not export.
PyObject* traits(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const NodePtr node = pointer_to(object);
    if (!node) {
      return PyErr_Format(PyExc_TypeError, "no Node");
    }
    const Node& of = *node;
    const bool is_one = is_leaf(of);
    const auto ours = std::count_if(of.post_hooks().begin(), of.post_hooks().end(), [](const auto& hook) {
      return dynamic_cast<const OursAfter*>(hook.get()) != nullptr;
    });
    return Py_BuildValue(
        "(NNNn)", PyBool_FromLong(is_python_node(typeid(of))), PyBool_FromLong(is_one),
        PyBool_FromLong(is_one && has_hooks(static_cast<const AccumulateGrad&>(of))), static_cast<Py_ssize_t>(ours));
  });
}

PyObject* set_vectors(PyObject*, PyObject* wanted) {
  const long most = PyLong_AsLong(wanted);
  return most == -1 && PyErr_Occurred() ? nullptr : PyLong_FromLong(use_vectors(static_cast<int>(most)));
}

PyMethodDef functions[] = {
    {"summary", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(summary)), METH_FASTCALL,
     "The summary of a plain tensor."},
    {"summaries", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(summaries)), METH_FASTCALL,
     "The summaries of a list of tensors."},
    {"scalar", scalar, METH_O, "The value of a plain tensor of one element."},
    {"calls_run", calls_run, METH_O, "Whether so many calls of modules run on this thread."},
    {"move_lists", move_lists, METH_O, "Hooks that hand back what they get."},
    {"traits", traits, METH_O, "What the library makes out of a Node."},
    {"use_vectors", set_vectors, METH_O, "Use no wider vectors: 0 none, 1 AVX2, 2 AVX-512; what is used."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "gradtrace_native", "The observer in C++.", -1, functions,
    nullptr, nullptr, nullptr, nullptr};

} // namespace
} // namespace gradtrace

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_gradtrace_native() {
  using namespace gradtrace;
  PyObject* module = PyModule_Create(&definition);
  if (!module) {
    return nullptr;
  }
  journal_type = add_journal_types(module);
  settings_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&settings_spec));
  pass_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&pass_spec));
  if (!journal_type || !settings_type || !pass_type ||
      PyModule_AddObjectRef(module, "Settings", reinterpret_cast<PyObject*>(settings_type)) < 0 ||
      PyModule_AddObjectRef(module, "Pass", reinterpret_cast<PyObject*>(pass_type)) < 0 ||
      PyModule_AddStringConstant(module, "layouts", layout::kDigest) < 0 ||
      PyModule_AddObject(module, "Sightings", PyType_FromSpec(&sightings_spec)) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
