// One backward pass: what its hooks note before a Node, and write after it. Part of observer.cpp.
//
// What a hook may touch: its own `NodeState`, the pass, the journal. The GIL is taken in one case alone: a tensor that
// the vector summary does not know (an integer, a sparse one, a subclass), which Python then summarises.
#pragma once

#include "gradients.h"
#include "others_hooks.h"

namespace gradtrace {
namespace {

class Pass;

// Where a hook lies: in its Node's state. The hook that a Node deletes gives back its hold on the pass, no memory.
struct HookPlace {
  Pass* pass = nullptr;
  alignas(16) unsigned char bytes[16] = {};
};

// One Node in one pass: what is noted when it begins, and names it in its row.
struct NodeState {
  uint32_t name = 0, module_fqn = kNullString, parameter_fqn = kNullString;
  int32_t root = kNullInt32, call_index = kNullInt32;
  uint32_t occurrence = 0;
  int64_t number = kNullInt64;
  bool has_local = false, has_ended = false;
  std::atomic<int32_t> index{-1};
  int64_t start = 0, thread = 0;
  uint64_t own_ticks = 0;
  HookPlace before, after;
  AccumulateGrad* leaf = nullptr; // whose hook this state belongs to
  PyObject* frame = nullptr;      // borrowed: the pass owns it
  // Of each gradient that came in: how many sizes (-1: there was none, -2: they cannot be told), dtype, sizes.
  c10::SmallVector<int64_t, 8> came_in;
};

// Held by the Python object and by every hook that is still on a Node: the last of them ends it.
class Pass {
 public:
  const std::shared_ptr<Settings> settings;
  std::vector<char> node_record, tensor_record, gradient_record; // with all that is the same for every Node
  RunningEntry running = {};
  std::atomic<int> task{-1};
  std::atomic<int32_t> next_index{0};
  std::atomic<bool> is_open{true};
  std::atomic<bool> may_begin_with_leaf{false};
  std::atomic<int64_t> late_hooks{0};
  const uint64_t began_ticks = ticks();
  const int64_t began_ns = now();
  size_t state_count = 0;
  Gradients gradients;

  explicit Pass(std::shared_ptr<Settings> shared) : settings(std::move(shared)), gradients(settings) {}
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  void hold() noexcept {
    holders_.fetch_add(1, std::memory_order_relaxed);
  }

  void let_go() noexcept {
    if (holders_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      delete this;
    }
  }

  // Room for the states of so many Nodes. Called once.
  void reserve(size_t count) {
    states_ = static_cast<NodeState*>(settings->states.take(std::max<size_t>(count, 1) * sizeof(NodeState), bytes_));
  }

  NodeState& add_state() {
    return *new (states_ + state_count++) NodeState();
  }

  NodeState& state(size_t at) const {
    return states_[at];
  }

  uint64_t own_ticks() const {
    uint64_t own = 0;
    for (size_t i = 0; i < state_count; ++i) {
      own += states_[i].own_ticks;
    }
    return own;
  }

  std::string error() const {
    const std::lock_guard<Lock> held(lock_);
    return error_;
  }

  // The Node is about to run.
  void before(NodeState& state, const variable_list& incoming) noexcept {
    if (!is_open.load(std::memory_order_acquire)) {
      return;
    }
    const uint64_t entered = ticks();
    try {
      const int current = torch::autograd::get_current_graph_task_id();
      if (!is_of_this_pass(current, state)) {
        return;
      }
      state.came_in.clear();
      for (const at::Tensor& gradient : incoming) {
        note(state, gradient);
      }
      const int32_t index = next_index.fetch_add(1, std::memory_order_relaxed);
      state.thread = this_thread();
      state.start = now() - settings->zero_ns;
      state.index.store(index, std::memory_order_release);
      RunningEntry entry = running;
      entry.node_name = state.name;
      entry.module_fqn = state.module_fqn;
      entry.root = state.root;
      entry.call_index = state.call_index;
      entry.event_index = index;
      entry.parameter_fqn = state.parameter_fqn;
      entry.autograd_seq = state.number;
      entry.start_ns = state.start;
      settings->journal->push(state.thread, entry);
      state.own_ticks += ticks() - entered;
    } catch (const std::exception& failure) {
      fail(failure.what());
    } catch (...) {
      fail("an exception without a text");
    }
  }

  // The Node has run: `incoming` is what it got, `outgoing` what it gave. Throws what a signal handler of the job's raised
  // while Python was asked, and nothing else.
  void after(NodeState& state, const variable_list& outgoing, const variable_list& incoming) {
    if (!is_open.load(std::memory_order_acquire)) {
      return;
    }
    const int32_t index = state.index.load(std::memory_order_acquire);
    if (index < 0) {
      return;
    }
    try {
      if (torch::autograd::get_current_graph_task_id() != task.load(std::memory_order_relaxed)) {
        return;
      }
      const int64_t end = now() - settings->zero_ns;
      const uint64_t entered = ticks();
      state.index.store(-1, std::memory_order_release);
      state.has_ended = true;
      record(state, index, end, outgoing, incoming);
      state.own_ticks += ticks() - entered;
    } catch (const python_error&) {
      settings->journal->pop(state.thread);
      throw;
    } catch (const std::exception& failure) {
      settings->journal->pop(state.thread);
      fail(failure.what());
    } catch (...) {
      settings->journal->pop(state.thread);
      fail("an exception without a text");
    }
  }

 private:
  std::atomic<int64_t> holders_{1};
  NodeState* states_ = nullptr;
  size_t bytes_ = 0;
  mutable Lock lock_; // of what follows
  std::string error_;

  ~Pass() {
    for (size_t i = 0; i < state_count; ++i) {
      states_[i].~NodeState();
    }
    if (states_) {
      settings->states.give(states_, bytes_);
    }
  }

  // Whether the engine runs the Node for this pass: another one, nested in it or beside it, has hooks of its own. The
  // first Node that runs tells; where it cannot be an AccumulateGrad, one that runs before it is run by a pass beside
  // this one, for a parameter of both.
  bool is_of_this_pass(int current, const NodeState& state) {
    int known = task.load(std::memory_order_relaxed);
    if (known == -1 && (!state.leaf || may_begin_with_leaf.load(std::memory_order_relaxed))) {
      return task.compare_exchange_strong(known, current) || known == current;
    }
    return known == current;
  }

  void fail(const char* text) noexcept {
    is_open.store(false);
    try {
      const std::lock_guard<Lock> held(lock_);
      if (error_.empty()) {
        error_ = text;
      }
    } catch (...) {
    }
  }

  static void note(NodeState& state, const at::Tensor& gradient) {
    auto& came_in = state.came_in;
    if (!gradient.defined()) {
      came_in.push_back(-1);
      return;
    }
    const c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
    const bool has_sizes = !impl->has_symbolic_sizes_strides() && !impl->is_nested();
    came_in.push_back(has_sizes ? gradient.dim() : -2);
    came_in.push_back(static_cast<int64_t>(gradient.scalar_type()));
    if (has_sizes) {
      came_in.append(gradient.sizes().begin(), gradient.sizes().end());
    }
  }

  void record(
      NodeState& state, int32_t index, int64_t end, const variable_list& outgoing, const variable_list& incoming) {
    const Settings& of = *settings;
    alignas(8) char row[2048];
    std::memcpy(row, node_record.data(), node_record.size());
    const Fields& at = of.fields;
    put(row, at.event_index, index);
    put(row, at.autograd_seq, state.number);
    put(row, at.node_name, state.name);
    put(row, at.root, state.root);
    put(row, at.module_fqn, state.module_fqn);
    put(row, at.call_index, state.call_index);
    put(row, at.occurrence, state.occurrence);
    put(row, at.parameter_fqn, state.parameter_fqn);
    put(row, at.thread, state.thread);
    put(row, at.start_ns, state.start);
    put(row, at.end_ns, end);
    const int32_t came = present(incoming), went = present(outgoing);
    put(row, at.grad_output_count, came);
    put(row, at.grad_input_count, went);
    if (of.is_off) {
      of.journal->finish(state.thread, of.node_kind, running.step, row);
      return;
    }
    if (state.has_local) {
      record_local(state, incoming);
    }
    Few<Packed> in(incoming.size()), out(outgoing.size());
    Few<Shape> in_shapes(incoming.size()), out_shapes(outgoing.size());
    Few<const Packed*> in_parts(incoming.size()), out_parts(outgoing.size());
    for (size_t i = 0; i < incoming.size(); ++i) {
      if (incoming[i].defined()) {
        in[i] = gradients.of(incoming[i], &in_shapes[i]);
        in_parts[i] = &in[i];
      }
    }
    for (size_t i = 0; i < outgoing.size(); ++i) {
      if (outgoing[i].defined()) {
        out[i] = gradients.handed_on(outgoing[i], incoming, in, &out_shapes[i]);
        out_parts[i] = &out[i];
      }
    }
    put(row, at.grad_output_summary, combined(in_parts));
    put(row, at.grad_input_summary, combined(out_parts));
    of.journal->finish(state.thread, of.node_kind, running.step, row);
    if (came > 1) {
      record_each(index, of.incoming, in_parts, in_shapes);
    }
    if (went > 1) {
      record_each(index, of.outgoing, out_parts, out_shapes);
    }
  }

  // The parameter's gradient as it was accumulated: this Node has no hook before ours, nor has the parameter one.
  void record_local(NodeState& state, const variable_list& incoming) {
    const Settings& of = *settings;
    const at::Tensor& variable = state.leaf->variable;
    if (has_hooks(variable)) {
      late_hooks.fetch_add(1); // it came while the pass ran, and has seen the gradient before us
      return;
    }
    const at::Tensor& gradient = variable.grad();
    if (!gradient.defined()) {
      return;
    }
    Shape shape;
    const Packed packed = gradients.of(gradient, &shape);
    Kind kind, other;
    if (incoming.size() == 1 && incoming[0].defined()) {
      const void* data = readable(gradient, kind);
      if (data && gradient.numel() && readable(incoming[0], other) == data && kind == other &&
          incoming[0].sizes() == gradient.sizes() && incoming[0].strides() == gradient.strides()) {
        gradients.remember(incoming[0], packed);
      }
    }
    alignas(8) char row[2048];
    std::memcpy(row, gradient_record.data(), gradient_record.size());
    put(row, of.fields.gradient_root, state.root);
    put(row, of.fields.gradient_parameter_fqn, state.parameter_fqn);
    put(row, of.fields.gradient_shape, shape);
    put(row, of.fields.gradient_summary, packed);
    of.journal->append(of.gradient_kind, running.step, row);
  }

  void record_each(
      int32_t index,
      uint32_t direction,
      const Few<const Packed*>& parts,
      const Few<Shape>& shapes) {
    const Settings& of = *settings;
    alignas(8) char row[2048];
    const std::lock_guard<Lock> held(of.journal->lock);
    for (size_t position = 0; position < parts.size(); ++position) {
      if (parts[position]) {
        std::memcpy(row, tensor_record.data(), tensor_record.size());
        put(row, of.fields.tensor_event_index, index);
        put(row, of.fields.tensor_direction, direction);
        put(row, of.fields.tensor_position, static_cast<int32_t>(position));
        put(row, of.fields.tensor_shape, shapes[position]);
        put(row, of.fields.tensor_summary, *parts[position]);
        of.journal->append(of.tensor_kind, running.step, row);
      }
    }
  }

  static int32_t present(const variable_list& gradients) {
    int32_t count = 0;
    for (const at::Tensor& gradient : gradients) {
      count += gradient.defined();
    }
    return count;
  }
};

// The engine calls hooks with lists of its own, which it replaces by what they give back (`call_pre_hooks` and
// `call_post_hooks` in torch/csrc/autograd/engine.cpp, alike in every version until 2.13): so a list is handed back as it
// is, not copied. The library is kept only if that holds where it was built (`build.py` tries it).
variable_list handed_back(const variable_list& list) {
  return std::move(const_cast<variable_list&>(list));
}

// Ends a hook of `place`: called by the `delete` of a Node.
void hook_is_gone(void* hook) noexcept {
  char* place = static_cast<char*>(hook) - offsetof(HookPlace, bytes);
  reinterpret_cast<HookPlace*>(place)->pass->let_go();
}

// Compiled autograd, in a pass inside or beside this one, asks each hook of a Node that both share, and fails on one of
// C++'s that does not answer. Nothing is to be compiled of ours. One of the two overrides torch's: it became const.
template <class Base>
struct NotCompiled : Base {
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) {}
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {}
};

struct Before : NotCompiled<torch::autograd::FunctionPreHook> {
  explicit Before(NodeState& state) : state_(state) {}
  variable_list operator()(const variable_list& incoming) override {
    state_.before.pass->before(state_, incoming);
    return handed_back(incoming);
  }
  static void operator delete(void* hook) {
    hook_is_gone(hook);
  }

 private:
  NodeState& state_;
};

struct After : NotCompiled<torch::autograd::FunctionPostHook> {
  explicit After(NodeState& state) : state_(state) {}
  variable_list operator()(const variable_list& outgoing, const variable_list& incoming) override {
    state_.after.pass->after(state_, outgoing, incoming);
    return handed_back(outgoing);
  }
  static void operator delete(void* hook) {
    hook_is_gone(hook);
  }

 private:
  NodeState& state_;
};

static_assert(sizeof(Before) <= sizeof(HookPlace::bytes) && sizeof(After) <= sizeof(HookPlace::bytes));

template <class Hook>
Hook* made_in(HookPlace& place, Pass& pass, NodeState& state) {
  pass.hold();
  place.pass = &pass;
  return ::new (static_cast<void*>(place.bytes)) Hook(state);
}

} // namespace
} // namespace gradtrace
