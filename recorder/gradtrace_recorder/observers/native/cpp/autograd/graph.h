// What is kept of a graph while its pass is watched: what a walk found, and which Nodes have hooks. Part of observer.cpp.
//
// A Node's hooks are changed with the GIL held, while no pass runs anywhere that may come to it: the engine reads them
// without a lock.
#pragma once

#include "autograd/hooks.h"
#include "python/python.h"

namespace gradtrace {
namespace {

bool is_leaf(const Node& node) {
  return typeid(node) == typeid(AccumulateGrad);
}

// The Nodes that a walk has seen: a table of pointers, at most half full.
class Seen {
 public:
  void clear() {
    std::fill(table_.begin(), table_.end(), nullptr);
    count_ = 0;
  }

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

  bool holds(const Node* node) {
    return place(node) != nullptr;
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
  NodeState* state;
};

// A Node that is to be hooked. What leads there holds it, and the caller the roots.
struct Planned {
  const NodePtr* node;
  NodeState* state;
};

struct Found {
  uint64_t number;
  const NodePtr* pointer; // where what leads there holds it
  uint64_t used_by;       // the number of a Node that leads there

  Node* node() const {
    return pointer->get();
  }
};

// What one call of a module means to its Nodes.
struct Call {
  PyObject* frame = nullptr; // null: outside any module, or not known
  int32_t root = kNullInt32, call_index = kNullInt32;
  uint32_t fqn = kNullString;
  bool is_wanted = true;
  c10::SmallVector<std::pair<uint32_t, uint32_t>, 8> occurrences;
};

// What a pass needs besides itself; the next pass has it when this one is over.
struct Buffers {
  Seen seen;
  // Between `walk` and `put_on`.
  std::vector<NodePtr> roots;
  std::vector<Planned> planned;
  std::vector<Found> waiting, nodes, leaves, sorted;
  std::vector<uint32_t> places; // in `nodes`, by number
  std::vector<Hooked> hooked;
  std::vector<PyObject*> frames;
  std::vector<Call> calls;
  std::unordered_map<PyObject*, size_t> call_of; // place in `calls`, by the frame

  void clear() {
    planned.clear();
    roots.clear();
    waiting.clear();
    nodes.clear();
    leaves.clear();
    hooked.clear();
    calls.clear();
    call_of.clear();
  }
};

Settings::Settings() = default;

void Settings::forget_places() {
  for (const auto& [variable, place] : leaf_places) {
    Py_DECREF(place.module);
    Py_DECREF(place.own);
  }
  leaf_places.clear();
}

Settings::~Settings() {
  // The last pass may go on any thread: with the engine's, when a graph ends. Of a Python that goes down nothing is
  // given back.
  if (Py_IsInitialized() && !is_python_ending()) {
    const PyGILState_STATE gil = coming_for_gil(PyGILState_Ensure);
    Py_XDECREF(foreign);
    Py_XDECREF(begins);
    Py_XDECREF(ends);
    forget_places();
    for (const auto& [named, names] : leaves) {
      Py_DECREF(named);
      Py_DECREF(names.frame);
    }
    for (const auto& [type, name] : node_names) {
      Py_XDECREF(name.text);
    }
    PyGILState_Release(gil);
  }
}

// What the Python object owns. Its hold on the pass is given back when it goes.
struct Attached {
  Pass* pass = nullptr;
  int64_t holds = 0; // on the pass, for hooks that are not yet, or no more, on a Node
  std::unique_ptr<Buffers> buffers;
};

void let_go_of_frames(Attached& own) {
  if (!own.buffers) {
    return;
  }
  std::vector<PyObject*> frames;
  frames.swap(own.buffers->frames);
  for (size_t i = 0; i < own.pass->state_count; ++i) {
    own.pass->state(i).frame = nullptr;
  }
  for (PyObject* frame : frames) {
    Py_DECREF(frame);
  }
}

// Whether a Node had that hook, which is on it no more. It has nothing to destroy.
template <class Hooks>
bool is_taken(Hooks& hooks, const void* wanted) {
  for (auto at = hooks.end(); at != hooks.begin();) {
    if ((--at)->get() == wanted) {
      (void)at->release();
      hooks.erase(at);
      return true;
    }
  }
  return false;
}

// Whether all calls into the engine that have not returned (a dict by number) are among these. No code of Python's runs
// here, and whoever calls the engine enters itself there before, with the GIL: so none begins before the GIL is let go of.
bool are_all_among(PyObject* open, PyObject* own) {
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(open, &at, &key, &value);) {
    bool is_own = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own) && !is_own; ++i) {
      is_own = PyLong_AsLongLong(PyTuple_GET_ITEM(own, i)) == PyLong_AsLongLong(key);
    }
    if (!is_own) {
      return false;
    }
  }
  return true;
}

// Takes the hooks off their Nodes. With the GIL, while no pass runs.
void take_off(Attached& own) {
  for (Hooked& hooked : own.buffers->hooked) {
    if (const NodePtr node = hooked.node.lock()) {
      own.holds += is_taken(node->pre_hooks(), hooked.state->before);
      own.holds += is_taken(node->post_hooks(), hooked.state->after);
    }
  }
  own.buffers->hooked.clear();
}

// Nothing of the graph is kept from here on. With the GIL.
void end(Attached& own) {
  let_go_of_frames(own);
  if (own.buffers) {
    own.buffers->clear();
    own.pass->settings->buffers = std::move(own.buffers);
  }
  own.pass->let_go(std::exchange(own.holds, 0));
}

void hook(Attached& own, const NodePtr& node, NodeState& state) {
  auto& before = node->pre_hooks();
  auto& after = node->post_hooks();
  // Room for a pass on another thread, which hooks what is left to Python while the engine goes through these lists.
  constexpr size_t kRoom = 3;
  before.reserve(before.size() + kRoom);
  after.reserve(after.size() + kRoom);
  state.pass = own.pass;
  own.buffers->hooked.push_back({weakly(node), &state});
  before.emplace_back(::new (static_cast<void*>(state.before)) Before(state));
  --own.holds;
  after.emplace_back(::new (static_cast<void*>(state.after)) After(state));
  --own.holds;
}

} // namespace
} // namespace gradtrace
