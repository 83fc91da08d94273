// What names a Node: the call of a module that made it, its own name, the parameter that it accumulates.
// Part of observer.cpp. All of it with the GIL.
#pragma once

#include "autograd/graph.h"

namespace gradtrace {
namespace {

Attribute of_root("root"), of_fqn("fqn_number"), of_call_index("call_index"), of_wanted("wanted"),
    of_root_call("root_call"), of_used("used"), of_module("module"), of_name("name"), of_own("own"), of_kind("kind"),
    of_parameters("_parameters"), of_buffers("_buffers");

// False with an exception set.
bool read_call(PyObject* frame, Call& call) {
  long long root, fqn, call_index;
  if (!integer_of(of_root, frame, root) || !integer_of(of_fqn, frame, fqn) ||
      !integer_of(of_call_index, frame, call_index)) {
    return false;
  }
  const Owned wanted = of_wanted.of(frame), root_call = of_root_call.of(frame);
  if (!wanted || !root_call) {
    return false;
  }
  call.is_wanted = PyObject_IsTrue(wanted.get()) == 1;
  call.frame = frame;
  call.root = static_cast<int32_t>(root);
  call.fqn = static_cast<uint32_t>(fqn);
  call.call_index = static_cast<int32_t>(call_index);
  if (root_call.get() == Py_None) {
    return true;
  }
  const Owned used = of_used.of(root_call.get());
  return used &&
      (used.get() == Py_True ||
       coming_for_gil([&] { return PyObject_SetAttr(root_call.get(), of_used.name(), Py_True); }) == 0);
}

// Whether a Function defined in Python: the type of its Node is not exported by torch, so it is asked for by name (2.13).
bool is_python_node(const std::type_info& type) {
  const char* name = type.name();
  return std::strcmp(name + (*name == '*'), "N5torch8autograd6PyNodeE") == 0;
}

Owned text_of(const Node& node) {
  const std::string whole = node.name();
  const size_t colons = whole.rfind("::");
  const size_t begin = colons == std::string::npos ? 0 : colons + 2;
  return Owned(PyUnicode_DecodeUTF8(whole.data() + begin, whole.size() - begin, "replace"));
}

// A Node's name: by its type, as it is the class's, but for Functions defined in Python, whose text the caller owns.
// False with an exception set.
bool new_name(Settings& settings, const Node& node, PyObject* string, NodeName& name) {
  const std::type_info* type = &typeid(node);
  const auto known = settings.node_names.find(type);
  if (known != settings.node_names.end()) {
    name = known->second;
    return true;
  }
  name.is_python = is_python_node(*type);
  const Owned text = text_of(node);
  const Owned given(text ? called(string, text.get()) : nullptr);
  if (!given) {
    return false;
  }
  name.number = static_cast<uint32_t>(PyLong_AsUnsignedLong(given.get()));
  if (PyErr_Occurred()) {
    return false;
  }
  if (!name.is_python) {
    name.text = Py_NewRef(text.get());
    settings.node_names.emplace(type, name);
  }
  return true;
}

bool name_of(Settings& settings, const Node& node, PyObject* string, NodeName& name) {
  const std::type_info* type = &typeid(node);
  auto& [of, recent] = settings.recent_names[(reinterpret_cast<uintptr_t>(type) >> 4) % std::size(settings.recent_names)];
  if (of == type) {
    name = recent;
    return true;
  }
  if (!new_name(settings, node, string, name)) {
    return false;
  }
  if (!name.is_python) {
    of = type;
    recent = name;
  }
  return true;
}

// The same as a text. Empty with an exception set.
Owned text_of(Settings& settings, const Node& node, PyObject* string) {
  NodeName name;
  if (!name_of(settings, node, string, name)) {
    return Owned(nullptr);
  }
  return name.text ? Owned(Py_NewRef(name.text)) : text_of(node);
}

void hook_leaf(Attached& own, const NodePtr& leaf, uint32_t name, const LeafNames& names, bool has_local) {
  NodeState& state = own.pass->add_state();
  state.name = name;
  state.root = names.root;
  state.module_fqn = names.holder;
  state.parameter_fqn = names.parameter;
  state.has_local = has_local;
  state.leaf = static_cast<AccumulateGrad*>(leaf.get());
  if (names.frame) {
    state.frame = Py_NewRef(names.frame);
    own.buffers->frames.push_back(state.frame);
  }
  own.buffers->planned.push_back({&leaf, &state});
}

// A job that makes a model for every step must not fill our memory: names that nobody else holds go. Each time there are
// twice as many as were left.
void forget_the_dead(Settings& settings) {
  auto& leaves = settings.leaves;
  if (leaves.size() < settings.most_leaves) {
    return;
  }
  settings.forget_places(); // they refer to names
  for (auto one = leaves.begin(); one != leaves.end();) {
    if (Py_REFCNT(one->first) > 1) {
      ++one;
      continue;
    }
    const Owned named(one->second.named), frame(one->second.frame);
    one = leaves.erase(one);
  }
  settings.most_leaves = 2 * leaves.size() + kFewestLeaves;
}

// Where `Names` (gradtrace_recorder/state/naming.py) says that a tensor is held, and what its Node is called; it has proved
// nothing yet. Null where that is not known, or with an exception set.
const LeafPlace* place_of(Settings& settings, PyObject* variable, PyObject* places, PyObject* leaf) {
  const auto found = settings.leaf_places.find(variable);
  if (found != settings.leaf_places.end()) {
    return &found->second;
  }
  const Owned key(PyLong_FromVoidPtr(variable));
  PyObject* place = key ? PyDict_GetItemWithError(places, key.get()) : nullptr; // borrowed
  if (!place) {
    return nullptr;
  }
  const Owned module = of_module.of(place), named = of_name.of(place), own = of_own.of(place);
  if (!module || !named || !own) {
    return nullptr;
  }
  auto known = settings.leaves.find(named.get());
  if (known == settings.leaves.end()) {
    const Owned kind = of_kind.of(named.get());
    const Owned given(kind ? called(leaf, named.get()) : nullptr);
    LeafNames names;
    if (!given ||
        !PyArg_ParseTuple(given.get(), "iIIO", &names.root, &names.holder, &names.parameter, &names.frame)) {
      return nullptr;
    }
    names.is_parameter = PyUnicode_CompareWithASCIIString(kind.get(), "parameter") == 0;
    forget_the_dead(settings);
    names.named = Py_NewRef(named.get());
    Py_INCREF(names.frame);
    known = settings.leaves.emplace(named.get(), names).first;
  }
  const LeafPlace made = {Py_NewRef(module.get()), Py_NewRef(own.get()), &known->second};
  return &settings.leaf_places.emplace(variable, made).first->second;
}

// What names this parameter's Node: the same as `Names.tensor` finds, with its checks, in a tenth of the time. Null where
// that does not apply (then Python is asked), or with an exception set. `given` is how often names were given so far.
const LeafNames* names_of(Settings& settings, PyObject* variable, PyObject* places, long long given, PyObject* leaf) {
  if (given != settings.places_given) {
    settings.forget_places();
    settings.places_given = given;
  }
  const LeafPlace* place = place_of(settings, variable, places, leaf);
  const Owned module = place ? target_of(place->module) : Owned(nullptr);
  if (!module) {
    return nullptr;
  }
  const Owned held = (place->names->is_parameter ? of_parameters : of_buffers).of_instance(module.get());
  if (!held || !PyDict_Check(held.get()) || PyDict_GetItemWithError(held.get(), place->own) != variable) {
    return nullptr;
  }
  return place->names;
}

} // namespace
} // namespace gradtrace
