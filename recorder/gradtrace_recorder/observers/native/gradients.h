// Summaries of the gradients of one pass, each computed once. Part of observer.cpp.
#pragma once

#include "settings.h"

#include <bitset>

namespace gradtrace {
namespace {

// A gradient that was summarised, and lives as long as the reference says so.
struct Remembered {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  uint32_t version;
  Packed packed;
};

// Any thread may call it.
class Gradients {
 public:
  explicit Gradients(std::shared_ptr<Settings> settings) : settings_(std::move(settings)) {}
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;
  ~Gradients() {
    forget();
  }

  // The summary of a gradient, used again for the same tensor (which a weak reference proves) at the same version.
  Packed of(const at::Tensor& gradient, Shape* shape) {
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
    const c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
    {
      const std::lock_guard<Lock> held(lock_);
      const Remembered* known = find(impl);
      if (known && known->version == impl->version_counter().current_version()) {
        return known->packed;
      }
    }
    const Packed made = packed(gradient, kind, data);
    remember(gradient, made);
    return made;
  }

  // That of a gradient that leaves: the one of a gradient that came in, where both are the same memory. Both are alive.
  Packed handed_on(
      const at::Tensor& gradient, const variable_list& incoming, const Few<Packed>& came, Shape* shape) {
    Kind kind, other;
    const void* data = readable(gradient, kind);
    if (data && gradient.numel() && gradient.is_contiguous() && !gradient.is_inference()) {
      for (size_t at = 0; at < incoming.size(); ++at) {
        const at::Tensor& one = incoming[at];
        if (one.defined() && !one.is_same(gradient) && one.numel() == gradient.numel() &&
            readable(one, other) == data && other == kind && one.is_contiguous() && !one.is_inference() &&
            one._version() == gradient._version()) {
          remember(gradient, came[at]);
          if (shape) {
            *shape = shape_of(gradient);
          }
          return came[at];
        }
      }
    }
    return of(gradient, shape);
  }

  void remember(const at::Tensor& gradient, const Packed& packed) {
    if (gradient.is_inference()) {
      return;
    }
    c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
    const uint32_t version = impl->version_counter().current_version();
    const std::lock_guard<Lock> held(lock_);
    if (!table_) {
      size_t size;
      table_ = static_cast<Remembered*>(settings_->remembered.take(kPlaces * sizeof(Remembered), size));
    }
    const Remembered* known = find(impl);
    size_t at = known ? static_cast<size_t>(known - table_) : place_of(impl);
    if (!known && is_used_[at] && !is_used_[at ^ 1]) {
      at ^= 1;
    }
    if (is_used_[at]) {
      table_[at].~Remembered();
    }
    new (table_ + at) Remembered{
        c10::weak_intrusive_ptr<c10::TensorImpl>(gradient.getIntrusivePtr()), version, packed};
    is_used_[at] = true;
  }

  void forget() {
    const std::lock_guard<Lock> held(lock_);
    if (!table_) {
      return;
    }
    for (size_t at = 0; at < kPlaces; ++at) {
      if (is_used_[at]) {
        table_[at].~Remembered();
      }
    }
    is_used_.reset();
    settings_->remembered.give(table_, kPlaces * sizeof(Remembered));
    table_ = nullptr;
  }

 private:
  // A gradient has two places; whoever needs one that is taken has it, and the other is computed once more if it comes.
  static constexpr size_t kPlaces = 1024;

  const std::shared_ptr<Settings> settings_;
  Lock lock_; // of what follows
  Remembered* table_ = nullptr;
  std::bitset<kPlaces> is_used_;

  static size_t place_of(const c10::TensorImpl* impl) {
    return (reinterpret_cast<uintptr_t>(impl) >> 4) * 0x9E3779B97F4A7C15 >> 54;
  }

  const Remembered* find(const c10::TensorImpl* impl) const {
    const size_t first = place_of(impl);
    for (const size_t at : {first, first ^ 1}) {
      if (table_ && is_used_[at] && table_[at].tensor._unsafe_get_target() == impl && !table_[at].tensor.expired()) {
        return table_ + at;
      }
    }
    return nullptr;
  }

  Packed packed(const at::Tensor& tensor, Kind kind, const void* data) const {
    const Settings& of = *settings_;
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

  // Throws std::runtime_error where that failed, and as `python_error` what a signal handler of the job's raised in it:
  // Ctrl-C reaches the job through the engine, as from a hook in Python.
  Foreign foreign(const at::Tensor& tensor) const {
    const PyGILState_STATE gil = PyGILState_Ensure();
    Foreign given;
    std::string trouble;
    python_error of_the_job;
    PyObject* wrapped = THPVariable_Wrap(tensor);
    PyObject* answer = wrapped ? PyObject_CallOneArg(settings_->foreign, wrapped) : nullptr;
    if (answer && PyBytes_Check(answer) && PyBytes_GET_SIZE(answer) == sizeof given) {
      std::memcpy(&given, PyBytes_AS_STRING(answer), sizeof given);
    } else if (wrapped && !answer) {
      of_the_job.persist();
    } else {
      trouble = answer && PyUnicode_Check(answer) ? text_of(answer) : raised();
    }
    Py_XDECREF(answer);
    Py_XDECREF(wrapped);
    PyGILState_Release(gil);
    if (of_the_job.type) {
      throw of_the_job;
    }
    if (!trouble.empty()) {
      throw std::runtime_error(trouble);
    }
    return given;
  }

  static std::string text_of(PyObject* unicode) {
    const char* utf8 = PyUnicode_AsUTF8(unicode);
    if (!utf8) {
      PyErr_Clear();
    }
    return utf8 ? utf8 : "a failure whose text is none";
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
};

} // namespace
} // namespace gradtrace
