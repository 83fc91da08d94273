// One backward pass: what its hooks note before a Node, and write after it. Part of observer.cpp.
//
// What a hook may touch: its own `NodeState`, the pass, the journal. The GIL is taken in one case alone: a tensor that
// the vector summary does not know (an integer, a sparse one, a subclass), which Python then summarises.
#pragma once

#include "journal.h"
#include "tensors.h"

namespace gradtrace {
namespace {

// Where the fields lie in the records that hooks write. Python hands it over.
struct Fields {
  int64_t event_index, autograd_seq, node_name, root, module_fqn, call_index, occurrence, parameter_fqn, thread,
      start_ns, end_ns, grad_output_count, grad_input_count, grad_output_summary, grad_input_summary;
  int64_t tensor_event_index, tensor_direction, tensor_position, tensor_shape, tensor_summary;
  int64_t gradient_root, gradient_parameter_fqn, gradient_shape, gradient_summary;
};

template <class T>
void put(char* record, int64_t offset, const T& value) {
  std::memcpy(record + offset, &value, sizeof value);
}

// Whether the tables that Python's hooks lie in hold any. One that was emptied stays where it was. Torch keeps no others
// on a parameter; on a Node it may (a reducer's), which are asked for by name, as their types are not exported (2.13).
bool has_hooks(const at::Tensor& parameter) {
  const auto& all = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (!all) {
    return false;
  }
  const PyObject* table = static_cast<torch::autograd::PyFunctionTensorPostAccGradHooks&>(*all).dict;
  return !table || !PyDict_Check(table) || reinterpret_cast<const PyDictObject*>(table)->ma_used != 0;
}

bool has_hooks(const AccumulateGrad& leaf) {
  for (const auto& one : leaf.post_hooks()) {
    const auto& hook = *one;
    const PyObject* table = nullptr;
    if (std::strstr(typeid(hook).name(), "PyFunctionPostHook")) {
      table = static_cast<const torch::autograd::PyFunctionPostHook&>(hook).dict;
    }
    if (!table || !PyDict_Check(table) || reinterpret_cast<const PyDictObject*>(table)->ma_used != 0) {
      return true;
    }
  }
  return has_hooks(leaf.variable);
}

// What names an AccumulateGrad: as numbers of strings, and the frame that stands for the parameter's module.
struct LeafNames {
  int32_t root = kNullInt32;
  uint32_t holder = kNullString, parameter = kNullString;
  PyObject* frame = nullptr;
  PyObject* named = nullptr;
  bool is_parameter = true;
};

// What all passes of a recording share.
struct Settings {
  std::shared_ptr<Journal> journal;
  Fields fields = {};
  int node_kind = 0, tensor_kind = 0, gradient_kind = 0;
  bool is_off = true, is_whole = false;
  uint32_t dtypes[4] = {};
  uint32_t incoming = 0, outgoing = 0;
  int64_t zero_ns = 0;
  PyObject* foreign = nullptr; // (tensor) -> bytes of Foreign; called with the GIL
  std::unordered_map<PyObject*, LeafNames> leaves; // by the name's identity; under the GIL

  ~Settings() {
    // The last pass may go on any thread: with the engine's, when a graph ends.
    if (Py_IsInitialized()) {
      const PyGILState_STATE gil = PyGILState_Ensure();
      Py_XDECREF(foreign);
      for (const auto& [named, names] : leaves) {
        Py_DECREF(named);
        Py_DECREF(names.frame);
      }
      PyGILState_Release(gil);
    }
  }
};

// One Node in one pass: what is noted when it begins, and names it in its row.
struct NodeState {
  uint32_t name = 0, module_fqn = kNullString, parameter_fqn = kNullString;
  int32_t root = kNullInt32, call_index = kNullInt32;
  uint32_t occurrence = 0;
  int64_t number = kNullInt64;
  bool has_local = false, has_ended = false;
  AccumulateGrad* leaf = nullptr; // whose hook this state belongs to
  PyObject* frame = nullptr;      // borrowed: the pass owns it
  std::atomic<int32_t> index{-1};
  int64_t start = 0, thread = 0;
  // Of each gradient that came in: how many sizes (-1: there was none, -2: they cannot be told), dtype, sizes.
  c10::SmallVector<int64_t, 8> came_in;
};

struct Remembered {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  uint32_t version;
  Packed packed;
};

class Pass {
 public:
  std::shared_ptr<Settings> settings;
  std::vector<char> node_record, tensor_record, gradient_record; // with all that is the same for every Node
  RunningEntry running = {};
  std::atomic<int> task{-1};
  std::atomic<int32_t> next_index{0};
  std::atomic<bool> is_open{true};
  std::atomic<uint64_t> own_ticks{0};
  std::atomic<int64_t> late_hooks{0};
  const uint64_t began_ticks = ticks();
  const int64_t began_ns = now();
  std::unique_ptr<NodeState[]> states;
  size_t state_count = 0;
  std::mutex mutex; // of what follows
  std::string error;

  // The Node is about to run.
  void before(NodeState& state, const variable_list& gradients) noexcept {
    if (!is_open.load(std::memory_order_acquire)) {
      return;
    }
    try {
      const int current = torch::autograd::get_current_graph_task_id();
      int expected = -1;
      if (!task.compare_exchange_strong(expected, current) && expected != current) {
        return; // another pass runs it, a nested one: it has hooks of its own
      }
      state.came_in.clear();
      for (const at::Tensor& gradient : gradients) {
        note(state, gradient);
      }
      const int32_t index = next_index.fetch_add(1);
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
    } catch (const std::exception& failure) {
      fail(failure.what());
    } catch (...) {
      fail("an exception without a text");
    }
  }

  // The Node has run: `incoming` is what it got, `outgoing` what it gave.
  void after(NodeState& state, const variable_list& outgoing, const variable_list& incoming) noexcept {
    if (!is_open.load(std::memory_order_acquire) || state.index.load(std::memory_order_acquire) < 0) {
      return;
    }
    try {
      if (torch::autograd::get_current_graph_task_id() != task.load()) {
        return;
      }
      const int64_t end = now() - settings->zero_ns;
      const uint64_t entered = ticks();
      const int32_t index = state.index.exchange(-1);
      state.has_ended = true;
      record(state, index, end, outgoing, incoming);
      own_ticks.fetch_add(ticks() - entered, std::memory_order_relaxed);
    } catch (const std::exception& failure) {
      settings->journal->pop(state.thread);
      fail(failure.what());
    } catch (...) {
      settings->journal->pop(state.thread);
      fail("an exception without a text");
    }
  }

  void fail(const char* text) noexcept {
    is_open.store(false);
    try {
      std::lock_guard<std::mutex> held(mutex);
      if (error.empty()) {
        error = text;
      }
    } catch (...) {
    }
  }

  void forget() {
    std::lock_guard<std::mutex> held(mutex);
    remembered_.clear();
  }

 private:
  std::unordered_map<c10::TensorImpl*, Remembered> remembered_;

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

  Packed packed(const at::Tensor& tensor, Kind kind, const void* data) const {
    const Settings& of = *settings;
    const Numbers numbers = numbers_of(tensor, kind, data, of.is_whole);
    Packed packed;
    packed.numel = tensor.numel();
    packed.norm = std::sqrt(numbers.square);
    packed.abs_max = numbers.abs_max;
    packed.sum = numbers.sum;
    packed.nans = numbers.nans;
    packed.infs = numbers.infs;
    packed.fingerprint = numbers.fingerprint;
    for (int lane = 0; lane < kLanes; ++lane) {
      packed.sketch[lane] = narrowed(numbers.lanes[lane]);
    }
    packed.dtype = of.dtypes[static_cast<int>(kind)];
    packed.state = of.is_whole ? kStateFull : kStateNorms;
    return packed;
  }

  Foreign foreign(const at::Tensor& tensor) const {
    const PyGILState_STATE gil = PyGILState_Ensure();
    Foreign given;
    std::string trouble;
    PyObject* wrapped = THPVariable_Wrap(tensor);
    PyObject* bytes = wrapped ? PyObject_CallOneArg(settings->foreign, wrapped) : nullptr;
    if (bytes && PyBytes_Check(bytes) && PyBytes_GET_SIZE(bytes) == sizeof given) {
      std::memcpy(&given, PyBytes_AS_STRING(bytes), sizeof given);
    } else {
      trouble = raised();
    }
    Py_XDECREF(bytes);
    Py_XDECREF(wrapped);
    PyGILState_Release(gil);
    if (!trouble.empty()) {
      throw std::runtime_error(trouble);
    }
    return given;
  }

  // The text of what Python has just raised, which is over.
  static std::string raised() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    std::string text = type ? reinterpret_cast<PyTypeObject*>(type)->tp_name : "a summary of another size";
    PyObject* said = value ? PyObject_Str(value) : nullptr;
    const char* utf8 = said ? PyUnicode_AsUTF8(said) : nullptr;
    text += utf8 ? std::string(": ") + utf8 : "";
    PyErr_Clear();
    Py_XDECREF(said);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return text;
  }

  // The summary of a gradient, used again for the same tensor (which a weak reference proves) at the same version.
  Packed of_gradient(const at::Tensor& gradient, Shape* shape) {
    Kind kind;
    const void* data = readable(gradient, kind);
    if (!data) {
      const Foreign given = foreign(gradient);
      if (shape) {
        *shape = given.shape;
      }
      return given.packed;
    }
    if (shape) {
      *shape = shape_of(gradient);
    }
    if (gradient.is_inference()) {
      return packed(gradient, kind, data);
    }
    c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
    const uint32_t version = impl->version_counter().current_version();
    {
      std::lock_guard<std::mutex> held(mutex);
      const auto known = remembered_.find(impl);
      if (known != remembered_.end() && !known->second.tensor.expired() && known->second.version == version) {
        return known->second.packed;
      }
    }
    const Packed made = packed(gradient, kind, data);
    remember(gradient, made);
    return made;
  }

  void remember(const at::Tensor& gradient, const Packed& packed) {
    if (gradient.is_inference()) {
      return;
    }
    c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
    const uint32_t version = impl->version_counter().current_version();
    std::lock_guard<std::mutex> held(mutex);
    if (remembered_.size() > kMostRemembered) {
      remembered_.clear();
    }
    remembered_.insert_or_assign(
        impl,
        Remembered{c10::weak_intrusive_ptr<c10::TensorImpl>(gradient.getIntrusivePtr()), version, packed});
  }

  // The summary of a gradient that leaves: that of one that came in, where both are the same memory. Both are alive.
  Packed handed_on(
      const at::Tensor& gradient, const variable_list& incoming, const Few<Packed>& came, Shape* shape) {
    Kind kind, other;
    const void* data = readable(gradient, kind);
    if (data && gradient.numel() && gradient.is_contiguous() && !gradient.is_inference()) {
      for (size_t at = 0; at < incoming.size(); ++at) {
        const at::Tensor& one = incoming[at];
        if (one.defined() && !one.is_same(gradient) && readable(one, other) == data && other == kind &&
            one.numel() == gradient.numel() && one.is_contiguous() && !one.is_inference() &&
            one._version() == gradient._version()) {
          remember(gradient, came[at]);
          if (shape) {
            *shape = shape_of(gradient);
          }
          return came[at];
        }
      }
    }
    return of_gradient(gradient, shape);
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
        in[i] = of_gradient(incoming[i], &in_shapes[i]);
        in_parts[i] = &in[i];
      }
    }
    for (size_t i = 0; i < outgoing.size(); ++i) {
      if (outgoing[i].defined()) {
        out[i] = handed_on(outgoing[i], incoming, in, &out_shapes[i]);
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
    const Packed packed = of_gradient(gradient, &shape);
    Kind kind, other;
    if (incoming.size() == 1 && incoming[0].defined()) {
      const void* data = readable(gradient, kind);
      if (data && gradient.numel() && readable(incoming[0], other) == data && kind == other &&
          incoming[0].sizes() == gradient.sizes() && incoming[0].strides() == gradient.strides()) {
        remember(incoming[0], packed);
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

struct Before : torch::autograd::FunctionPreHook {
  Before(std::shared_ptr<Pass> pass, NodeState& state) : pass_(std::move(pass)), state_(state) {}
  variable_list operator()(const variable_list& gradients) override {
    pass_->before(state_, gradients);
    return gradients;
  }

 private:
  std::shared_ptr<Pass> pass_;
  NodeState& state_; // the pass's
};

struct After : torch::autograd::FunctionPostHook {
  After(std::shared_ptr<Pass> pass, NodeState& state) : pass_(std::move(pass)), state_(state) {}
  variable_list operator()(const variable_list& outgoing, const variable_list& incoming) override {
    pass_->after(state_, outgoing, incoming);
    return outgoing;
  }

 private:
  std::shared_ptr<Pass> pass_;
  NodeState& state_;
};

} // namespace
} // namespace gradtrace
