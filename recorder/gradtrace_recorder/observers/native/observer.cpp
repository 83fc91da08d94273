// The hooks on a graph's Nodes, and the walk that attaches them. The one file here that includes torch.
//
// What a hook may touch: its own `NodeState`, the pass, the journal. The GIL is taken in one case alone: a tensor that
// the vector summary does not know (an integer, a sparse one, a subclass), which Python then summarises. A Node's hooks
// are changed with the GIL held, while no pass runs anywhere: the engine reads them without a lock.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "journal.h"
#include "summary.h"

namespace gradtrace {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = decltype(torch::autograd::THPCppFunction::cdata);

constexpr uint64_t kNoSequenceNumber = std::numeric_limits<uint64_t>::max();
constexpr int32_t kNullInt32 = std::numeric_limits<int32_t>::min();
constexpr int64_t kNullInt64 = std::numeric_limits<int64_t>::min();
constexpr uint32_t kNullString = std::numeric_limits<uint32_t>::max();
constexpr uint8_t kNullBool = 255, kStateNone = 0, kStateFull = 1, kStateNorms = 2, kStateShape = 3;
constexpr int kMostSizes = 8;
constexpr size_t kMostRemembered = 4096;

// A Node is held by intrusive pointers (2.13), or by shared ones (older): what is kept of it is weak either way.
c10::weak_intrusive_ptr<Node> weakly(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}
template <class T>
std::weak_ptr<T> weakly(const std::shared_ptr<T>& node) {
  return node;
}
using WeakNode = decltype(weakly(std::declval<const NodePtr&>()));

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

int64_t this_thread() {
  return static_cast<int64_t>(pthread_self());
}

// A summary as the journal's SUMMARY has it.
#pragma pack(push, 1)
struct Packed {
  int64_t numel = 0;
  double norm = 0, abs_max = 0, sum = 0;
  int64_t nans = 0, infs = 0;
  uint64_t fingerprint = 0;
  float sketch[kLanes] = {};
  uint32_t dtype = kNullString;
  uint8_t state = kStateNone;
};
struct Shape {
  uint8_t count = 0;
  int64_t sizes[kMostSizes] = {};
};
// What Python gives back for a tensor that is not summarised here.
struct Foreign {
  Shape shape;
  Packed packed;
};
#pragma pack(pop)

float narrowed(double value) {
  constexpr double most = std::numeric_limits<float>::max();
  return static_cast<float>(std::min(std::max(value, -most), most));
}

bool kind_of(const at::Tensor& tensor, Kind& kind) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      kind = Kind::f64;
      return true;
    case at::kFloat:
      kind = Kind::f32;
      return true;
    case at::kHalf:
      kind = Kind::f16;
      return true;
    case at::kBFloat16:
      kind = Kind::bf16;
      return true;
    default:
      return false;
  }
}

// Whether the tensor is plain memory of this process: no subclass, no wrapper, no conjugate or negative view, not freed.
bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const uint64_t allowed = (c10::DispatchKeySet(DispatchKey::CPU) |
                                   c10::DispatchKeySet(DispatchKey::ADInplaceOrView) |
                                   c10::DispatchKeySet(DispatchKey::AutogradCPU) |
                                   c10::DispatchKeySet(DispatchKey::AutocastCPU))
                                      .raw_repr();
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if ((impl->key_set().raw_repr() & ~allowed) != 0 || !impl->has_storage() ||
      impl->has_symbolic_sizes_strides() || impl->layout() != c10::kStrided) {
    return false;
  }
  if (impl->numel() == 0) {
    return true;
  }
  int64_t last = impl->storage_offset();
  for (int64_t d = 0; d < impl->dim(); ++d) {
    last += (impl->sizes()[d] - 1) * impl->strides()[d];
  }
  const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  return storage->data() != nullptr &&
      static_cast<size_t>(last + 1) * impl->itemsize() <= storage->nbytes();
}

// Null for a tensor that is not for the vector summary.
const void* readable(const at::Tensor& tensor, Kind& kind) {
  if (!tensor.defined() || !kind_of(tensor, kind) || !is_plain(tensor)) {
    return nullptr;
  }
  const void* data = tensor.const_data_ptr();
  static const char nothing = 0;
  return tensor.numel() == 0 ? &nothing : data;
}

Numbers numbers_of(const at::Tensor& tensor, Kind kind, const void* data, bool whole) {
  return summarised(
      kind, data, static_cast<int>(tensor.dim()), tensor.sizes().data(), tensor.strides().data(), whole);
}

Shape shape_of(const at::Tensor& tensor) {
  Shape shape;
  shape.count = static_cast<uint8_t>(std::min<int64_t>(tensor.dim(), kMostSizes));
  for (int d = 0; d < shape.count; ++d) {
    shape.sizes[d] = tensor.size(d);
  }
  return shape;
}

// One summary for all gradients of a tuple: the rules are those of gradtrace_recorder/summaries/values.py.
Packed combined(const std::vector<const Packed*>& parts) {
  Packed whole;
  size_t count = 0, only = 0;
  bool is_unread = false, is_norms = false;
  for (size_t at = 0; at < parts.size(); ++at) {
    if (parts[at]) {
      ++count;
      only = at;
    }
  }
  if (count == 0) {
    return whole;
  }
  if (count == 1 && only == 0) {
    return *parts[0];
  }
  double square = 0, lanes[kLanes] = {};
  for (size_t at = 0; at < parts.size(); ++at) {
    const Packed* part = parts[at];
    if (!part) {
      continue;
    }
    if (whole.dtype == kNullString) {
      whole.dtype = part->dtype;
    }
    is_unread = is_unread || part->state == kStateShape;
    is_norms = is_norms || part->state == kStateNorms;
    whole.numel += part->numel;
    square += part->norm * part->norm;
    whole.abs_max = std::max<double>(whole.abs_max, part->abs_max);
    whole.sum += part->sum;
    whole.nans += part->nans;
    whole.infs += part->infs;
    // Far from the chunks' multipliers, so that a tuple of tensors is no shard of anything.
    whole.fingerprint += part->fingerprint * multiplier((uint64_t{1} << 40) + at % 64);
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[(lane + at) % kLanes] += part->sketch[lane];
    }
  }
  if (is_unread) {
    Packed unread;
    unread.numel = whole.numel;
    unread.dtype = whole.dtype;
    unread.state = kStateShape;
    return unread;
  }
  whole.norm = std::sqrt(square);
  for (int lane = 0; lane < kLanes; ++lane) {
    whole.sketch[lane] = narrowed(lanes[lane]);
  }
  whole.state = is_norms ? kStateNorms : kStateFull;
  return whole;
}

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

  ~Settings() {
    // The last pass may go on any thread: with the engine's, when a graph ends.
    if (foreign && Py_IsInitialized()) {
      const PyGILState_STATE gil = PyGILState_Ensure();
      Py_DECREF(foreign);
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
  bool has_local = false;
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
  std::atomic<int64_t> own_ns{0}, late_hooks{0};
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
      const int32_t index = state.index.exchange(-1);
      settings->journal->pop(state.thread);
      record(state, index, end, outgoing, incoming);
      own_ns.fetch_add(now() - settings->zero_ns - end, std::memory_order_relaxed);
    } catch (const std::exception& failure) {
      fail(failure.what());
    } catch (...) {
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
      const at::Tensor& gradient, const variable_list& incoming, const std::vector<Packed>& came, Shape* shape) {
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
      of.journal->append(of.node_kind, running.step, row);
      return;
    }
    if (state.has_local) {
      record_local(state, incoming);
    }
    std::vector<Packed> in(incoming.size()), out(outgoing.size());
    std::vector<Shape> in_shapes(incoming.size()), out_shapes(outgoing.size());
    std::vector<const Packed*> in_parts(incoming.size()), out_parts(outgoing.size());
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
    of.journal->append(of.node_kind, running.step, row);
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
    if (torch::autograd::impl::post_acc_grad_hooks(variable)) {
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
      const std::vector<const Packed*>& parts,
      const std::vector<Shape>& shapes) {
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

void let_go_of_frames(Attached& own) {
  std::vector<PyObject*> frames;
  frames.swap(own.frames);
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

// walk(roots) -> (count of Nodes, [(variable, number of a Node that leads there)] of the leaves)
PyObject* pass_walk(PyObject* self, PyObject* roots) {
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    std::unordered_set<const Node*> seen;
    seen.reserve(512);
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
      if (node && seen.insert(node.get()).second) {
        waiting.push_back({node.get(), 0});
      }
    }
    Py_DECREF(sequence);
    while (!waiting.empty()) {
      const Waiting next = waiting.back();
      waiting.pop_back();
      const uint64_t number = next.node->sequence_nr();
      if (number == kNoSequenceNumber && is_leaf(*next.node)) {
        own.leaves.push_back({number, next.node});
        own.used_by.push_back(next.used_by);
        continue;
      }
      own.nodes.push_back({number, next.node});
      for (const auto& edge : next.node->next_edges()) {
        Node* following = edge.function.get();
        if (following && seen.insert(following).second) {
          waiting.push_back({following, number});
        }
      }
    }
    const size_t count = own.nodes.size() + own.leaves.size();
    own.pass->states.reset(new NodeState[count]);
    own.hooked.reserve(count);
    PyObject* leaves = PyList_New(0);
    for (size_t i = 0; leaves && i < own.leaves.size(); ++i) {
      auto* leaf = static_cast<AccumulateGrad*>(own.leaves[i].node);
      PyObject* entry =
          Py_BuildValue("(NK)", THPVariable_Wrap(leaf->variable), static_cast<unsigned long long>(own.used_by[i]));
      if (!entry || PyList_Append(leaves, entry) < 0) {
        Py_CLEAR(leaves);
      }
      Py_XDECREF(entry);
    }
    return leaves ? Py_BuildValue("(nN)", static_cast<Py_ssize_t>(count), leaves) : nullptr;
  });
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

PyObject *root_name, *fqn_name, *call_index_name, *wanted_name, *root_call_name, *used_name;

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

// attach_leaf(which, name, root, holder, parameter, frame or None, has_local) -> whether it was: not where a hook sees
// the accumulated gradient before ours, and `has_local`.
PyObject* pass_attach_leaf(PyObject* self, PyObject* args) {
  Py_ssize_t which;
  unsigned int name, holder, parameter;
  int root, has_local;
  PyObject* frame;
  if (!PyArg_ParseTuple(args, "nIiIIOp", &which, &name, &root, &holder, &parameter, &frame, &has_local)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    Attached& own = of(self);
    auto* leaf = static_cast<AccumulateGrad*>(own.leaves.at(which).node);
    if (has_local && (torch::autograd::impl::post_acc_grad_hooks(leaf->variable) || !leaf->post_hooks().empty())) {
      Py_RETURN_FALSE;
    }
    NodeState& state = own.pass->states[own.pass->state_count++];
    state.name = name;
    state.root = root;
    state.module_fqn = holder;
    state.parameter_fqn = parameter;
    state.has_local = has_local;
    state.leaf = leaf;
    if (frame != Py_None) {
      state.frame = Py_NewRef(frame);
      own.frames.push_back(state.frame);
    }
    hook(own, *leaf, state);
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
  return PyLong_FromLongLong(of(self).pass->own_ns.load());
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
    {"walk", pass_walk, METH_O, "Find every Node that can be reached from the roots."},
    {"attach", pass_attach, METH_VARARGS, "Hook the Nodes that walk found."},
    {"attach_leaf", pass_attach_leaf, METH_VARARGS, "Hook an AccumulateGrad that walk found."},
    {"leaf", pass_leaf, METH_O, "An AccumulateGrad that walk found."},
    {"close", pass_close, METH_NOARGS, "Record no more; what is running."},
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
      {&wanted_name, "wanted"}, {&root_call_name, "root_call"}, {&used_name, "used"}};
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
