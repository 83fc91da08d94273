// Methods of `Pass` that find a graph's Nodes, name them and hook them. Part of observer.cpp.
#pragma once

#include "python/names.h"

namespace gradtrace {
namespace {

struct PyPass {
  PyObject_HEAD
  Attached* own;
};

Attached& of(PyObject* self) {
  return *reinterpret_cast<PyPass*>(self)->own;
}

// What `walk` found, until the pass is over.
Buffers& walked(Attached& own) {
  if (!own.buffers) {
    throw std::logic_error("no graph was walked, or the pass is over");
  }
  return *own.buffers;
}

// The Node that a tensor, or a GradientEdge, starts from, empty for none. Plain tensors are asked here, so that no
// object of Python's is made for the Node; others by `node_of`. False with an exception set.
bool root_of(PyObject* output, PyObject* node_of, NodePtr& root) {
  static const c10::DispatchKeySet wrappers(
      {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Functionalize,
       c10::DispatchKey::Python});
  if (THPVariable_CheckExact(output)) {
    const at::Tensor& tensor = THPVariable_Unpack(output);
    if (!tensor.key_set().has_any(wrappers)) {
      root = tensor.grad_fn();
      return true;
    }
  }
  const Owned node(called(node_of, output));
  if (node && node.get() != Py_None) {
    root = pointer_to(node.get());
  }
  return static_cast<bool>(node);
}

// walk(outputs, node_of, string, beyond) -> (count of Nodes, name of the first output's Node or None). `beyond` is a set of
// numbers of Nodes that will not run, unless they are roots: the walk ends there. None for none.
PyObject* pass_walk(PyObject* self, PyObject* args) {
  PyObject *outputs, *node_of, *string, *beyond;
  if (!PyArg_ParseTuple(args, "OOOO", &outputs, &node_of, &string, &beyond)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    if (own.buffers) {
      throw std::logic_error("a pass walks its graph once");
    }
    own.buffers = std::move(own.pass->settings->buffers);
    if (!own.buffers) {
      own.buffers = std::make_unique<Buffers>();
    }
    Buffers& graph = *own.buffers;
    graph.seen.clear();
    const Owned sequence(PySequence_Fast(outputs, "the outputs are a sequence"));
    if (!sequence) {
      return nullptr;
    }
    const Py_ssize_t given = PySequence_Fast_GET_SIZE(sequence.get());
    graph.roots.resize(given);
    for (Py_ssize_t i = 0; i < given; ++i) {
      if (!root_of(PySequence_Fast_GET_ITEM(sequence.get(), i), node_of, graph.roots[i])) {
        return nullptr;
      }
      if (graph.roots[i] && graph.seen.insert(graph.roots[i].get())) {
        graph.waiting.push_back({0, &graph.roots[i], 0});
      }
    }
    Owned name(Py_NewRef(Py_None));
    if (given && graph.roots.front()) {
      name = text_of(*own.pass->settings, *graph.roots.front(), string);
      if (!name) {
        return nullptr;
      }
    }
    const auto is_root = [&](const Node* node) {
      return std::any_of(graph.roots.begin(), graph.roots.end(), [&](const NodePtr& one) { return one.get() == node; });
    };
    while (!graph.waiting.empty()) {
      Found found = graph.waiting.back();
      graph.waiting.pop_back();
      const Node& node = *found.node();
      found.number = node.sequence_nr();
      if (beyond != Py_None && !is_root(&node)) {
        const Owned key(PyLong_FromUnsignedLongLong(found.number));
        const int is_beyond = key ? PySet_Contains(beyond, key.get()) : -1;
        if (is_beyond < 0) {
          return nullptr;
        }
        if (is_beyond) {
          continue;
        }
      }
      if (found.number == kNoSequenceNumber && is_leaf(node)) {
        graph.leaves.push_back(found);
        continue;
      }
      graph.nodes.push_back(found);
      for (const auto& edge : node.next_edges()) {
        if (edge.function && graph.seen.insert(edge.function.get())) {
          graph.waiting.push_back({0, &edge.function, found.number});
        }
      }
    }
    const size_t count = graph.nodes.size() + graph.leaves.size();
    own.pass->reserve(count);
    own.holds = static_cast<int64_t>(2 * count);
    own.pass->hold(own.holds);
    graph.hooked.reserve(count);
    return Py_BuildValue("(nO)", static_cast<Py_ssize_t>(count), name.get());
  });
}

// is_apart_from(other) -> whether none of the Nodes that `walk` found is the one that another pass runs on this thread.
// Only then is it known which lists of hooks that pass is reading; false where it runs none, or more than one.
PyObject* pass_is_apart_from(PyObject* self, PyObject* other) {
  if (Py_TYPE(other) != Py_TYPE(self)) {
    PyErr_SetString(PyExc_TypeError, "another pass");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const Attached& outer = of(other);
    NodePtr running;
    for (size_t at = 0; outer.buffers && at < outer.buffers->hooked.size(); ++at) {
      const NodeState& state = *outer.buffers->hooked[at].state;
      if (state.index.load() < 0) {
        continue;
      }
      if (running || state.thread != this_thread()) {
        Py_RETURN_FALSE;
      }
      running = outer.buffers->hooked[at].node.lock();
    }
    return PyBool_FromLong(running && !walked(of(self)).seen.holds(running.get()));
  });
}

// By number, and of one number in the order in which they were found. Numbers follow on each other, mostly.
void sort_by_number(Buffers& graph) {
  auto& nodes = graph.nodes;
  uint64_t least = kNoSequenceNumber, most = 0;
  for (const Found& found : nodes) {
    least = std::min(least, found.number);
    most = std::max(most, found.number);
  }
  if (!nodes.empty() && most - least < 4 * nodes.size()) {
    graph.places.assign(most - least + 1, 0);
    bool is_alone = true;
    for (size_t at = 0; at < nodes.size(); ++at) {
      uint32_t& place = graph.places[nodes[at].number - least];
      is_alone = is_alone && place == 0;
      place = static_cast<uint32_t>(at + 1);
    }
    if (is_alone) {
      graph.sorted.clear();
      for (const uint32_t place : graph.places) {
        if (place) {
          graph.sorted.push_back(nodes[place - 1]);
        }
      }
      nodes.swap(graph.sorted);
      return;
    }
  }
  std::stable_sort(nodes.begin(), nodes.end(), [](const Found& a, const Found& b) { return a.number < b.number; });
}

// The boundaries between calls, as `Attribution` has them, followed upwards from a number on.
class Boundaries {
 public:
  Boundaries(PyObject* numbers, PyObject* frames, uint64_t first)
      : numbers_(numbers), frames_(frames), count_(std::min(PyList_GET_SIZE(numbers), PyList_GET_SIZE(frames))) {
    // The newest are asked for, mostly.
    Py_ssize_t high = count_, step = 16;
    while (high > 0 && number(std::max<Py_ssize_t>(high - step, 0)) > first) {
      high = std::max<Py_ssize_t>(high - step, 0);
      step *= 2;
    }
    at_ = std::max<Py_ssize_t>(high - step, 0);
    while (at_ < high) {
      const Py_ssize_t middle = (at_ + high) / 2;
      number(middle) <= first ? at_ = middle + 1 : high = middle;
    }
    next_ = at_ < count_ ? number(at_) : kNoSequenceNumber;
  }

  // Whose Node has that number; null where nobody is known to have made one so early. Asked for no smaller one later.
  PyObject* frame_at(uint64_t wanted) {
    while (at_ < count_ && next_ <= wanted) {
      ++at_;
      next_ = at_ < count_ ? number(at_) : kNoSequenceNumber;
    }
    return at_ && is_whole() ? PyList_GET_ITEM(frames_, at_ - 1) : nullptr;
  }

 private:
  PyObject* const numbers_;
  PyObject* const frames_;
  const Py_ssize_t count_;
  Py_ssize_t at_ = 0; // the first that is beyond
  uint64_t next_;

  // Python runs while names are asked for, a signal handler of the job's too: many calls in it, and the oldest go.
  bool is_whole() const {
    return std::min(PyList_GET_SIZE(numbers_), PyList_GET_SIZE(frames_)) >= count_;
  }

  uint64_t number(Py_ssize_t at) const {
    return is_whole() ? PyLong_AsUnsignedLongLong(PyList_GET_ITEM(numbers_, at)) : kNoSequenceNumber;
  }
};

uint32_t occurrence_of(Call& call, uint32_t name) {
  for (auto& [known, count] : call.occurrences) {
    if (known == name) {
      return count++;
    }
  }
  call.occurrences.emplace_back(name, 1);
  return 0;
}

// attach(numbers, frames, first_known, unknown, string, only_named, makes_graph) -> (count of Nodes whose module is not
// known, whether an AccumulateGrad may run before all others that have hooks)
PyObject* pass_attach(PyObject* self, PyObject* args) {
  PyObject *numbers, *frames, *unknown, *string;
  unsigned long long first_known;
  int only_named, makes_graph;
  if (!PyArg_ParseTuple(
          args, "O!O!KOOpp", &PyList_Type, &numbers, &PyList_Type, &frames, &first_known, &unknown, &string,
          &only_named, &makes_graph)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    Buffers& graph = walked(own);
    Pass& pass = *own.pass;
    sort_by_number(graph);
    Boundaries boundaries(numbers, frames, graph.nodes.empty() ? 0 : graph.nodes.front().number);
    graph.calls.emplace_back(); // of no module
    size_t call_at = 0;
    PyObject* last = Py_None;
    Py_ssize_t unattributed = 0;
    for (const Found& found : graph.nodes) {
      PyObject* frame = boundaries.frame_at(found.number);
      if (!frame || frame == unknown || found.number < first_known) {
        ++unattributed;
        frame = Py_None;
      }
      if (frame != last) {
        const auto [entry, is_new] = graph.call_of.try_emplace(frame, frame == Py_None ? 0 : graph.calls.size());
        call_at = entry->second;
        if (is_new && frame != Py_None) {
          graph.calls.emplace_back();
          if (!read_call(frame, graph.calls.back())) {
            return nullptr;
          }
          graph.frames.push_back(Py_NewRef(frame));
        }
        last = frame;
      }
      Call& call = graph.calls[call_at];
      NodeName name;
      if (!name_of(*pass.settings, *found.node(), string, name)) {
        return nullptr;
      }
      const uint32_t occurrence = occurrence_of(call, name.number);
      if (call.frame ? !call.is_wanted : only_named != 0) {
        continue;
      }
      NodeState& state = pass.add_state();
      state.name = name.number;
      state.number = found.number == kNoSequenceNumber ? kNullInt64 : static_cast<int64_t>(found.number);
      state.frame = call.frame;
      state.root = call.root;
      state.module_fqn = call.fqn;
      state.call_index = call.call_index;
      state.occurrence = occurrence;
      if (name.is_python || makes_graph) {
        state.maker = std::make_unique<Maker>(name.is_python);
      }
      graph.planned.push_back({found.pointer, &state});
    }
    if (PyErr_Occurred()) {
      return nullptr;
    }
    // Where some modules are not wanted, their Nodes may come first.
    pass.may_begin_with_leaf = only_named != 0 || graph.nodes.empty();
    graph.nodes.clear();
    graph.leaves.clear();
    return Py_BuildValue(
        "(nO)", unattributed, pass.may_begin_with_leaf.load() ? Py_True : Py_False);
  });
}

// put_on(open, own) -> whether the hooks are on their Nodes now: not where another pass than these runs, whose engine reads
// the hooks of Nodes that both share.
PyObject* pass_put_on(PyObject* self, PyObject* args) {
  PyObject *open, *own_numbers;
  if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &open, &PyTuple_Type, &own_numbers)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    Buffers& graph = walked(own);
    if (!are_all_among(open, own_numbers)) {
      Py_RETURN_FALSE;
    }
    for (const Planned& one : graph.planned) {
      hook(own, *one.node, *one.state);
    }
    graph.planned.clear();
    graph.roots.clear();
    Py_RETURN_TRUE;
  });
}

// attach_leaves(places, given, leaf, name, is_off) -> [(which, variable, number of a Node that leads there)] of those that are
// left to Python. `places` is None where all are.
PyObject* pass_attach_leaves(PyObject* self, PyObject* args) {
  PyObject *places, *leaf;
  long long given;
  unsigned int name;
  int is_off;
  if (!PyArg_ParseTuple(args, "OLOIp", &places, &given, &leaf, &name, &is_off)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    const Buffers& graph = walked(own);
    Owned left(PyList_New(0));
    for (size_t which = 0; left && which < graph.leaves.size(); ++which) {
      const NodePtr& pointer = *graph.leaves[which].pointer;
      const auto& node = static_cast<const AccumulateGrad&>(*pointer);
      const Owned variable(THPVariable_Wrap(node.variable));
      const bool has_local = !is_off && node.variable.requires_grad();
      const LeafNames* names = nullptr;
      if (variable && places != Py_None && !(has_local && has_hooks(node))) {
        names = names_of(*own.pass->settings, variable.get(), places, given, leaf);
        if (PyErr_Occurred()) {
          return nullptr;
        }
      }
      if (names) {
        hook_leaf(own, pointer, name, *names, has_local);
        continue;
      }
      const Owned entry(
          variable ? Py_BuildValue(
                         "(nOK)", which, variable.get(), static_cast<unsigned long long>(graph.leaves[which].used_by))
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
    const NodePtr& leaf = *walked(own).leaves.at(which).pointer;
    if (has_local && has_hooks(static_cast<const AccumulateGrad&>(*leaf))) {
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
    return torch::autograd::functionToPyObject(*walked(of(self)).leaves.at(at).pointer);
  });
}

} // namespace
} // namespace gradtrace
