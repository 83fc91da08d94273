// The library's face in Python: `Settings`, `Pass` (the walk, and the hooks on a graph's Nodes) and `summary`.
#include "graph.h"

namespace gradtrace {
namespace {

struct PySettings {
  PyObject_HEAD
  std::shared_ptr<Settings>* settings;
};

struct PyPass {
  PyObject_HEAD
  Attached* own;
};

PyTypeObject* journal_type = nullptr;
PyTypeObject* settings_type = nullptr;
PyTypeObject* pass_type = nullptr;

Attached& of(PyObject* self) {
  return *reinterpret_cast<PyPass*>(self)->own;
}

// Settings(journal, zero_ns, kinds, fields: dict, summary: str, names: tuple of 6, foreign)
PyObject* settings_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *journal, *fields, *names, *foreign;
  long long zero_ns;
  int node_kind, tensor_kind, gradient_kind;
  const char* summary;
  if (!PyArg_ParseTuple(
          args, "O!L(iii)O!sO!O", journal_type, &journal, &zero_ns, &node_kind, &tensor_kind, &gradient_kind,
          &PyDict_Type, &fields, &summary, &PyTuple_Type, &names, &foreign)) {
    return nullptr;
  }
  auto settings = std::make_shared<Settings>();
  settings->journal = *reinterpret_cast<PyJournal*>(journal)->core;
  settings->zero_ns = zero_ns;
  settings->node_kind = node_kind;
  settings->tensor_kind = tensor_kind;
  settings->gradient_kind = gradient_kind;
  settings->is_off = std::strcmp(summary, "off") == 0;
  settings->is_whole = std::strcmp(summary, "full") == 0;
  Fields& f = settings->fields;
  const struct {
    const char* name;
    int64_t* place;
  } wanted[] = {
      {"event_index", &f.event_index},
      {"autograd_seq", &f.autograd_seq},
      {"node_name", &f.node_name},
      {"root", &f.root},
      {"module_fqn", &f.module_fqn},
      {"call_index", &f.call_index},
      {"occurrence", &f.occurrence},
      {"parameter_fqn", &f.parameter_fqn},
      {"thread", &f.thread},
      {"start_ns", &f.start_ns},
      {"end_ns", &f.end_ns},
      {"grad_output_count", &f.grad_output_count},
      {"grad_input_count", &f.grad_input_count},
      {"grad_output_summary", &f.grad_output_summary},
      {"grad_input_summary", &f.grad_input_summary},
      {"node_tensors.event_index", &f.tensor_event_index},
      {"node_tensors.direction", &f.tensor_direction},
      {"node_tensors.position", &f.tensor_position},
      {"node_tensors.shape", &f.tensor_shape},
      {"node_tensors.summary", &f.tensor_summary},
      {"gradients.root", &f.gradient_root},
      {"gradients.parameter_fqn", &f.gradient_parameter_fqn},
      {"gradients.shape", &f.gradient_shape},
      {"gradients.summary", &f.gradient_summary},
  };
  for (const auto& field : wanted) {
    PyObject* offset = PyDict_GetItemString(fields, field.name);
    if (!offset) {
      PyErr_SetString(PyExc_KeyError, field.name);
      return nullptr;
    }
    *field.place = PyLong_AsLongLong(offset);
  }
  unsigned int numbers[6];
  if (!PyArg_ParseTuple(
          names, "IIIIII", &numbers[0], &numbers[1], &numbers[2], &numbers[3], &numbers[4], &numbers[5])) {
    return nullptr;
  }
  std::copy(numbers, numbers + 4, settings->dtypes);
  settings->incoming = numbers[4];
  settings->outgoing = numbers[5];
  settings->foreign = Py_NewRef(foreign);
  PyObject* self = type->tp_alloc(type, 0);
  if (self) {
    reinterpret_cast<PySettings*>(self)->settings = new std::shared_ptr<Settings>(std::move(settings));
  }
  return self;
}

void settings_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PySettings*>(self)->settings;
  type->tp_free(self);
  Py_DECREF(type);
}

bool template_of(PyObject* bytes, std::vector<char>& record) {
  if (bytes == Py_None) {
    return true;
  }
  if (!PyBytes_Check(bytes) || PyBytes_GET_SIZE(bytes) > 2048) {
    PyErr_SetString(PyExc_ValueError, "a record is bytes");
    return false;
  }
  record.assign(PyBytes_AS_STRING(bytes), PyBytes_AS_STRING(bytes) + PyBytes_GET_SIZE(bytes));
  return true;
}

// Pass(settings, node record, tensor record, gradient record, step, microbatch, backward_index, phase, stage_index)
PyObject* pass_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *settings, *node, *tensor, *gradient;
  int step, microbatch, backward_index, stage_index;
  unsigned int phase;
  if (!PyArg_ParseTuple(
          args, "O!OOOiiiIi", settings_type, &settings, &node, &tensor, &gradient, &step, &microbatch,
          &backward_index, &phase, &stage_index)) {
    return nullptr;
  }
  auto pass = std::make_shared<Pass>();
  pass->settings = *reinterpret_cast<PySettings*>(settings)->settings;
  if (!template_of(node, pass->node_record) || !template_of(tensor, pass->tensor_record) ||
      !template_of(gradient, pass->gradient_record)) {
    return nullptr;
  }
  pass->running.step = step;
  pass->running.microbatch = microbatch;
  pass->running.backward_index = backward_index;
  pass->running.phase = phase;
  pass->running.stage_index = stage_index;
  PyObject* self = type->tp_alloc(type, 0);
  if (self) {
    reinterpret_cast<PyPass*>(self)->own = new Attached();
    of(self).pass = std::move(pass);
  }
  return self;
}

void pass_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  if (reinterpret_cast<PyPass*>(self)->own) {
    // Hooks that are still on a Node hold the pass, which is closed: they do nothing.
    of(self).pass->is_open.store(false);
    let_go_of_frames(of(self));
    delete reinterpret_cast<PyPass*>(self)->own;
  }
  type->tp_free(self);
  Py_DECREF(type);
}

// walk(roots, beyond) -> count of Nodes. `beyond` is a set of numbers of Nodes that will not run, unless they are roots:
// the walk ends there. None for none.
PyObject* pass_walk(PyObject* self, PyObject* args) {
  PyObject *roots, *beyond;
  if (!PyArg_ParseTuple(args, "OO", &roots, &beyond)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    Seen seen;
    struct Waiting {
      Node* node;
      uint64_t used_by;
    };
    std::vector<Waiting> waiting;
    PyObject* sequence = PySequence_Fast(roots, "the roots are a sequence");
    if (!sequence) {
      return nullptr;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
      const NodePtr node = pointer_to(PySequence_Fast_GET_ITEM(sequence, i));
      if (node && seen.insert(node.get())) {
        waiting.push_back({node.get(), 0});
      }
    }
    Py_DECREF(sequence);
    std::vector<Node*> first;
    for (const Waiting& root : waiting) {
      first.push_back(root.node);
    }
    while (!waiting.empty()) {
      const Waiting next = waiting.back();
      waiting.pop_back();
      const uint64_t number = next.node->sequence_nr();
      if (beyond != Py_None && std::find(first.begin(), first.end(), next.node) == first.end()) {
        const Owned key(PyLong_FromUnsignedLongLong(number));
        const int is_beyond = key ? PySet_Contains(beyond, key.get()) : -1;
        if (is_beyond < 0) {
          return nullptr;
        }
        if (is_beyond) {
          continue;
        }
      }
      if (number == kNoSequenceNumber && is_leaf(*next.node)) {
        own.leaves.push_back({number, next.node});
        own.used_by.push_back(next.used_by);
        continue;
      }
      own.nodes.push_back({number, next.node});
      for (const auto& edge : next.node->next_edges()) {
        Node* following = edge.function.get();
        if (following && seen.insert(following)) {
          waiting.push_back({following, number});
        }
      }
    }
    const size_t count = own.nodes.size() + own.leaves.size();
    own.pass->states.reset(new NodeState[count]);
    own.hooked.reserve(count);
    return PyLong_FromSize_t(count);
  });
}

// attach(numbers, frames, first_known, unknown, string, only_named) -> (count of Nodes whose module is not known,
// [(Node, name, number, frame or None, occurrence)] of those defined in Python, which are left to Python)
PyObject* pass_attach(PyObject* self, PyObject* args) {
  PyObject *numbers, *frames, *unknown, *string;
  unsigned long long first_known;
  int only_named;
  if (!PyArg_ParseTuple(
          args, "O!O!KOOp", &PyList_Type, &numbers, &PyList_Type, &frames, &first_known, &unknown, &string,
          &only_named)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    Pass& pass = *own.pass;
    Journal& journal = *pass.settings->journal;
    std::stable_sort(
        own.nodes.begin(), own.nodes.end(), [](const Found& a, const Found& b) { return a.number < b.number; });
    std::unordered_map<PyObject*, Call> calls;
    PyObject* python_nodes = PyList_New(0);
    if (!python_nodes) {
      return nullptr;
    }
    const auto fail = [&]() -> PyObject* {
      Py_DECREF(python_nodes);
      return nullptr;
    };
    // The boundaries are sorted too: found once, and then followed.
    const Py_ssize_t known = std::min(PyList_GET_SIZE(numbers), PyList_GET_SIZE(frames));
    const auto boundary = [&](Py_ssize_t i) { return PyLong_AsUnsignedLongLong(PyList_GET_ITEM(numbers, i)); };
    Py_ssize_t place = 0;
    if (!own.nodes.empty()) {
      Py_ssize_t high = known;
      while (place < high) {
        const Py_ssize_t middle = (place + high) / 2;
        boundary(middle) <= own.nodes.front().number ? place = middle + 1 : high = middle;
      }
    }
    unsigned long long next = place < known ? boundary(place) : kNoSequenceNumber;
    Py_ssize_t unattributed = 0;
    Call* call = nullptr;
    PyObject* last = nullptr;
    for (const Found& found : own.nodes) {
      while (place < known && next <= found.number) {
        ++place;
        next = place < known ? boundary(place) : kNoSequenceNumber;
      }
      PyObject* frame = place > 0 && found.number >= first_known ? PyList_GET_ITEM(frames, place - 1) : unknown;
      if (frame == unknown) {
        ++unattributed;
        frame = Py_None;
      }
      if (frame != last) {
        const auto entry = calls.try_emplace(frame);
        call = &entry.first->second;
        if (entry.second && frame != Py_None) {
          if (!read_call(frame, *call)) {
            return fail();
          }
          own.frames.push_back(Py_NewRef(frame));
        }
        last = frame;
      }
      const bool is_python = is_python_node(*found.node);
      uint32_t name;
      if (!name_of(journal, *found.node, string, is_python, name)) {
        return fail();
      }
      uint32_t occurrence = 0;
      auto counted = std::find_if(
          call->occurrences.begin(), call->occurrences.end(), [&](const auto& c) { return c.first == name; });
      if (counted == call->occurrences.end()) {
        call->occurrences.emplace_back(name, 1);
      } else {
        occurrence = counted->second++;
      }
      if (call->frame ? !call->is_wanted : only_named != 0) {
        continue;
      }
      if (is_python) {
        PyObject* entry = Py_BuildValue(
            "(NIKOI)", torch::autograd::functionToPyObject(found.node->getptr()), name,
            static_cast<unsigned long long>(found.number), frame, occurrence);
        const int added = entry ? PyList_Append(python_nodes, entry) : -1;
        Py_XDECREF(entry);
        if (added < 0) {
          return fail();
        }
        continue;
      }
      NodeState& state = pass.states[pass.state_count++];
      state.name = name;
      state.number = found.number == kNoSequenceNumber ? kNullInt64 : static_cast<int64_t>(found.number);
      state.frame = call->frame;
      state.root = call->root;
      state.module_fqn = call->fqn;
      state.call_index = call->call_index;
      state.occurrence = occurrence;
      hook(own, *found.node, state);
    }
    if (PyErr_Occurred()) {
      return fail();
    }
    own.nodes.clear();
    return Py_BuildValue("(nN)", unattributed, python_nodes);
  });
}

// attach_leaves(places, leaf, name, is_off) -> [(which, variable, number of a Node that leads there)] of those that are
// left to Python. `places` is None where all are.
PyObject* pass_attach_leaves(PyObject* self, PyObject* args) {
  PyObject *places, *leaf;
  unsigned int name;
  int is_off;
  if (!PyArg_ParseTuple(args, "OOIp", &places, &leaf, &name, &is_off)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    Owned left(PyList_New(0));
    for (size_t which = 0; left && which < own.leaves.size(); ++which) {
      auto& node = *static_cast<AccumulateGrad*>(own.leaves[which].node);
      const Owned variable(THPVariable_Wrap(node.variable));
      const bool has_local = !is_off && node.variable.requires_grad();
      const LeafNames* names = nullptr;
      if (variable && places != Py_None && !(has_local && has_hooks(node))) {
        names = names_of(*own.pass->settings, variable.get(), places, leaf);
        if (PyErr_Occurred()) {
          return nullptr;
        }
      }
      if (names) {
        hook_leaf(own, node, name, *names, has_local);
        continue;
      }
      const Owned entry(
          variable ? Py_BuildValue("(nOK)", which, variable.get(), static_cast<unsigned long long>(own.used_by[which]))
                   : nullptr);
      if (!entry || PyList_Append(left.get(), entry.get()) < 0) {
        return nullptr;
      }
    }
    return left ? Py_NewRef(left.get()) : nullptr;
  });
}

// attach_leaf(which, name, root, holder, parameter, frame or None, has_local) -> whether it was: not where a hook sees
// the accumulated gradient before ours, and `has_local`.
PyObject* pass_attach_leaf(PyObject* self, PyObject* args) {
  Py_ssize_t which;
  unsigned int name;
  int has_local;
  LeafNames names;
  if (!PyArg_ParseTuple(
          args, "nIiIIOp", &which, &name, &names.root, &names.holder, &names.parameter, &names.frame, &has_local)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    auto& leaf = *static_cast<AccumulateGrad*>(own.leaves.at(which).node);
    if (has_local && has_hooks(leaf)) {
      Py_RETURN_FALSE;
    }
    if (names.frame == Py_None) {
      names.frame = nullptr;
    }
    hook_leaf(own, leaf, name, names, has_local);
    Py_RETURN_TRUE;
  });
}

// leaf(which) -> the Node, for Python
PyObject* pass_leaf(PyObject* self, PyObject* which) {
  const Py_ssize_t at = PyLong_AsSsize_t(which);
  return guarded([&]() -> PyObject* {
    return torch::autograd::functionToPyObject(of(self).leaves.at(at).node->getptr());
  });
}

PyObject* sizes_of(const NodeState& state) {
  PyObject* all = PyList_New(0);
  for (size_t at = 0; all && at < state.came_in.size();) {
    const int64_t count = state.came_in[at++];
    PyObject* entry = nullptr;
    if (count == -1) {
      entry = Py_NewRef(Py_None);
    } else {
      const auto type = static_cast<at::ScalarType>(state.came_in[at++]);
      if (count == -2) {
        entry = Py_NewRef(Py_None);
      } else {
        PyObject* sizes = PyTuple_New(count);
        for (int64_t d = 0; sizes && d < count; ++d) {
          PyTuple_SET_ITEM(sizes, d, PyLong_FromLongLong(state.came_in[at++]));
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

// close() -> [(index, name, number or None, frame or None, occurrence, parameter, start, thread, came in)] of the Nodes
// that have begun and not ended. No hook does anything from here on.
PyObject* pass_close(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    Pass& pass = *of(self).pass;
    pass.is_open.store(false);
    pass.forget();
    PyObject* running = PyList_New(0);
    for (size_t i = 0; running && i < pass.state_count; ++i) {
      const NodeState& state = pass.states[i];
      const int32_t index = state.index.load();
      if (index < 0) {
        continue;
      }
      PyObject* entry = Py_BuildValue(
          "(iILOIILLN)", index, state.name, static_cast<long long>(state.number),
          state.frame ? state.frame : Py_None, state.occurrence, state.parameter_fqn,
          static_cast<long long>(state.start), static_cast<long long>(state.thread), sizes_of(state));
      if (!entry || PyList_Append(running, entry) < 0) {
        Py_CLEAR(running);
      }
      Py_XDECREF(entry);
    }
    return running;
  });
}

// ended() -> the numbers of the Nodes that have run.
PyObject* pass_ended(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const Pass& pass = *of(self).pass;
    PyObject* numbers = PyList_New(0);
    for (size_t i = 0; numbers && i < pass.state_count; ++i) {
      if (pass.states[i].has_ended) {
        const Owned number(PyLong_FromLongLong(pass.states[i].number));
        if (!number || PyList_Append(numbers, number.get()) < 0) {
          Py_CLEAR(numbers);
        }
      }
    }
    return numbers;
  });
}

// release(): the hooks leave their Nodes.
PyObject* pass_release(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    take_off(of(self));
    of(self).nodes.clear();
    of(self).leaves.clear();
    let_go_of_frames(of(self));
    Py_RETURN_NONE;
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

PyObject* pass_own_ns(PyObject* self, void*) {
  const Pass& pass = *of(self).pass;
  const double elapsed_ticks = static_cast<double>(ticks() - pass.began_ticks);
  const double elapsed_ns = static_cast<double>(now() - pass.began_ns);
  const double own = static_cast<double>(pass.own_ticks.load());
  return PyLong_FromDouble(elapsed_ticks > 0 ? own * elapsed_ns / elapsed_ticks : 0.0);
}

PyObject* pass_late_hooks(PyObject* self, void*) {
  return PyLong_FromLongLong(of(self).pass->late_hooks.load());
}

PyObject* pass_error(PyObject* self, void*) {
  std::lock_guard<std::mutex> held(of(self).pass->mutex);
  const std::string& error = of(self).pass->error;
  if (error.empty()) {
    Py_RETURN_NONE;
  }
  return PyUnicode_DecodeUTF8(error.data(), error.size(), "replace");
}

PyMethodDef pass_methods[] = {
    {"walk", pass_walk, METH_VARARGS, "Find every Node that can be reached from the roots."},
    {"attach", pass_attach, METH_VARARGS, "Hook the Nodes that walk found."},
    {"attach_leaves", pass_attach_leaves, METH_VARARGS, "Hook every AccumulateGrad that walk found, as far as it can."},
    {"attach_leaf", pass_attach_leaf, METH_VARARGS, "Hook an AccumulateGrad that walk found."},
    {"leaf", pass_leaf, METH_O, "An AccumulateGrad that walk found."},
    {"close", pass_close, METH_NOARGS, "Record no more; what is running."},
    {"ended", pass_ended, METH_NOARGS, "What has run."},
    {"release", pass_release, METH_NOARGS, "Take the hooks off."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef pass_fields[] = {
    {"task", pass_task, set_pass_task, "The engine's task, once a Node ran.", nullptr},
    {"own_ns", pass_own_ns, nullptr, "What the hooks took.", nullptr},
    {"late_hooks", pass_late_hooks, nullptr, "Gradients that a hook saw before ours.", nullptr},
    {"error", pass_error, nullptr, "What went wrong in a hook.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot pass_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(pass_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(pass_dealloc)},
    {Py_tp_methods, pass_methods},
    {Py_tp_getset, pass_fields},
    {Py_tp_iternext, reinterpret_cast<void*>(pass_next)},
    {Py_tp_doc, const_cast<char*>("One backward pass under watch. Its next is the next event_index.")},
    {0, nullptr}};

PyType_Spec pass_spec = {"gradtrace_native.Pass", sizeof(PyPass), 0, Py_TPFLAGS_DEFAULT, pass_slots};

PyType_Slot settings_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(settings_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(settings_dealloc)},
    {Py_tp_doc, const_cast<char*>("What all passes of a recording share.")},
    {0, nullptr}};

PyType_Spec settings_spec = {
    "gradtrace_native.Settings", sizeof(PySettings), 0, Py_TPFLAGS_DEFAULT, settings_slots};

// Elements that are summarised without letting go of the GIL: some 20 microseconds.
constexpr int64_t kMostUnderLock = 65536;

class Unlocked {
 public:
  explicit Unlocked(bool wanted) : state_(wanted ? PyEval_SaveThread() : nullptr) {}
  ~Unlocked() {
    if (state_) {
      PyEval_RestoreThread(state_);
    }
  }

 private:
  PyThreadState* state_;
};

// summary(tensor, whole) -> (norm, abs_max, sum, nan_count, inf_count, fingerprint, lanes), None for another tensor
// than a plain one of a floating dtype in this process's memory.
PyObject* summary(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !THPVariable_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "a tensor, and whether fingerprint and sketch are wanted");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const at::Tensor tensor = THPVariable_Unpack(args[0]);
    Kind kind;
    const void* data = readable(tensor, kind);
    if (!data) {
      Py_RETURN_NONE;
    }
    const bool whole = args[1] == Py_True;
    Numbers numbers;
    {
      const Unlocked unlocked(tensor.numel() >= kMostUnderLock);
      numbers = numbers_of(tensor, kind, data, whole);
    }
    PyObject* lanes = PyTuple_New(kLanes);
    for (int lane = 0; lanes && lane < kLanes; ++lane) {
      PyTuple_SET_ITEM(lanes, lane, PyFloat_FromDouble(narrowed(numbers.lanes[lane])));
    }
    return lanes ? Py_BuildValue(
                       "(dddLLLN)", std::sqrt(numbers.square), numbers.abs_max, numbers.sum,
                       static_cast<long long>(numbers.nans), static_cast<long long>(numbers.infs),
                       static_cast<long long>(numbers.fingerprint), lanes)
                 : nullptr;
  });
}

PyObject* set_vectors(PyObject*, PyObject* wanted) {
  use_vectors(wanted == Py_True);
  return PyBool_FromLong(uses_vectors());
}

PyMethodDef functions[] = {
    {"summary", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(summary)), METH_FASTCALL,
     "The summary of a plain tensor."},
    {"use_vectors", set_vectors, METH_O, "Use the processor's vectors, or not; whether they are used."},
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
  const struct {
    PyObject** place;
    const char* text;
  } names[] = {
      {&root_name, "root"},     {&fqn_name, "fqn_number"},      {&call_index_name, "call_index"},
      {&wanted_name, "wanted"}, {&root_call_name, "root_call"},   {&used_name, "used"},
      {&module_name, "module"}, {&name_name, "name"},             {&own_name, "own"},
      {&kind_name, "kind"},     {&parameters_name, "_parameters"}, {&buffers_name, "_buffers"}};
  for (const auto& name : names) {
    *name.place = PyUnicode_InternFromString(name.text);
  }
  journal_type = add_journal_types(module);
  settings_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&settings_spec));
  pass_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&pass_spec));
  if (!journal_type || !settings_type || !pass_type ||
      PyModule_AddObjectRef(module, "Settings", reinterpret_cast<PyObject*>(settings_type)) < 0 ||
      PyModule_AddObjectRef(module, "Pass", reinterpret_cast<PyObject*>(pass_type)) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
