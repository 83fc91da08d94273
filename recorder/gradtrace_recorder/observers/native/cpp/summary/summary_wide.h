// The summary of a piece with vectors of 512 bits, a whole group at once. Part of summary.cpp.
#pragma once

#include "summary/summary_vectors.h"

namespace gradtrace {
namespace {

// What pieces of one span have added so far, before it is turned and flipped. Of finite elements within what float32
// can square, so that lanes of that type do for a span of them.
template <Kind kind>
struct alignas(64) Held {
  uint64_t words[8];
  std::conditional_t<kind == Kind::f64, double, float> lanes[kLanes];

  void clear() {
    std::memset(this, 0, sizeof *this);
  }

  void add_to(Numbers& to, uint64_t span) const {
    uint64_t sum = 0; // not by `_mm512_reduce_add_epi64`, which adds signed numbers
    for (const uint64_t word : words) {
      sum += word;
    }
    add_turned<kind>(sum, lanes, span, to);
  }
};

// What does not depend on the place, of all pieces.
struct alignas(64) Sums {
  double square[8] = {}, sum[8] = {};
  uint64_t largest[8] = {}; // each a float64, or two float32, without sign

  template <Kind kind>
  void add_to(Numbers& to) const {
    for (int k = 0; k < 8; ++k) {
      to.square += square[k];
      to.sum += sum[k];
      if constexpr (kind == Kind::f64) {
        double size;
        std::memcpy(&size, &largest[k], 8);
        to.abs_max = std::max(to.abs_max, size);
      } else {
        float sizes[2];
        std::memcpy(sizes, &largest[k], 8);
        to.abs_max = std::max<double>(to.abs_max, std::max(sizes[0], sizes[1]));
      }
    }
  }
};

#ifdef GRADTRACE_AVX2

GRADTRACE_WIDER_VECTORS inline void weighed(__m512i words, const int32_t* weights, __m512i& even, __m512i& odd) {
  const __m512i weight = _mm512_loadu_si512(weights);
  even = _mm512_add_epi64(even, _mm512_mul_epi32(words, weight));
  odd = _mm512_add_epi64(odd, _mm512_mul_epi32(_mm512_srli_epi64(words, 32), _mm512_srli_epi64(weight, 32)));
}

// Of `range`: the larger of two without their signs. Of `fpclass`: infinities and all kinds of NaN.
constexpr int kLargerSize = 0b1011, kNotFinite = 0x99;

// Adds a piece of one span: `count` and `place`, that of the first element in its chunk, are multiples of 16. Memory is
// fetched so many bytes `ahead`. Returns false, and adds nothing, where an element is not finite, or a square is more
// or less than float32 has: that is for `vector_part`.
template <Kind kind, bool whole>
GRADTRACE_WIDER_VECTORS bool wider_piece(
    const void* data, int64_t count, int64_t place, int64_t ahead, Held<kind>& held, Sums& to) {
  const Tables& of = tables();
  const int32_t* weights = of.weights + place;
  const uint8_t* turns = of.turns + place / kLanes;
  const uint16_t* signs = of.turned_bits + place / kLanes;
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  __m512d square = _mm512_load_pd(to.square), sum = _mm512_load_pd(to.sum), second_sum = _mm512_setzero_pd();
  __m512 lanes = _mm512_load_ps(held.lanes), largest = _mm512_setzero_ps();
  __m512i even = _mm512_setzero_si512(), odd = even;
  for (int64_t at = 0; at < count;) {
    // A few squares, and shorter values, add up in float32 without loss to speak of.
    const int64_t end = std::min(count, at + 16 * kLanes);
    __m512 few_squares = _mm512_setzero_ps(), few = few_squares;
    for (; at < end; at += kLanes) {
      __m512i words;
      __m512 values;
      if constexpr (kind == Kind::f32) {
        const float* from = static_cast<const float*>(data) + at;
        _mm_prefetch(reinterpret_cast<const char*>(from) + ahead, _MM_HINT_T0);
        words = _mm512_loadu_si512(from);
        values = _mm512_castsi512_ps(words);
      } else {
        const uint16_t* from = static_cast<const uint16_t*>(data) + at;
        _mm_prefetch(reinterpret_cast<const char*>(from) + ahead, _MM_HINT_T0);
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        words = _mm512_cvtepi16_epi32(bits);
        values = kind == Kind::f16 ? _mm512_cvtph_ps(bits) : _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
      }
      if constexpr (whole) {
        weighed(words, weights + at, even, odd);
        const __m512i order = _mm512_load_si512(of.wide_orders[turns[at / kLanes]]);
        const __m512i turned = _mm512_permutexvar_epi32(order, _mm512_castps_si512(values));
        lanes = _mm512_add_ps(
            lanes, _mm512_castsi512_ps(_mm512_mask_xor_epi32(turned, signs[at / kLanes], turned, sign)));
      }
      largest = _mm512_range_ps(values, largest, kLargerSize);
      few_squares = _mm512_fmadd_ps(values, values, few_squares);
      if constexpr (kind == Kind::f32) { // whose sum may be far larger than its norm
        sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(values)));
        second_sum = _mm512_add_pd(second_sum, _mm512_cvtps_pd(_mm512_extractf32x8_ps(values, 1)));
      } else {
        few = _mm512_add_ps(few, values);
      }
    }
    square = _mm512_add_pd(square, _mm512_cvtps_pd(_mm512_castps512_ps256(few_squares)));
    square = _mm512_add_pd(square, _mm512_cvtps_pd(_mm512_extractf32x8_ps(few_squares, 1)));
    if constexpr (kind != Kind::f32) {
      sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(few)));
      sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_extractf32x8_ps(few, 1)));
    }
  }
  if (_mm512_fpclass_pd_mask(square, kNotFinite)) { // what is not finite makes its square, or that of others, the same
    return false;
  }
  if constexpr (kind != Kind::f16) { // squares of numbers so small are less than float32 has
    const __m512 zero = _mm512_setzero_ps(), least = _mm512_set1_ps(1e-15f);
    if (!_mm512_cmp_ps_mask(largest, least, _CMP_GE_OQ) && _mm512_cmp_ps_mask(largest, zero, _CMP_NEQ_OQ)) {
      return false;
    }
  }
  _mm512_store_pd(to.square, square);
  _mm512_store_pd(to.sum, _mm512_add_pd(sum, second_sum));
  _mm512_store_ps(to.largest, _mm512_max_ps(largest, _mm512_load_ps(to.largest)));
  if constexpr (whole) {
    _mm512_store_ps(held.lanes, lanes);
    const __m512i words = _mm512_add_epi64(even, odd);
    _mm512_store_si512(held.words, _mm512_add_epi64(words, _mm512_load_si512(held.words)));
  }
  return true;
}

// The same of float64, whose group is two vectors.
template <bool whole>
GRADTRACE_WIDER_VECTORS bool wider_piece(
    const void* data, int64_t count, int64_t place, int64_t ahead, Held<Kind::f64>& held, Sums& to) {
  const Tables& of = tables();
  const int32_t* weights = weights_at<Kind::f64>(place);
  const uint8_t* turns = of.turns + place / kLanes;
  const uint16_t* signs = of.turned_bits + place / kLanes;
  const __m512i no_sign = _mm512_set1_epi64(0x7fffffffffffffff);
  const __m512d sign = _mm512_set1_pd(-0.0);
  __m512d square[2] = {_mm512_load_pd(to.square), _mm512_setzero_pd()}, sum[2] = {_mm512_load_pd(to.sum), square[1]};
  __m512d lanes[2] = {_mm512_load_pd(held.lanes), _mm512_load_pd(held.lanes + 8)};
  __m512i largest = _mm512_setzero_si512(), even = largest, odd = largest;
  for (int64_t at = 0; at < count; at += kLanes) {
    const double* from = static_cast<const double*>(data) + at;
    __m512d values[2];
    GRADTRACE_UNROLLED
    for (int half = 0; half < 2; ++half) {
      _mm_prefetch(reinterpret_cast<const char*>(from + 8 * half) + ahead, _MM_HINT_T0);
      values[half] = _mm512_loadu_pd(from + 8 * half);
      const __m512i words = _mm512_castpd_si512(values[half]);
      if constexpr (whole) {
        weighed(words, weights + 2 * at + 16 * half, even, odd);
      }
      largest = _mm512_max_epi64(largest, _mm512_and_si512(words, no_sign));
      square[half] = _mm512_fmadd_pd(values[half], values[half], square[half]);
      sum[half] = _mm512_add_pd(sum[half], values[half]);
    }
    if constexpr (whole) {
      const int32_t* order = of.wide_orders[turns[at / kLanes]];
      GRADTRACE_UNROLLED
      for (int half = 0; half < 2; ++half) {
        const __m512i places =
            _mm512_cvtepi32_epi64(_mm256_load_si256(reinterpret_cast<const __m256i*>(order + 8 * half)));
        const __m512d turned = _mm512_permutex2var_pd(values[0], places, values[1]);
        const __mmask8 minus = static_cast<__mmask8>(signs[at / kLanes] >> (8 * half));
        lanes[half] = _mm512_add_pd(lanes[half], _mm512_mask_xor_pd(turned, minus, turned, sign));
      }
    }
  }
  if (_mm512_cmpge_epi64_mask(largest, _mm512_set1_epi64(0x7ff0000000000000))) {
    return false;
  }
  _mm512_store_pd(to.square, _mm512_add_pd(square[0], square[1]));
  _mm512_store_pd(to.sum, _mm512_add_pd(sum[0], sum[1]));
  _mm512_store_si512(to.largest, _mm512_max_epi64(largest, _mm512_load_si512(to.largest)));
  if constexpr (whole) {
    _mm512_store_pd(held.lanes, lanes[0]);
    _mm512_store_pd(held.lanes + 8, lanes[1]);
    const __m512i words = _mm512_add_epi64(even, odd);
    _mm512_store_si512(held.words, _mm512_add_epi64(words, _mm512_load_si512(held.words)));
  }
  return true;
}

#endif

// Pieces of one span at a time, added up with what vectors there are.
template <Kind kind, bool whole>
class Adder {
 public:
  explicit Adder(int vectors_on) : vectors_on_(vectors_on) {}

  bool is_wide() const {
    return vectors_on_ > 1;
  }

  // Adds `count` elements, the first of which has that position in logical order: both are multiples of 16, and all
  // lie in one span. `held` is that span's, for this call and the next.
  void add(const void* data, int64_t count, int64_t position, int64_t ahead, Held<kind>& held) {
    const int64_t place = position % kChunk;
#ifdef GRADTRACE_AVX2
    if (vectors_on_ > 1) {
      if constexpr (kind == Kind::f64) {
        if (wider_piece<whole>(data, count, place, ahead, held, sums_)) {
          return;
        }
      } else if (wider_piece<kind, whole>(data, count, place, ahead, held, sums_)) {
        return;
      }
    }
    if (vectors_on_) {
      add_with_vectors<kind, whole>(data, count, place, position / kSpan<kind>, numbers_);
      return;
    }
#endif
    Part part;
    plain_part<kind, whole>(data, count, place, part);
    add(part, position / kSpan<kind>);
  }

  void add(const Part& part, uint64_t span) {
    add_part<kind, whole>(part, span, numbers_);
  }

  // What was added to `held` so far.
  void end(const Held<kind>& held, int64_t span) {
    if (whole && vectors_on_ > 1) {
      held.add_to(numbers_, span);
    }
  }

  const Numbers& all() {
    if (vectors_on_ > 1) {
      sums_.template add_to<kind>(numbers_);
    }
    return numbers_;
  }

 private:
  const int vectors_on_;
  Numbers numbers_;
  Sums sums_;
};

// Elements that lie in logical order, from a position that is a multiple of 16 on. So many bytes further on, memory is
// fetched: beyond the page that the processor looks ahead in by itself.
constexpr int64_t kAhead = 2048;

template <Kind kind, bool whole>
void add_run(const void* data, int64_t count, int64_t position, int64_t ahead, Adder<kind, whole>& to) {
  constexpr size_t width = width_of(kind);
  const char* at = static_cast<const char*>(data);
  while (count > 0) {
    const int64_t span = position / kSpan<kind>;
    const int64_t fit = std::min(count, (span + 1) * kSpan<kind> - position), even = fit / kLanes * kLanes;
    Held<kind> held;
    held.clear();
    if (even) {
      to.add(at, even, position, ahead, held);
    }
    if (fit != even) {
      // The last of a tensor, filled up to a group with zeros, which add nothing to any number.
      alignas(64) unsigned char group[kLanes * width] = {};
      std::memcpy(group, at + even * width, (fit - even) * width);
      to.add(group, kLanes, position + even, 0, held);
    }
    to.end(held, span);
    at += fit * width;
    position += fit;
    count -= fit;
  }
}

} // namespace
} // namespace gradtrace
