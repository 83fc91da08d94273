// A tensor's summary as the journal packs it, and the rules to combine several: see gradtrace_recorder/summaries/values.py.
// Part of observer.cpp, the one file that includes torch.
#pragma once

#include <pthread.h>
#ifdef __x86_64__
#include <x86intrin.h>
#endif
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
#include <vector>

#include "autograd/torch_versions.h"
#include "journal/record_layouts.h"
#include "summary/summary.h"

namespace gradtrace {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr uint64_t kNoSequenceNumber = std::numeric_limits<uint64_t>::max();
using layout::kNullInt32, layout::kNullInt64, layout::kNullString;
using layout::kStateFull, layout::kStateNone, layout::kStateNorms, layout::kStateShape;
using layout::Shape;

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

// A clock that is cheap to read, for what our own hooks take: whoever reads it turns ticks into nanoseconds.
uint64_t ticks() {
#ifdef __x86_64__
  return __rdtsc();
#else
  return static_cast<uint64_t>(now());
#endif
}

int64_t this_thread() {
  return static_cast<int64_t>(pthread_self());
}

// A summary as the journal's SUMMARY has it: of nothing, at first.
struct Packed : layout::Summary {
  Packed() {
    dtype = kNullString;
    state = kStateNone;
  }
};
static_assert(sizeof(Packed) == sizeof(layout::Summary) && kLanes == layout::kSketchLanes);

// What Python gives back for a tensor that is not summarised here.
#pragma pack(push, 1)
struct Foreign {
  Shape shape;
  Packed packed;
};
#pragma pack(pop)
static_assert(sizeof(Foreign) == sizeof(Shape) + sizeof(Packed));

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

// Whether they are the same elements in the same order. Both are plain, of one kind, and begin at the same place.
bool has_same_elements(const at::Tensor& one, const at::Tensor& other) {
  if (one.numel() != other.numel()) {
    return false;
  }
  return (one.is_contiguous() && other.is_contiguous()) ||
      is_same_order(
          static_cast<int>(one.dim()), one.sizes().data(), one.strides().data(), static_cast<int>(other.dim()),
          other.sizes().data(), other.strides().data());
}

Shape shape_of(const at::Tensor& tensor) {
  Shape shape;
  shape.ndim = static_cast<uint8_t>(std::min<int64_t>(tensor.dim(), layout::kMaxDimensions));
  for (int d = 0; d < shape.ndim; ++d) {
    shape.sizes[d] = tensor.size(d);
  }
  return shape;
}

// Of the few gradients that a Node has, without asking for memory.
template <class T>
using Few = c10::SmallVector<T, 4>;

// One summary for all gradients of a tuple: the rules are those of gradtrace_recorder/summaries/values.py.
Packed combined(const Few<const Packed*>& parts) {
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
  uint64_t fingerprint = 0;
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
    whole.abs_max = part->abs_max > whole.abs_max ? part->abs_max : whole.abs_max;
    whole.sum += part->sum;
    whole.nan_count += part->nan_count;
    whole.inf_count += part->inf_count;
    // Far from the chunks' multipliers, so that a tuple of tensors is no shard of anything.
    fingerprint += static_cast<uint64_t>(part->fingerprint) * multiplier((uint64_t{1} << 40) + at % 64);
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
  whole.fingerprint = static_cast<int64_t>(fingerprint);
  for (int lane = 0; lane < kLanes; ++lane) {
    whole.sketch[lane] = narrowed(lanes[lane]);
  }
  whole.state = is_norms ? kStateNorms : kStateFull;
  return whole;
}

} // namespace
} // namespace gradtrace
