// The summary of a piece with vectors of 256 bits, where the processor has them. Part of summary.cpp.
#pragma once

#include "summary/summary_tables.h"
#include "summary/transposed.h"

#include <limits>

namespace gradtrace {
namespace {

#ifdef GRADTRACE_AVX2

GRADTRACE_VECTORS inline double total(__m256d a) {
  alignas(32) double four[4];
  _mm256_store_pd(four, a);
  return (four[0] + four[1]) + (four[2] + four[3]);
}

GRADTRACE_VECTORS inline uint64_t total(__m256i a) {
  alignas(32) uint64_t four[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(four), a);
  return four[0] + four[1] + four[2] + four[3];
}

// Eight elements as float32, and their words.
template <Kind kind>
GRADTRACE_VECTORS inline void eight(const void* data, int64_t at, __m256& values, __m256i& words) {
  if constexpr (kind == Kind::f32) {
    words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const float*>(data) + at));
    values = _mm256_castsi256_ps(words);
  } else {
    const __m128i bits =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(data) + at));
    words = _mm256_cvtepi16_epi32(bits);
    values = kind == Kind::f16 ? _mm256_cvtph_ps(bits)
                               : _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }
}

GRADTRACE_VECTORS inline void weighed(__m256i words, const int32_t* weights, __m256i& even, __m256i& odd) {
  const __m256i weight = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights));
  even = _mm256_add_epi64(even, _mm256_mul_epi32(words, weight));
  odd = _mm256_add_epi64(
      odd, _mm256_mul_epi32(_mm256_srli_epi64(words, 32), _mm256_srli_epi64(weight, 32)));
}

GRADTRACE_VECTORS inline void widened(__m256 eight, __m256d& first, __m256d& second) {
  first = _mm256_add_pd(first, _mm256_cvtps_pd(_mm256_castps256_ps128(eight)));
  second = _mm256_add_pd(second, _mm256_cvtps_pd(_mm256_extractf128_ps(eight, 1)));
}

// `count` is a multiple of 16, and so is `place`, that of the first in its chunk. Returns false, and nothing of use,
// where an element is not finite and is not `masked`.
template <Kind kind, bool whole, bool masked>
GRADTRACE_VECTORS bool vector_part(const void* data, int64_t count, int64_t place, Part& part) {
  const Tables& of = tables();
  const int32_t* weights = of.weights + place;
  const __m256i no_sign = _mm256_set1_epi32(0x7fffffff), infinity = _mm256_set1_epi32(0x7f800000);
  __m256d square[4], sum[4];
  for (int i = 0; i < 4; ++i) {
    square[i] = sum[i] = _mm256_setzero_pd();
  }
  // Of two-byte elements a few squares and values add up in float32 without loss to speak of.
  constexpr bool is_short = width_of(kind) == 2;
  __m256 few_squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, few[2] = {few_squares[0], few_squares[0]};
  __m256i largest = _mm256_setzero_si256(), even = largest, odd = largest;
  __m256 low = _mm256_setzero_ps(), high = low;
  int64_t nans = 0, odd_ones = 0;
  for (int64_t at = 0; at < count; at += kLanes) {
    __m256 a, b;
    __m256i words_a, words_b;
    eight<kind>(data, at, a, words_a);
    eight<kind>(data, at + 8, b, words_b);
    if constexpr (whole) {
      weighed(words_a, weights + at, even, odd);
      weighed(words_b, weights + at + 8, even, odd);
    }
    __m256i size_a = _mm256_and_si256(_mm256_castps_si256(a), no_sign);
    __m256i size_b = _mm256_and_si256(_mm256_castps_si256(b), no_sign);
    if constexpr (masked) {
      const __m256i finite_a = _mm256_cmpgt_epi32(infinity, size_a);
      const __m256i finite_b = _mm256_cmpgt_epi32(infinity, size_b);
      const int nan_a = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(size_a, infinity)));
      const int nan_b = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(size_b, infinity)));
      nans += __builtin_popcount(nan_a) + __builtin_popcount(nan_b);
      odd_ones += 16 - __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(finite_a))) -
          __builtin_popcount(_mm256_movemask_ps(_mm256_castsi256_ps(finite_b)));
      a = _mm256_and_ps(a, _mm256_castsi256_ps(finite_a));
      b = _mm256_and_ps(b, _mm256_castsi256_ps(finite_b));
      size_a = _mm256_and_si256(size_a, finite_a);
      size_b = _mm256_and_si256(size_b, finite_b);
    }
    largest = _mm256_max_epi32(largest, _mm256_max_epi32(size_a, size_b));
    if constexpr (is_short) {
      few_squares[0] = _mm256_fmadd_ps(a, a, few_squares[0]);
      few_squares[1] = _mm256_fmadd_ps(b, b, few_squares[1]);
      few[0] = _mm256_add_ps(few[0], a);
      few[1] = _mm256_add_ps(few[1], b);
      if (at % (16 * kLanes) == 15 * kLanes || at + kLanes == count) {
        for (int i = 0; i < 2; ++i) {
          widened(few_squares[i], square[2 * i], square[2 * i + 1]);
          widened(few[i], sum[2 * i], sum[2 * i + 1]);
          few_squares[i] = few[i] = _mm256_setzero_ps();
        }
      }
    } else {
      const __m256d wide[4] = {
          _mm256_cvtps_pd(_mm256_castps256_ps128(a)),
          _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)),
          _mm256_cvtps_pd(_mm256_castps256_ps128(b)),
          _mm256_cvtps_pd(_mm256_extractf128_ps(b, 1))};
      GRADTRACE_UNROLLED
      for (int i = 0; i < 4; ++i) {
        square[i] = _mm256_fmadd_pd(wide[i], wide[i], square[i]);
        sum[i] = _mm256_add_pd(sum[i], wide[i]);
      }
    }
    if constexpr (whole) {
      const int turn = of.turns[(place + at) / kLanes];
      const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(of.orders[turn & 7]));
      const __m256 halves = _mm256_castsi256_ps(_mm256_set1_epi32(turn & 8 ? -1 : 0));
      const float* signs = reinterpret_cast<const float*>(of.turned_signs + place + at);
      const __m256 first = _mm256_permutevar8x32_ps(_mm256_blendv_ps(a, b, halves), order);
      const __m256 second = _mm256_permutevar8x32_ps(_mm256_blendv_ps(b, a, halves), order);
      low = _mm256_add_ps(low, _mm256_xor_ps(first, _mm256_load_ps(signs)));
      high = _mm256_add_ps(high, _mm256_xor_ps(second, _mm256_load_ps(signs + 8)));
    }
  }
  alignas(32) int32_t sizes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(sizes), largest);
  const int32_t bits = *std::max_element(sizes, sizes + 8);
  if (!masked && bits >= 0x7f800000) {
    return false;
  }
  float abs_max;
  std::memcpy(&abs_max, &bits, 4);
  part.abs_max = abs_max;
  part.square = total(_mm256_add_pd(_mm256_add_pd(square[0], square[1]), _mm256_add_pd(square[2], square[3])));
  part.sum = total(_mm256_add_pd(_mm256_add_pd(sum[0], sum[1]), _mm256_add_pd(sum[2], sum[3])));
  part.nans = nans;
  part.infs = odd_ones - nans;
  if constexpr (whole) {
    part.words = total(even) + total(odd);
    alignas(32) float lanes[kLanes];
    _mm256_store_ps(lanes, low);
    _mm256_store_ps(lanes + 8, high);
    bool fits = true;
    for (int k = 0; k < kLanes; ++k) {
      part.lanes[k] = lanes[k];
      fits = fits && std::isfinite(lanes[k]);
    }
    if (!fits) { // finite elements whose float32 sum is none
      Part again;
      plain_part<kind, true>(data, count, place, again);
      std::copy(again.lanes, again.lanes + kLanes, part.lanes);
    }
  }
  if (kind == Kind::bf16 && abs_max > 0 && (abs_max < 1e-15f || abs_max > 1e17f)) { // squares that float32 has not
    Part again;
    plain_part<kind, false>(data, count, place, again);
    part.square = again.square;
    part.sum = again.sum;
  }
  return true;
}

template <bool whole, bool masked>
GRADTRACE_VECTORS bool wide_part(const double* data, int64_t count, int64_t place, Part& part) {
  const Tables& of = tables();
  const __m256d no_sign = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7fffffffffffffff));
  const __m256d infinity = _mm256_set1_pd(std::numeric_limits<double>::infinity());
  __m256d square[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()}, sum[2] = {square[0], square[0]};
  __m256d largest = square[0], unordered = square[0];
  alignas(32) double lanes[kLanes][kLanes];
  if constexpr (whole) {
    std::memset(lanes, 0, sizeof lanes);
  }
  int64_t nans = 0, odd_ones = 0;
  for (int64_t at = 0; at < count; at += kLanes) {
    double* into = lanes[of.turns[(place + at) / kLanes]];
    GRADTRACE_UNROLLED
    for (int k = 0; k < kLanes; k += 4) {
      __m256d a = _mm256_loadu_pd(data + at + k);
      __m256d size = _mm256_and_pd(a, no_sign);
      if constexpr (masked) {
        const __m256d finite = _mm256_cmp_pd(size, infinity, _CMP_LT_OQ);
        nans += __builtin_popcount(_mm256_movemask_pd(_mm256_cmp_pd(a, a, _CMP_UNORD_Q)));
        odd_ones += 4 - __builtin_popcount(_mm256_movemask_pd(finite));
        a = _mm256_and_pd(a, finite);
        size = _mm256_and_pd(size, finite);
      } else {
        unordered = _mm256_or_pd(unordered, _mm256_cmp_pd(size, infinity, _CMP_NLT_UQ));
      }
      largest = _mm256_max_pd(largest, size);
      square[(k / 4) & 1] = _mm256_fmadd_pd(a, a, square[(k / 4) & 1]);
      sum[(k / 4) & 1] = _mm256_add_pd(sum[(k / 4) & 1], a);
      if constexpr (whole) {
        const __m256d sign = _mm256_cvtps_pd(_mm_loadu_ps(of.signs + place + at + k));
        _mm256_store_pd(into + k, _mm256_fmadd_pd(a, sign, _mm256_load_pd(into + k)));
      }
    }
  }
  if (!masked && _mm256_movemask_pd(unordered)) {
    return false;
  }
  alignas(32) double sizes[4];
  _mm256_store_pd(sizes, largest);
  part.abs_max = *std::max_element(sizes, sizes + 4);
  part.square = total(_mm256_add_pd(square[0], square[1]));
  part.sum = total(_mm256_add_pd(sum[0], sum[1]));
  part.nans = nans;
  part.infs = odd_ones - nans;
  if constexpr (whole) {
    const int32_t* words = reinterpret_cast<const int32_t*>(data);
    const int32_t* weights = weights_at<Kind::f64>(place);
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (int64_t at = 0; at < 2 * count; at += 8) {
      weighed(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + at)), weights + at, even, odd);
    }
    part.words = total(even) + total(odd);
    std::fill(part.lanes, part.lanes + kLanes, 0.0);
    for (int turn = 0; turn < kLanes; ++turn) {
      for (int k = 0; k < kLanes; ++k) {
        part.lanes[k ^ turn] += lanes[turn][k];
      }
    }
  }
  return true;
}

// Adds a piece; `count` and `place` as above.
template <Kind kind, bool whole>
void add_with_vectors(const void* data, int64_t count, int64_t place, uint64_t span, Numbers& to) {
  Part part;
  if constexpr (kind == Kind::f64) {
    const double* values = static_cast<const double*>(data);
    if (!wide_part<whole, false>(values, count, place, part)) {
      wide_part<whole, true>(values, count, place, part);
    }
  } else if (!vector_part<kind, whole, false>(data, count, place, part)) {
    vector_part<kind, whole, true>(data, count, place, part);
  }
  add_part<kind, whole>(part, span, to);
}

#endif

} // namespace
} // namespace gradtrace
