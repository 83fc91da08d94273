// The tensor summary in one pass over memory. Its laws stand in gradtrace_schemas/summary.py, and the tests hold this
// against that reference. Nothing here knows torch or Python; a thread keeps some memory for strided tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradtrace {

constexpr int kLanes = 16;
constexpr int64_t kChunk = 4096;

enum class Kind : uint8_t { f64, f32, f16, bf16 };

constexpr size_t width_of(Kind kind) {
  return kind == Kind::f64 ? 8 : kind == Kind::f32 ? 4 : 2;
}

// Norm squared, largest magnitude, sum and sketch are over the finite elements.
struct Numbers {
  double square = 0, abs_max = 0, sum = 0;
  int64_t nans = 0, infs = 0;
  uint64_t fingerprint = 0;
  double lanes[kLanes] = {};
};

// Splitmix64's finaliser, as `mixed` of the reference.
uint64_t mixed(uint64_t value, uint64_t seed);
uint64_t multiplier(uint64_t chunk);

// A strided tensor in logical order; strides count elements. Without `whole`: no fingerprint and no sketch.
// Any thread may call it. Throws std::bad_alloc alone.
Numbers summarised(
    Kind kind,
    const void* data,
    int dimensions,
    const int64_t* sizes,
    const int64_t* strides,
    bool whole);

// Whether two tensors over the same memory have the same elements in the same logical order, such as one and its view
// with another dimension of size 1.
bool is_same_order(
    int dimensions,
    const int64_t* sizes,
    const int64_t* strides,
    int other_dimensions,
    const int64_t* other_sizes,
    const int64_t* other_strides);

double value_of(Kind kind, const void* element);

// Which vector instructions are used: none (0), AVX2 (1), AVX-512 (2). What the processor has, unless a test asks for
// less. Gives what is used from now on.
int use_vectors(int wanted);

} // namespace gradtrace
