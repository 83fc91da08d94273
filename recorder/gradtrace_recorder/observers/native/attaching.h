// Methods of `Pass` that find a graph's Nodes and hook them. Part of observer.cpp.
#pragma once

#include "names.h"

namespace gradtrace {
namespace {

struct PyPass {
  PyObject_HEAD
  Attached* own;
};

Attached& of(PyObject* self) {
  return *reinterpret_cast<PyPass*>(self)->own;
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
    own.buffers = std::move(own.pass->settings->buffers);
    if (!own.buffers) {
      own.buffers = std::make_unique<Buffers>();
    }
    Buffers& graph = *own.buffers;
    graph.seen.clear();
    const Owned sequence(PySequence_Fast(roots, "the roots are a sequence"));
    if (!sequence) {
      return nullptr;
    }
    std::vector<Node*> first;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.get()); ++i) {
      const NodePtr node = pointer_to(PySequence_Fast_GET_ITEM(sequence.get(), i));
      if (node && graph.seen.insert(node.get())) {
        graph.waiting.push_back({0, node.get(), 0});
        first.push_back(node.get());
      }
    }
    while (!graph.waiting.empty()) {
      Found found = graph.waiting.back();
      graph.waiting.pop_back();
      found.number = found.node->sequence_nr();
      if (beyond != Py_None && std::find(first.begin(), first.end(), found.node) == first.end()) {
        const Owned key(PyLong_FromUnsignedLongLong(found.number));
        const int is_beyond = key ? PySet_Contains(beyond, key.get()) : -1;
        if (is_beyond < 0) {
          return nullptr;
        }
        if (is_beyond) {
          continue;
        }
      }
      if (found.number == kNoSequenceNumber && is_leaf(*found.node)) {
        graph.leaves.push_back(found);
        continue;
      }
      graph.nodes.push_back(found);
      for (const auto& edge : found.node->next_edges()) {
        Node* following = edge.function.get();
        if (following && graph.seen.insert(following)) {
          graph.waiting.push_back({0, following, found.number});
        }
      }
    }
    const size_t count = graph.nodes.size() + graph.leaves.size();
    own.pass->reserve(count);
    graph.hooked.reserve(count);
    return PyLong_FromSize_t(count);
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
      const NodeState& state = outer.pass->state(at); // a Node is hooked as its state is made
      if (state.index.load() < 0) {
        continue;
      }
      if (running || state.thread != this_thread()) {
        Py_RETURN_FALSE;
      }
      running = outer.buffers->hooked[at].node.lock();
    }
    return PyBool_FromLong(running && !of(self).buffers->seen.holds(running.get()));
  });
}

// The boundaries between calls, as `Attribution` has them, followed upwards from a number on.
class Boundaries {
 public:
  Boundaries(PyObject* numbers, PyObject* frames, uint64_t first)
      : numbers_(numbers), frames_(frames), count_(std::min(PyList_GET_SIZE(numbers), PyList_GET_SIZE(frames))) {
    Py_ssize_t high = count_;
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
    return at_ ? PyList_GET_ITEM(frames_, at_ - 1) : nullptr;
  }

 private:
  PyObject* const numbers_;
  PyObject* const frames_;
  const Py_ssize_t count_;
  Py_ssize_t at_ = 0; // the first that is beyond
  uint64_t next_;

  uint64_t number(Py_ssize_t at) const {
    return PyLong_AsUnsignedLongLong(PyList_GET_ITEM(numbers_, at));
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
    Buffers& graph = *own.buffers;
    Pass& pass = *own.pass;
    std::stable_sort(
        graph.nodes.begin(), graph.nodes.end(), [](const Found& a, const Found& b) { return a.number < b.number; });
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
      if (!name_of(*pass.settings, *found.node, string, name)) {
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
      hook(own, *found.node, state);
    }
    if (PyErr_Occurred()) {
      return nullptr;
    }
    // Where some modules are not wanted, their Nodes may come first.
    pass.may_begin_with_leaf = only_named != 0 || graph.nodes.empty();
    graph.nodes.clear();
    return Py_BuildValue(
        "(nO)", unattributed, pass.may_begin_with_leaf.load() ? Py_True : Py_False);
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
    for (size_t which = 0; left && which < own.buffers->leaves.size(); ++which) {
      auto& node = *static_cast<AccumulateGrad*>(own.buffers->leaves[which].node);
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
          variable ? Py_BuildValue("(nOK)", which, variable.get(), static_cast<unsigned long long>(own.buffers->leaves[which].used_by))
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
    auto& leaf = *static_cast<AccumulateGrad*>(own.buffers->leaves.at(which).node);
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
    return torch::autograd::functionToPyObject(of(self).buffers->leaves.at(at).node->getptr());
  });
}

} // namespace
} // namespace gradtrace
