// What names a Node: the call of a module that made it, its own name, the parameter that it accumulates.
// Part of observer.cpp. All of it with the GIL.
#pragma once

#include "graph.h"

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
  return used && (used.get() == Py_True || PyObject_SetAttr(root_call.get(), of_used.name(), Py_True) == 0);
}

// Whether a Function defined in Python: the type of its Node is not exported by torch, so it is asked for by name (2.13).
bool is_python_node(const std::type_info& type) {
  const char* name = type.name();
  return std::strcmp(name + (*name == '*'), "N5torch8autograd6PyNodeE") == 0;
}

// A Node's name: by its type, as it is the class's, but for Functions defined in Python. False with an exception set.
bool name_of(Settings& settings, const Node& node, PyObject* string, NodeName& name) {
  const std::type_info* type = &typeid(node);
  const auto known = settings.node_names.find(type);
  if (known != settings.node_names.end()) {
    name = known->second;
    return true;
  }
  name.is_python = is_python_node(*type);
  const std::string whole = node.name();
  const size_t colons = whole.rfind("::");
  const size_t begin = colons == std::string::npos ? 0 : colons + 2;
  const Owned text(PyUnicode_DecodeUTF8(whole.data() + begin, whole.size() - begin, "replace"));
  const Owned given(text ? PyObject_CallOneArg(string, text.get()) : nullptr);
  if (!given) {
    return false;
  }
  name.number = static_cast<uint32_t>(PyLong_AsUnsignedLong(given.get()));
  if (!name.is_python) {
    settings.node_names.emplace(type, name);
  }
  return !PyErr_Occurred();
}

void hook_leaf(Attached& own, AccumulateGrad& leaf, uint32_t name, const LeafNames& names, bool has_local) {
  NodeState& state = own.pass->add_state();
  state.name = name;
  state.root = names.root;
  state.module_fqn = names.holder;
  state.parameter_fqn = names.parameter;
  state.has_local = has_local;
  state.leaf = &leaf;
  if (names.frame) {
    state.frame = Py_NewRef(names.frame);
    own.buffers->frames.push_back(state.frame);
  }
  hook(own, leaf, state);
}

// A job that makes a model for every step must not fill our memory: names that nobody else holds go. Each time there are
// twice as many as were left.
void forget_the_dead(Settings& settings) {
  auto& leaves = settings.leaves;
  if (leaves.size() < settings.most_leaves) {
    return;
  }
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

// What names this parameter's Node: the same as `Names.tensor` of gradtrace_recorder/naming.py finds, with its checks,
// in a tenth of the time. Null where that does not apply (then Python is asked), or with an exception set.
const LeafNames* names_of(Settings& settings, PyObject* variable, PyObject* places, PyObject* leaf) {
  const Owned key(PyLong_FromVoidPtr(variable));
  PyObject* place = key ? PyDict_GetItemWithError(places, key.get()) : nullptr; // borrowed
  if (!place) {
    return nullptr;
  }
  const Owned reference = of_module.of(place), named = of_name.of(place), own = of_own.of(place);
  if (!reference || !named || !own) {
    return nullptr;
  }
  auto known = settings.leaves.find(named.get());
  if (known == settings.leaves.end()) {
    const Owned kind = of_kind.of(named.get());
    const Owned given(kind ? PyObject_CallOneArg(leaf, named.get()) : nullptr);
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
  const Owned module = target_of(reference.get());
  if (!module) {
    return nullptr;
  }
  const Owned held = (known->second.is_parameter ? of_parameters : of_buffers).of(module.get());
  if (!held || !PyDict_Check(held.get()) || PyDict_GetItemWithError(held.get(), own.get()) != variable) {
    return nullptr;
  }
  return &known->second;
}

} // namespace
} // namespace gradtrace
