#include "summary.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#if defined(__x86_64__) && defined(__GNUC__)
#define GRADTRACE_AVX2 1
#include <immintrin.h>
#endif

namespace gradtrace {
namespace {

constexpr uint64_t kWeightSeed = 0xA0761D6478BD642F;
constexpr uint64_t kMultiplierSeed = 0xD1B54A32D192ED03;
constexpr uint64_t kSketchSeed = 0x8CB92BA72F3D8DD7;
constexpr uint64_t kTurnSeed = 0xABC98388FB8FAC03;
constexpr int kGroups = kChunk / kLanes;

// What each place of a chunk has. `turned_signs` are the sign bits of a group's elements in the order of the lanes
// that they go to, so that a group is turned first.
struct Tables {
  alignas(64) int32_t weights[kChunk];
  alignas(64) uint32_t turned_signs[kChunk];
  alignas(64) int32_t orders[8][8];
  uint8_t turns[kGroups];
  float signs[kChunk];

  Tables() {
    for (int64_t j = 0; j < kChunk; ++j) {
      weights[j] = static_cast<int32_t>((mixed(j, kWeightSeed) >> 33) | 1);
      signs[j] = (mixed(j, kSketchSeed ^ kTurnSeed) & 1) ? -1.0f : 1.0f;
    }
    for (int g = 0; g < kGroups; ++g) {
      turns[g] = mixed(g, kSketchSeed) & 15;
      for (int k = 0; k < kLanes; ++k) {
        turned_signs[g * kLanes + (k ^ turns[g])] = signs[g * kLanes + k] < 0 ? 0x80000000u : 0;
      }
    }
    for (int turn = 0; turn < 8; ++turn) {
      for (int k = 0; k < 8; ++k) {
        orders[turn][k] = k ^ turn;
      }
    }
  }
};

const Tables& tables() {
  static const Tables made;
  return made;
}

// What one chunk adds, before it is turned and flipped.
struct Part {
  double square = 0, abs_max = 0, sum = 0;
  int64_t nans = 0, infs = 0;
  uint64_t words = 0;
  double lanes[kLanes] = {};
};

float half_value(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 0) {
    const float small = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -small : small;
  }
  const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  const uint32_t whole = sign | (wide << 23) | (fraction << 13);
  float value;
  std::memcpy(&value, &whole, 4);
  return value;
}

template <Kind kind>
double value_at(const void* data, int64_t i) {
  if constexpr (kind == Kind::f64) {
    return static_cast<const double*>(data)[i];
  } else if constexpr (kind == Kind::f32) {
    return static_cast<const float*>(data)[i];
  } else {
    const uint16_t bits = static_cast<const uint16_t*>(data)[i];
    if constexpr (kind == Kind::f16) {
      return half_value(bits);
    }
    const uint32_t whole = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &whole, 4);
    return value;
  }
}

template <Kind kind>
uint64_t word_sum(const void* data, int64_t count, const int32_t* weights) {
  uint64_t sum = 0;
  using Word = std::conditional_t<width_of(kind) == 2, int16_t, int32_t>;
  const Word* words = static_cast<const Word*>(data);
  for (int64_t i = 0; i < count; ++i) {
    sum += static_cast<uint64_t>(static_cast<int64_t>(words[i]) * weights[i]);
  }
  return sum;
}

template <Kind kind, bool whole>
void plain_part(const void* data, int64_t count, Part& part) {
  const Tables& of = tables();
  part = Part();
  for (int64_t i = 0; i < count; ++i) {
    const double value = value_at<kind>(data, i);
    if (!std::isfinite(value)) {
      std::isnan(value) ? ++part.nans : ++part.infs;
      continue;
    }
    part.square += value * value;
    part.sum += value;
    part.abs_max = std::max(part.abs_max, std::fabs(value));
    if constexpr (whole) {
      part.lanes[(i ^ of.turns[i / kLanes]) & 15] += of.signs[i] * value;
    }
  }
  if constexpr (whole && kind != Kind::f64) {
    part.words = word_sum<kind>(data, count, of.weights);
  }
}

#ifdef GRADTRACE_AVX2

#define GRADTRACE_VECTORS __attribute__((target("avx2,fma,f16c")))

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

// `count` is a multiple of 16. Returns false, and nothing of use, where an element is not finite and is not `masked`.
template <Kind kind, bool whole, bool masked>
GRADTRACE_VECTORS bool vector_part(const void* data, int64_t count, Part& part) {
  const Tables& of = tables();
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
      weighed(words_a, of.weights + at, even, odd);
      weighed(words_b, of.weights + at + 8, even, odd);
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
      for (int i = 0; i < 4; ++i) {
        square[i] = _mm256_fmadd_pd(wide[i], wide[i], square[i]);
        sum[i] = _mm256_add_pd(sum[i], wide[i]);
      }
    }
    if constexpr (whole) {
      const int turn = of.turns[at / kLanes];
      const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(of.orders[turn & 7]));
      const __m256 halves = _mm256_castsi256_ps(_mm256_set1_epi32(turn & 8 ? -1 : 0));
      const float* signs = reinterpret_cast<const float*>(of.turned_signs + at);
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
      plain_part<kind, true>(data, count, again);
      std::copy(again.lanes, again.lanes + kLanes, part.lanes);
    }
  }
  if (kind == Kind::bf16 && abs_max > 0 && (abs_max < 1e-15f || abs_max > 1e17f)) { // squares that float32 has not
    Part again;
    plain_part<kind, false>(data, count, again);
    part.square = again.square;
    part.sum = again.sum;
  }
  return true;
}

template <bool whole, bool masked>
GRADTRACE_VECTORS bool wide_part(const double* data, int64_t count, Part& part) {
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
    double* into = lanes[of.turns[at / kLanes]];
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
        const __m256d sign = _mm256_cvtps_pd(_mm_loadu_ps(of.signs + at + k));
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
    std::fill(part.lanes, part.lanes + kLanes, 0.0);
    for (int turn = 0; turn < kLanes; ++turn) {
      for (int k = 0; k < kLanes; ++k) {
        part.lanes[k ^ turn] += lanes[turn][k];
      }
    }
  }
  return true;
}

// Words of fp64; `count` is a multiple of 8, and they lie in one chunk.
GRADTRACE_VECTORS uint64_t vector_word_sum(const int32_t* words, int64_t count, const int32_t* weights) {
  __m256i even = _mm256_setzero_si256(), odd = even;
  for (int64_t at = 0; at < count; at += 8) {
    weighed(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + at)), weights + at, even, odd);
  }
  return total(even) + total(odd);
}

std::atomic<bool> vectors{
    __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")};

#else

std::atomic<bool> vectors{false};

#endif

template <Kind kind, bool whole>
void add_chunk(const void* data, int64_t count, uint64_t chunk, bool vectors_on, Numbers& to) {
  Part part;
#ifdef GRADTRACE_AVX2
  if (vectors_on) {
    const int64_t full = count / kLanes * kLanes;
    constexpr size_t width = width_of(kind);
    alignas(32) unsigned char padded[kChunk * width];
    if (full != count) {
      // The last chunk of a tensor, filled up to a group with zeros, which add nothing to any number.
      std::memcpy(padded, data, count * width);
      std::memset(padded + count * width, 0, (full + kLanes - count) * width);
      data = padded;
    }
    const int64_t filled = full != count ? full + kLanes : count;
    if constexpr (kind == Kind::f64) {
      const double* values = static_cast<const double*>(data);
      if (!wide_part<whole, false>(values, filled, part)) {
        wide_part<whole, true>(values, filled, part);
      }
    } else if (!vector_part<kind, whole, false>(data, filled, part)) {
      vector_part<kind, whole, true>(data, filled, part);
    }
    if constexpr (whole && kind == Kind::f64) {
      const int32_t* words = static_cast<const int32_t*>(data);
      const int64_t first = std::min<int64_t>(2 * filled, kChunk), second = 2 * filled - first;
      to.fingerprint += vector_word_sum(words, first, tables().weights) * multiplier(2 * chunk);
      to.fingerprint += second
          ? vector_word_sum(words + first, second, tables().weights) * multiplier(2 * chunk + 1)
          : 0;
    }
  } else
#endif
  {
    plain_part<kind, whole>(data, count, part);
    if constexpr (whole && kind == Kind::f64) {
      const int32_t* words = static_cast<const int32_t*>(data);
      const int64_t first = std::min<int64_t>(2 * count, kChunk), second = 2 * count - first;
      to.fingerprint += word_sum<kind>(words, first, tables().weights) * multiplier(2 * chunk);
      to.fingerprint += word_sum<kind>(words + first, second, tables().weights) * multiplier(2 * chunk + 1);
    }
  }
  to.square += part.square;
  to.abs_max = std::max(to.abs_max, part.abs_max);
  to.sum += part.sum;
  to.nans += part.nans;
  to.infs += part.infs;
  if constexpr (whole) {
    if constexpr (kind != Kind::f64) {
      to.fingerprint += part.words * multiplier(chunk);
    }
    const uint64_t drawn = chunk ? mixed(chunk, kTurnSeed) : 0;
    const int turn = drawn & 15;
    const double flip = (drawn >> 4) & 1 ? -1.0 : 1.0;
    for (int k = 0; k < kLanes; ++k) {
      to.lanes[k ^ turn] += flip * part.lanes[k];
    }
  }
}

// The next elements in logical order, contiguous; all but the last piece are whole chunks.
template <Kind kind, bool whole>
void add_run(const void* data, int64_t count, uint64_t& chunk, Numbers& to) {
  const bool vectors_on = vectors.load(std::memory_order_relaxed);
  const char* at = static_cast<const char*>(data);
  for (int64_t left = count; left > 0; left -= kChunk, at += kChunk * width_of(kind)) {
    add_chunk<kind, whole>(at, std::min(left, kChunk), chunk++, vectors_on, to);
  }
}

constexpr int kMostDimensions = 64;
constexpr int64_t kGathered = 16 * kChunk;

// Dimensions of size 1 dropped, and neighbours joined that lie in memory as one.
int joined(int dimensions, const int64_t* sizes, const int64_t* strides, int64_t* n, int64_t* s) {
  int left = 0;
  for (int d = 0; d < dimensions; ++d) {
    if (sizes[d] == 1) {
      continue;
    }
    if (left && s[left - 1] == strides[d] * sizes[d]) {
      n[left - 1] *= sizes[d];
      s[left - 1] = strides[d];
    } else {
      n[left] = sizes[d];
      s[left++] = strides[d];
    }
  }
  return left;
}

// Copies `rows` x `columns` in logical order. Where the rows are nearer to each other in memory than the columns (a
// transposed matrix), memory is read along them, in tiles.
template <class Word>
void gather_matrix(
    const Word* from, int64_t rows, int64_t row_stride, int64_t columns, int64_t column_stride, Word* to) {
  if (column_stride == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(to + i * columns, from + i * row_stride, columns * sizeof(Word));
    }
  } else if (std::abs(row_stride) < std::abs(column_stride)) {
    // By tiles, through a buffer: lines of memory that are a power of two apart drive each other out of the cache.
    constexpr int64_t tile = 16;
    Word held[tile][tile];
    for (int64_t i0 = 0; i0 < rows; i0 += tile) {
      const int64_t high = std::min(rows - i0, tile);
      for (int64_t j0 = 0; j0 < columns; j0 += tile) {
        const int64_t wide = std::min(columns - j0, tile);
        const Word* corner = from + i0 * row_stride + j0 * column_stride;
        Word* into = to + i0 * columns + j0;
        if (high == tile && wide == tile && row_stride == 1) {
          for (int64_t j = 0; j < tile; ++j) {
            std::memcpy(held[j], corner + j * column_stride, sizeof held[j]);
          }
          for (int64_t i = 0; i < tile; ++i) {
            Word line[tile];
            for (int64_t j = 0; j < tile; ++j) {
              line[j] = held[j][i];
            }
            std::memcpy(into + i * columns, line, sizeof line);
          }
          continue;
        }
        for (int64_t j = 0; j < wide; ++j) {
          for (int64_t i = 0; i < high; ++i) {
            into[i * columns + j] = corner[i * row_stride + j * column_stride];
          }
        }
      }
    }
  } else {
    for (int64_t i = 0; i < rows; ++i) {
      const Word* row = from + i * row_stride;
      for (int64_t j = 0; j < columns; ++j) {
        to[i * columns + j] = row[j * column_stride];
      }
    }
  }
}

// Walks a strided tensor in logical order, and hands it on in pieces of whole chunks.
template <Kind kind, bool whole>
class Gatherer {
 public:
  using Word = std::conditional_t<
      width_of(kind) == 8,
      uint64_t,
      std::conditional_t<width_of(kind) == 4, uint32_t, uint16_t>>;

  explicit Gatherer(Numbers& to) : to_(to), buffer_(new Word[kGathered]) {}

  void walk(const Word* from, int dimensions, const int64_t* n, const int64_t* s) {
    if (dimensions > 2) {
      for (int64_t i = 0; i < n[0]; ++i) {
        walk(from + i * s[0], dimensions - 1, n + 1, s + 1);
      }
      return;
    }
    const int64_t rows = dimensions == 2 ? n[0] : 1, row_stride = dimensions == 2 ? s[0] : 0;
    const int64_t columns = n[dimensions - 1], column_stride = s[dimensions - 1];
    for (int64_t i = 0; i < rows;) {
      const int64_t fit = (kGathered - held_) / columns;
      if (fit) {
        const int64_t count = std::min(fit, rows - i);
        gather_matrix(from + i * row_stride, count, row_stride, columns, column_stride, buffer_.get() + held_);
        held_ += count * columns;
        i += count;
        give(false);
        continue;
      }
      for (int64_t j = 0; j < columns;) { // a row that does not fit is cut
        const int64_t count = std::min(columns - j, kGathered - held_);
        gather_matrix(
            from + i * row_stride + j * column_stride, 1, 0, count, column_stride, buffer_.get() + held_);
        held_ += count;
        j += count;
        give(false);
      }
      ++i;
    }
  }

  void give(bool last) {
    if (held_ == kGathered || last) {
      add_run<kind, whole>(buffer_.get(), held_, chunk_, to_);
      held_ = 0;
    }
  }

 private:
  Numbers& to_;
  std::unique_ptr<Word[]> buffer_;
  int64_t held_ = 0;
  uint64_t chunk_ = 0;
};

template <Kind kind, bool whole>
Numbers summarised_as(const void* data, int dimensions, const int64_t* sizes, const int64_t* strides) {
  Numbers numbers;
  int64_t n[kMostDimensions], s[kMostDimensions];
  const int left = joined(dimensions, sizes, strides, n, s);
  if (left == 0 || (left == 1 && s[0] == 1)) {
    uint64_t chunk = 0;
    add_run<kind, whole>(data, left ? n[0] : 1, chunk, numbers);
    return numbers;
  }
  Gatherer<kind, whole> gatherer(numbers);
  gatherer.walk(static_cast<const typename Gatherer<kind, whole>::Word*>(data), left, n, s);
  gatherer.give(true);
  return numbers;
}

template <Kind kind>
Numbers summarised_as(
    const void* data, int dimensions, const int64_t* sizes, const int64_t* strides, bool whole) {
  return whole ? summarised_as<kind, true>(data, dimensions, sizes, strides)
               : summarised_as<kind, false>(data, dimensions, sizes, strides);
}

} // namespace

uint64_t mixed(uint64_t value, uint64_t seed) {
  uint64_t z = value + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

uint64_t multiplier(uint64_t chunk) {
  return mixed(chunk, kMultiplierSeed) | 1;
}

Numbers summarised(
    Kind kind,
    const void* data,
    int dimensions,
    const int64_t* sizes,
    const int64_t* strides,
    bool whole) {
  for (int d = 0; d < dimensions; ++d) {
    if (sizes[d] == 0) {
      return Numbers();
    }
  }
  switch (kind) {
    case Kind::f64:
      return summarised_as<Kind::f64>(data, dimensions, sizes, strides, whole);
    case Kind::f32:
      return summarised_as<Kind::f32>(data, dimensions, sizes, strides, whole);
    case Kind::f16:
      return summarised_as<Kind::f16>(data, dimensions, sizes, strides, whole);
    default:
      return summarised_as<Kind::bf16>(data, dimensions, sizes, strides, whole);
  }
}

bool uses_vectors() {
  return vectors.load();
}

void use_vectors(bool wanted) {
#ifdef GRADTRACE_AVX2
  static const bool can = vectors.load();
  vectors.store(wanted && can);
#else
  (void)wanted;
#endif
}

} // namespace gradtrace
