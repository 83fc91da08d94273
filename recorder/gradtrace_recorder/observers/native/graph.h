// What is kept of a graph while its pass is watched, and how its Nodes are named. Part of observer.cpp.
//
// A Node's hooks are changed with the GIL held, while no pass runs anywhere: the engine reads them without a lock.
#pragma once

#include "pass.h"

namespace gradtrace {
namespace {

// Runs what may throw on Python's behalf.
template <class F>
PyObject* guarded(F body) {
  try {
    return body();
  } catch (const std::exception& failure) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_RuntimeError, failure.what());
    }
    return nullptr;
  }
}

// A reference that is given back. With the GIL.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  ~Owned() {
    Py_XDECREF(object_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  PyObject* get() const {
    return object_;
  }
  explicit operator bool() const {
    return object_ != nullptr;
  }

 private:
  PyObject* object_;
};

NodePtr pointer_to(PyObject* node) {
  if (THPFunction_Check(node)) {
    return reinterpret_cast<THPFunction*>(node)->cdata;
  }
  if (torch::autograd::THPCppFunction_Check(node)) {
    return reinterpret_cast<torch::autograd::THPCppFunction*>(node)->cdata;
  }
  return NodePtr();
}

// Whether a Function defined in Python: the type of its Node is not exported by torch, so it is asked for by name (2.13).
bool is_python_node(const Node& node) {
  const char* name = typeid(node).name();
  return std::strcmp(name + (*name == '*'), "N5torch8autograd6PyNodeE") == 0;
}

bool is_leaf(const Node& node) {
  return typeid(node) == typeid(AccumulateGrad);
}

// The Nodes that a walk has seen: a table of pointers, at most half full.
class Seen {
 public:
  bool insert(const Node* node) {
    if (2 * ++count_ > table_.size()) {
      std::vector<const Node*> larger(2 * table_.size());
      larger.swap(table_);
      for (const Node* one : larger) {
        if (one) {
          place(one) = one;
        }
      }
    }
    const Node*& at = place(node);
    if (at) {
      --count_;
      return false;
    }
    at = node;
    return true;
  }

 private:
  std::vector<const Node*> table_ = std::vector<const Node*>(1024);
  size_t count_ = 0;

  const Node*& place(const Node* node) {
    size_t at = (reinterpret_cast<uintptr_t>(node) >> 4) * 0x9E3779B97F4A7C15 >> 20;
    for (;; ++at) {
      const Node*& entry = table_[at & (table_.size() - 1)];
      if (!entry || entry == node) {
        return entry;
      }
    }
  }
};

struct Hooked {
  WeakNode node;
  const void* before;
  const void* after;
};

struct Found {
  uint64_t number;
  Node* node;
};

// What the Python object owns besides the pass.
struct Attached {
  std::shared_ptr<Pass> pass;
  std::vector<Found> nodes, leaves; // between `walk` and `attach`, while the caller holds the roots
  std::vector<uint64_t> used_by;
  std::vector<Hooked> hooked;
  std::vector<PyObject*> frames;
};

void let_go_of_frames(Attached& own) {
  std::vector<PyObject*> frames;
  frames.swap(own.frames);
  for (size_t i = 0; i < own.pass->state_count; ++i) {
    own.pass->states[i].frame = nullptr;
  }
  for (PyObject* frame : frames) {
    Py_DECREF(frame);
  }
}

// Takes the hooks off their Nodes. With the GIL, while no pass runs.
void take_off(Attached& own) {
  for (Hooked& hooked : own.hooked) {
    const NodePtr node = hooked.node.lock();
    if (!node) {
      continue;
    }
    auto& before = node->pre_hooks();
    before.erase(
        std::remove_if(before.begin(), before.end(), [&](const auto& h) { return h.get() == hooked.before; }),
        before.end());
    auto& after = node->post_hooks();
    after.erase(
        std::remove_if(after.begin(), after.end(), [&](const auto& h) { return h.get() == hooked.after; }),
        after.end());
  }
  own.hooked.clear();
}

void hook(Attached& own, Node& node, NodeState& state) {
  auto before = std::make_unique<Before>(own.pass, state);
  auto after = std::make_unique<After>(own.pass, state);
  own.hooked.push_back({weakly(node.getptr()), before.get(), after.get()});
  node.add_pre_hook(std::move(before));
  node.add_post_hook(std::move(after));
}

// What one call of a module means to its Nodes.
struct Call {
  PyObject* frame = nullptr; // null: outside any module, or not known
  int32_t root = kNullInt32, call_index = kNullInt32;
  uint32_t fqn = kNullString;
  bool is_wanted = true;
  c10::SmallVector<std::pair<uint32_t, uint32_t>, 8> occurrences;
};

bool number_attribute(PyObject* object, PyObject* name, long long& number) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (!value) {
    return false;
  }
  number = PyLong_AsLongLong(value);
  Py_DECREF(value);
  return !(number == -1 && PyErr_Occurred());
}

PyObject *root_name, *fqn_name, *call_index_name, *wanted_name, *root_call_name, *used_name, *module_name, *name_name,
    *own_name, *kind_name, *parameters_name, *buffers_name;

bool read_call(PyObject* frame, Call& call) {
  long long root, fqn, call_index;
  if (!number_attribute(frame, root_name, root) || !number_attribute(frame, fqn_name, fqn) ||
      !number_attribute(frame, call_index_name, call_index)) {
    return false;
  }
  PyObject* wanted = PyObject_GetAttr(frame, wanted_name);
  if (!wanted) {
    return false;
  }
  call.is_wanted = PyObject_IsTrue(wanted) == 1;
  Py_DECREF(wanted);
  PyObject* root_call = PyObject_GetAttr(frame, root_call_name);
  if (!root_call) {
    return false;
  }
  const int set = root_call == Py_None ? 0 : PyObject_SetAttr(root_call, used_name, Py_True);
  Py_DECREF(root_call);
  call.frame = frame;
  call.root = static_cast<int32_t>(root);
  call.fqn = static_cast<uint32_t>(fqn);
  call.call_index = static_cast<int32_t>(call_index);
  return set == 0;
}

// The number of a Node's name: by its type, as its name is the class's. Not for Functions defined in Python.
bool name_of(Journal& journal, const Node& node, PyObject* string, bool is_python, uint32_t& number) {
  if (!is_python) {
    const auto known = journal.node_names.find(typeid(node));
    if (known != journal.node_names.end()) {
      number = known->second;
      return true;
    }
  }
  const std::string whole = node.name();
  const size_t colons = whole.rfind("::");
  const std::string name = colons == std::string::npos ? whole : whole.substr(colons + 2);
  PyObject* text = PyUnicode_DecodeUTF8(name.data(), name.size(), "replace");
  PyObject* given = text ? PyObject_CallOneArg(string, text) : nullptr;
  Py_XDECREF(text);
  if (!given) {
    return false;
  }
  number = static_cast<uint32_t>(PyLong_AsUnsignedLong(given));
  Py_DECREF(given);
  if (!is_python) {
    journal.node_names[typeid(node)] = number;
  }
  return !PyErr_Occurred();
}

void hook_leaf(Attached& own, AccumulateGrad& leaf, uint32_t name, const LeafNames& names, bool has_local) {
  NodeState& state = own.pass->states[own.pass->state_count++];
  state.name = name;
  state.root = names.root;
  state.module_fqn = names.holder;
  state.parameter_fqn = names.parameter;
  state.has_local = has_local;
  state.leaf = &leaf;
  if (names.frame) {
    state.frame = Py_NewRef(names.frame);
    own.frames.push_back(state.frame);
  }
  hook(own, leaf, state);
}

// What names this parameter's Node: the same as `Names.tensor` of gradtrace_recorder/naming.py finds, with its checks,
// in a tenth of the time. Null where that does not apply; then Python is asked.
const LeafNames* names_of(Settings& settings, PyObject* variable, PyObject* places, PyObject* leaf) {
  PyObject* key = PyLong_FromVoidPtr(variable);
  PyObject* place = key ? PyDict_GetItemWithError(places, key) : nullptr; // borrowed
  Py_XDECREF(key);
  if (!place) {
    return nullptr;
  }
  const Owned reference(PyObject_GetAttr(place, module_name)), named(PyObject_GetAttr(place, name_name)),
      own(PyObject_GetAttr(place, own_name));
  if (!reference || !named || !own) {
    return nullptr;
  }
  auto known = settings.leaves.find(named.get());
  if (known == settings.leaves.end()) {
    const Owned kind(PyObject_GetAttr(named.get(), kind_name)), given(PyObject_CallOneArg(leaf, named.get()));
    LeafNames names;
    if (!kind || !given ||
        !PyArg_ParseTuple(given.get(), "iIIO", &names.root, &names.holder, &names.parameter, &names.frame)) {
      return nullptr;
    }
    names.is_parameter = PyUnicode_CompareWithASCIIString(kind.get(), "parameter") == 0;
    names.named = Py_NewRef(named.get());
    Py_INCREF(names.frame);
    known = settings.leaves.emplace(named.get(), names).first;
  }
  const Owned module(PyObject_CallNoArgs(reference.get()));
  if (!module || module.get() == Py_None) {
    return nullptr;
  }
  const Owned held(
      PyObject_GetAttr(module.get(), known->second.is_parameter ? parameters_name : buffers_name));
  if (!held || !PyDict_Check(held.get()) || PyDict_GetItemWithError(held.get(), own.get()) != variable) {
    return nullptr;
  }
  return &known->second;
}

} // namespace
} // namespace gradtrace
