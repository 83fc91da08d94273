// One backward pass: what its hooks note before a Node, and write after it. Part of observer.cpp.
//
// What a hook may touch: its own `NodeState`, the pass, the journal. The GIL is taken in two cases alone: for a tensor
// that the vector summary does not know (an integer, a sparse one, a subclass), which Python then summarises, and for a
// Node that may make others.
#pragma once

#include "autograd/node_state.h"
#include "autograd/others_hooks.h"

namespace gradtrace {
namespace {

// Held by the Python object and by every hook that is still on a Node: the last of them ends it.
class Pass {
 public:
  const std::shared_ptr<Settings> settings;
  const layout::Running running;
  std::atomic<int> task{-1};
  std::atomic<int32_t> next_index{0};
  std::atomic<bool> is_open{true};
  std::atomic<bool> may_begin_with_leaf{false};
  std::atomic<int64_t> late_hooks{0};
  const int64_t thread = this_thread(); // that began it, and runs its Nodes but for those on a device
  const BothClocks began = both_clocks();
  size_t state_count = 0;
  Gradients gradients;

  // `about` has what is the same for every Node.
  Pass(std::shared_ptr<Settings> shared, const layout::Running& about)
      : settings(std::move(shared)),
        running(about),
        gradients(settings),
        node_(of_this_pass<layout::NodeEvents>(settings->node)),
        clock_(began, settings->tick_length.learn(began)) {
    auto& row = row_in<layout::NodeEvents>(node_.data());
    row.phase = running.phase;
    row.stage_index = running.stage_index;
    if (!settings->is_off) {
      tensor_ = of_this_pass<layout::NodeTensors>(settings->tensor);
      gradient_ = of_this_pass<layout::Gradients>(settings->gradient);
    }
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  void hold(int64_t times) noexcept {
    holders_.fetch_add(times, std::memory_order_relaxed);
  }

  void let_go(int64_t times = 1) noexcept {
    if (times && holders_.fetch_sub(times, std::memory_order_acq_rel) == times) {
      delete this;
    }
  }

  // Room for the states of so many Nodes. Once.
  void reserve(size_t count) {
    if (states_) {
      throw std::logic_error("a pass walks its graph once");
    }
    most_states_ = count;
    states_ = static_cast<NodeState*>(settings->states.take(std::max<size_t>(count, 1) * sizeof(NodeState), bytes_));
  }

  NodeState& add_state() {
    if (state_count == most_states_) {
      throw std::logic_error("more is hooked than was walked");
    }
    return *new (states_ + state_count++) NodeState();
  }

  NodeState& state(size_t at) const {
    return states_[at];
  }

  // What the hooks took. When no hook runs any more.
  uint64_t own_ticks() const {
    return own_ticks_ + others_ticks_.load(std::memory_order_relaxed);
  }

  std::string error() const {
    const std::lock_guard<Lock> held(lock_);
    return error_;
  }

  // The Node is about to run.
  void before(NodeState& state, const variable_list& incoming) {
    if (!is_open.load(std::memory_order_acquire)) {
      return;
    }
    const uint64_t entered = ticks();
    try {
      const int current = torch::autograd::get_current_graph_task_id();
      if (!is_of_this_pass(current, state)) {
        return;
      }
      state.thread = this_thread();
      const bool is_own = state.thread == thread;
      note(state, is_own, incoming);
      if (state.maker) {
        before_making(state, incoming);
      }
      const int32_t index = next_index.fetch_add(1, std::memory_order_relaxed);
      layout::Running entry = running;
      entry.node_name = state.name;
      entry.module_fqn = state.module_fqn;
      entry.root = state.root;
      entry.call_index = state.call_index;
      entry.event_index = index;
      entry.parameter_fqn = state.parameter_fqn;
      entry.autograd_seq = state.number;
      // As late as can be: what follows, a few stores, is the only work of ours that the Node's time holds.
      const uint64_t started = ticks();
      add_ticks(is_own, started - entered);
      entry.start_ns = state.start = time_of(started, is_own) - settings->zero_ns;
      state.index.store(index, std::memory_order_release);
      settings->journal->push(state.thread, entry);
    } catch (const python_error&) {
      throw; // the job's
    } catch (const abi::__forced_unwind&) {
      throw; // the thread ends: whoever keeps that ends the process
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
      const uint64_t ended = ticks();
      const bool is_own = state.thread == thread;
      const int64_t end = time_of(ended, is_own) - settings->zero_ns;
      state.index.store(-1, std::memory_order_release);
      state.has_ended = true;
      if (state.maker) {
        end_making(*settings, *state.maker);
      }
      forget_came_in(state);
      record(state, index, end, outgoing, incoming);
      add_ticks(is_own, ticks() - ended);
    } catch (const python_error&) {
      settings->journal->pop(state.thread);
      throw; // the job's
    } catch (const abi::__forced_unwind&) {
      throw; // as above
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
  Record node_, tensor_, gradient_; // with all that is the same for every Node
  NodeState* states_ = nullptr;
  size_t bytes_ = 0, most_states_ = 0;
  // Of the pass's own thread: its clock, what its hooks took, and of the Node that it runs what came in.
  PassClock clock_;
  uint64_t own_ticks_ = 0;
  CameIn came_in_;
  bool is_came_in_taken_ = false;
  std::atomic<uint64_t> others_ticks_{0};
  mutable Lock lock_; // of what follows
  std::string error_;

  ~Pass() {
    for (size_t i = 0; i < state_count; ++i) {
      forget_came_in(states_[i]);
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

  template <class Row>
  Record of_this_pass(const Record& record) const {
    Record own = record;
    auto& row = row_in<Row>(own.data());
    row.step = running.step;
    row.microbatch = running.microbatch;
    row.backward_index = running.backward_index;
    return own;
  }

  // All of a record but its two numbers.
  template <class Row>
  static Row& begin_row(char* place, const Record& record) {
    std::memcpy(place + 8, record.data() + 8, layout::kRecordBytes - 16);
    return row_in<Row>(place);
  }

  int64_t time_of(uint64_t moment, bool is_own) {
    return is_own ? clock_.at(moment) : now();
  }

  void add_ticks(bool is_own, uint64_t took) {
    if (is_own) {
      own_ticks_ += took;
    } else {
      others_ticks_.fetch_add(took, std::memory_order_relaxed);
    }
  }

  // A thread runs one Node of a pass at a time, but where a pass nested in it runs others of this one meanwhile.
  void note(NodeState& state, bool is_own, const variable_list& incoming) {
    if (!state.came_in) {
      if (is_own && !is_came_in_taken_) {
        is_came_in_taken_ = true;
        state.came_in = &came_in_;
      } else {
        state.came_in = new CameIn();
      }
    }
    CameIn& came_in = *state.came_in;
    came_in.clear();
    for (const at::Tensor& gradient : incoming) {
      if (!gradient.defined()) {
        came_in.push_back(-1);
        continue;
      }
      const c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
      const bool has_sizes = !impl->has_symbolic_sizes_strides() && !impl->is_nested();
      const c10::IntArrayRef sizes = has_sizes ? gradient.sizes() : c10::IntArrayRef();
      came_in.push_back(has_sizes ? static_cast<int64_t>(sizes.size()) : -2);
      came_in.push_back(static_cast<int64_t>(gradient.scalar_type()));
      came_in.append(sizes.begin(), sizes.end());
    }
  }

  void forget_came_in(NodeState& state) {
    if (state.came_in == &came_in_) {
      is_came_in_taken_ = false;
    } else {
      delete state.came_in;
    }
    state.came_in = nullptr;
  }

  // A Function may change what came in: it is summarised before, too.
  void before_making(NodeState& state, const variable_list& incoming) {
    if (state.maker->is_python && !settings->is_off) {
      state.maker->before = gradients.of_all(incoming);
    }
    begin_making(*settings, *state.maker, state.frame);
  }

  void record(
      NodeState& state, int32_t index, int64_t end, const variable_list& outgoing, const variable_list& incoming) {
    const Settings& of = *settings;
    const int32_t came = present(incoming), went = present(outgoing);
    const auto fill = [&](char* place) -> layout::NodeEvents& {
      auto& row = begin_row<layout::NodeEvents>(place, node_);
      row.event_index = index;
      row.autograd_seq = state.number;
      row.node_name = state.name;
      row.root = state.root;
      row.module_fqn = state.module_fqn;
      row.call_index = state.call_index;
      row.occurrence = static_cast<int32_t>(state.occurrence);
      row.parameter_fqn = state.parameter_fqn;
      row.thread = state.thread;
      row.start_ns = state.start;
      row.end_ns = end;
      row.grad_output_count = came;
      row.grad_input_count = went;
      return row;
    };
    if (of.is_off) {
      of.journal->finish(state.thread, layout::kKindNodeEvents, running.step, fill);
      return;
    }
    if (state.has_local) {
      record_local(state, incoming);
    }
    Few<Read> read(incoming.size());
    Few<Packed> in(incoming.size()), out(outgoing.size());
    Few<Shape> in_shapes(incoming.size()), out_shapes(outgoing.size());
    Few<const Packed*> in_parts(incoming.size()), out_parts(outgoing.size());
    for (size_t i = 0; i < incoming.size(); ++i) {
      if (incoming[i].defined()) {
        read[i] = Read(incoming[i]);
        in[i] = gradients.of(read[i], &in_shapes[i]);
        in_parts[i] = &in[i];
      }
    }
    for (size_t i = 0; i < outgoing.size(); ++i) {
      if (outgoing[i].defined()) {
        out[i] = gradients.handed_on(outgoing[i], read, in, &out_shapes[i]);
        out_parts[i] = &out[i];
      }
    }
    const Packed all_in = of.journal->seen(combined(in_parts)), all_out = of.journal->seen(combined(out_parts));
    const bool is_function = state.maker && state.maker->is_python;
    of.journal->finish(state.thread, layout::kKindNodeEvents, running.step, [&](char* place) {
      auto& row = fill(place);
      row.grad_output_summary = all_in;
      row.grad_input_summary = all_out;
      if (is_function) {
        row.grad_output_mutated = state.maker->before.fingerprint != all_in.fingerprint;
      }
    });
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
    if (has_hooks_now(variable)) {
      late_hooks.fetch_add(1); // it came while the pass ran, and has seen the gradient before us
      return;
    }
    // Held: another thread may set `.grad` to something else meanwhile, and nobody else would hold it then.
    const at::Tensor gradient = variable.grad();
    if (!gradient.defined()) {
      return;
    }
    Shape shape;
    const Read read(gradient);
    const Packed packed = gradients.of(read, &shape);
    if (read.data && gradient.numel() && incoming.size() == 1 && incoming[0].defined()) {
      const Read came(incoming[0]);
      if (came.data == read.data && came.kind == read.kind && has_same_elements(gradient, incoming[0])) {
        gradients.remember(incoming[0], packed);
      }
    }
    of.journal->write(layout::kKindGradients, running.step, [&](char* place) {
      auto& row = begin_row<layout::Gradients>(place, gradient_);
      row.root = state.root;
      row.parameter_fqn = state.parameter_fqn;
      row.shape = shape;
      row.summary = of.journal->seen(packed);
    });
  }

  void record_each(
      int32_t index,
      uint32_t direction,
      const Few<const Packed*>& parts,
      const Few<Shape>& shapes) {
    const Settings& of = *settings;
    const std::lock_guard<Lock> held(of.journal->lock);
    for (size_t position = 0; position < parts.size(); ++position) {
      if (parts[position]) {
        of.journal->write(layout::kKindNodeTensors, running.step, [&](char* place) {
          auto& row = begin_row<layout::NodeTensors>(place, tensor_);
          row.event_index = index;
          row.direction = direction;
          row.position = static_cast<int32_t>(position);
          row.shape = shapes[position];
          row.summary = *parts[position];
        });
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

} // namespace
} // namespace gradtrace
