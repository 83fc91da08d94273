// Summaries of the gradients of one pass, each computed once. Part of observer.cpp.
#pragma once

#include "autograd/raised.h"
#include "autograd/settings.h"

#include <bitset>
#include <optional>

namespace gradtrace {
namespace {

// A gradient that was summarised, and lives as long as the reference says so.
struct Remembered {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  uint32_t version;
  Packed packed;
};

// A gradient, and where it lies if it is a plain one; or none.
struct Read {
  const at::Tensor* tensor = nullptr;
  Kind kind = Kind::f32;
  const void* data = nullptr; // says the kind too, so it comes after it

  Read() = default;
  explicit Read(const at::Tensor& gradient) : tensor(&gradient), data(readable(gradient, kind)) {}
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
    return of(Read(gradient), shape);
  }

  Packed of(const Read& read, Shape* shape) {
    const at::Tensor& gradient = *read.tensor;
    if (!read.data) {
      if (const auto known = known_of(gradient)) { // its storage was freed since
        if (shape) {
          *shape = shape_of(gradient);
        }
        return *known;
      }
      const Foreign given = foreign(gradient);
      if (shape) {
        *shape = given.shape;
      }
      return given.packed;
    }
    if (shape) {
      *shape = shape_of(gradient);
    }
    if (const auto known = known_of(gradient)) {
      return *known;
    }
    const Packed made = packed(gradient, read.kind, read.data);
    remember(gradient, made);
    return made;
  }

  // One for all that are there.
  Packed of_all(const variable_list& gradients) {
    Few<Packed> each(gradients.size());
    Few<const Packed*> parts(gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) {
        each[i] = of(gradients[i], nullptr);
        parts[i] = &each[i];
      }
    }
    return combined(parts);
  }

  // That of a gradient that leaves: the one of a gradient that came in, where both are the same memory. All are alive.
  Packed handed_on(const at::Tensor& gradient, const Few<Read>& incoming, const Few<Packed>& came, Shape* shape) {
    const Read read(gradient);
    if (read.data && gradient.numel() && !gradient.is_inference()) {
      for (size_t at = 0; at < incoming.size(); ++at) {
        if (incoming[at].data != read.data || incoming[at].kind != read.kind) {
          continue;
        }
        const at::Tensor& one = *incoming[at].tensor;
        if (!one.is_same(gradient) && !one.is_inference() && has_same_elements(gradient, one) &&
            one._version() == gradient._version()) {
          remember(gradient, came[at]);
          if (shape) {
            *shape = shape_of(gradient);
          }
          return came[at];
        }
      }
    }
    return of(read, shape);
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
    // The count of weak references is all that is touched.
    new (table_ + at) Remembered{
        c10::weak_intrusive_ptr<c10::TensorImpl>::reclaim(c10::raw::intrusive_ptr::make_weak(impl)), version, packed};
    is_used_[at] = true;
  }

  void forget() {
    const std::lock_guard<Lock> held(lock_);
    if (!table_) {
      return;
    }
    for (size_t at = is_used_._Find_first(); at < kPlaces; at = is_used_._Find_next(at)) {
      table_[at].~Remembered();
    }
    is_used_.reset();
    settings_->remembered.give(table_, kPlaces * sizeof(Remembered));
    table_ = nullptr;
  }

 private:
  // A gradient has two places; whoever needs one that is taken has it, and the other is computed once more if it comes.
  // Most come again soon, and few places stay in the nearest cache.
  static constexpr size_t kPlaces = 64;

  const std::shared_ptr<Settings> settings_;
  Lock lock_; // of what follows
  Remembered* table_ = nullptr;
  std::bitset<kPlaces> is_used_;

  static size_t place_of(const c10::TensorImpl* impl) {
    return (reinterpret_cast<uintptr_t>(impl) >> 4) * 0x9E3779B97F4A7C15 >> 58;
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

  // What was summarised of this very tensor, at the version that it has.
  std::optional<Packed> known_of(const at::Tensor& gradient) {
    if (gradient.is_inference()) {
      return std::nullopt;
    }
    const c10::TensorImpl* impl = gradient.unsafeGetTensorImpl();
    const std::lock_guard<Lock> held(lock_);
    const Remembered* known = find(impl);
    if (known && known->version == impl->version_counter().current_version()) {
      return known->packed;
    }
    return std::nullopt;
  }

  Packed packed(const at::Tensor& tensor, Kind kind, const void* data) const {
    const Settings& of = *settings_;
    const Numbers numbers = numbers_of(tensor, kind, data, of.is_whole);
    Packed packed;
    packed.numel = tensor.numel();
    packed.norm = std::sqrt(numbers.square);
    packed.abs_max = numbers.abs_max;
    packed.sum = numbers.sum;
    packed.nan_count = numbers.nans;
    packed.inf_count = numbers.infs;
    packed.fingerprint = static_cast<int64_t>(numbers.fingerprint);
    for (int lane = 0; lane < kLanes; ++lane) {
      packed.sketch[lane] = narrowed(numbers.lanes[lane]);
    }
    packed.dtype = of.dtypes[static_cast<int>(kind)];
    packed.state = of.is_whole ? kStateFull : kStateNorms;
    return packed;
  }

  // Throws what `check_answer` does.
  Foreign foreign(const at::Tensor& tensor) const {
    Foreign given;
    const Gil gil;
    const Owned wrapped(THPVariable_Wrap(tensor));
    if (!wrapped) {
      PyErr_Clear();
      throw std::runtime_error("a gradient that Python cannot have");
    }
    const Owned bytes(called(settings_->foreign, wrapped.get()));
    check_answer(bytes.get());
    if (!PyBytes_Check(bytes.get()) || PyBytes_GET_SIZE(bytes.get()) != sizeof given) {
      throw std::runtime_error("a summary of another size");
    }
    std::memcpy(&given, PyBytes_AS_STRING(bytes.get()), sizeof given);
    return given;
  }
};

} // namespace
} // namespace gradtrace
