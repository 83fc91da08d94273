// Which vectors the processor has, and tiles of a strided matrix turned into rows. Part of summary.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define GRADTRACE_AVX2 1
#define GRADTRACE_VECTORS __attribute__((target("avx2,fma,f16c")))
#define GRADTRACE_WIDER_VECTORS \
  __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2")))
#include <immintrin.h>
// What is in arrays of vectors stays in registers only where loops over them are gone.
#define GRADTRACE_UNROLLED _Pragma("GCC unroll 16")
#endif

namespace gradtrace {
namespace {

#ifdef GRADTRACE_AVX2

// With vectors of 512 bits older processors slow down for whatever else they run: those that came after them are told by
// an instruction that they had first.
int best_vectors() {
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))) {
    return 0;
  }
  const bool is_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vbmi2");
  return is_wide ? 2 : 1;
}

std::atomic<int> vectors{best_vectors()};

#else

std::atomic<int> vectors{0};

#endif

#ifdef GRADTRACE_AVX2

// Turns 8 x 8 elements: eight lie next to each other in each column, where `columns` tells how far from `from` it
// begins, and then in each row, from `at` on.
GRADTRACE_VECTORS inline void turn_eight(
    const uint32_t* from, const int64_t* columns, uint32_t* const* rows, int64_t at) {
  __m256 r[8], s[8];
  GRADTRACE_UNROLLED
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + columns[i]));
  }
  GRADTRACE_UNROLLED
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  GRADTRACE_UNROLLED
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xEE);
  }
  GRADTRACE_UNROLLED
  for (int i = 0; i < 4; ++i) {
    const __m256 first = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    const __m256 second = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    _mm256_storeu_ps(reinterpret_cast<float*>(rows[i] + at), first);
    _mm256_storeu_ps(reinterpret_cast<float*>(rows[i + 4] + at), second);
  }
}

// The same of 16-bit elements.
GRADTRACE_VECTORS inline void turn_eight(
    const uint16_t* from, const int64_t* columns, uint16_t* const* rows, int64_t at) {
  __m128i r[8], s[8];
  GRADTRACE_UNROLLED
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + columns[i]));
  }
  GRADTRACE_UNROLLED
  for (int i = 0; i < 4; ++i) {
    s[2 * i] = _mm_unpacklo_epi16(r[i], r[i + 4]);
    s[2 * i + 1] = _mm_unpackhi_epi16(r[i], r[i + 4]);
  }
  GRADTRACE_UNROLLED
  for (int i = 0; i < 4; ++i) {
    r[2 * i] = _mm_unpacklo_epi16(s[i], s[i + 4]);
    r[2 * i + 1] = _mm_unpackhi_epi16(s[i], s[i + 4]);
  }
  GRADTRACE_UNROLLED
  for (int i = 0; i < 4; ++i) {
    const __m128i low = _mm_unpacklo_epi16(r[i], r[i + 4]), high = _mm_unpackhi_epi16(r[i], r[i + 4]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rows[2 * i] + at), low);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rows[2 * i + 1] + at), high);
  }
}

// Turns 16 columns of a line of the cache each, or of its first `high` elements: 16 elements are written to each of so
// many rows, from `at` on, zeros where there is no column (`wide` is how many there are). A line is read once.
template <bool full>
GRADTRACE_WIDER_VECTORS inline void turn_lines(
    const uint32_t* from, const int64_t* columns, int high, int wide, uint32_t* const* rows, int64_t at) {
  const __mmask16 mask = static_cast<__mmask16>((1u << high) - 1);
  __m512i r[16], s[16];
  GRADTRACE_UNROLLED
  for (int j = 0; j < 16; ++j) {
    r[j] = full    ? _mm512_loadu_si512(from + columns[j])
        : j < wide ? _mm512_maskz_loadu_epi32(mask, from + columns[j])
                   : _mm512_setzero_si512();
  }
  GRADTRACE_UNROLLED
  for (int j = 0; j < 16; j += 2) { // pairs of columns, of four pairs of rows
    s[j] = _mm512_unpacklo_epi32(r[j], r[j + 1]);
    s[j + 1] = _mm512_unpackhi_epi32(r[j], r[j + 1]);
  }
  GRADTRACE_UNROLLED
  for (int j = 0; j < 16; j += 4) { // rows j % 4, 4 + j % 4, ... of four columns
    r[j] = _mm512_unpacklo_epi64(s[j], s[j + 2]);
    r[j + 1] = _mm512_unpackhi_epi64(s[j], s[j + 2]);
    r[j + 2] = _mm512_unpacklo_epi64(s[j + 1], s[j + 3]);
    r[j + 3] = _mm512_unpackhi_epi64(s[j + 1], s[j + 3]);
  }
  GRADTRACE_UNROLLED
  for (int i = 0; i < 4; ++i) {
    const __m512i first = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    const __m512i second = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    const __m512i third = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i fourth = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    s[i] = _mm512_shuffle_i32x4(first, third, 0x88);
    s[i + 4] = _mm512_shuffle_i32x4(second, fourth, 0x88);
    s[i + 8] = _mm512_shuffle_i32x4(first, third, 0xDD);
    s[i + 12] = _mm512_shuffle_i32x4(second, fourth, 0xDD);
  }
  GRADTRACE_UNROLLED
  for (int i = 0; i < 16; ++i) {
    if (full || i < high) {
      _mm512_storeu_si512(rows[i] + at, s[i]);
    }
  }
}

template <bool full>
GRADTRACE_WIDER_VECTORS inline void turn_lines(
    const uint64_t* from, const int64_t* columns, int high, int wide, uint64_t* const* rows, int64_t at) {
  const __mmask8 mask = static_cast<__mmask8>((1u << high) - 1);
  __m512i turned[2][8];
  GRADTRACE_UNROLLED
  for (int half = 0; half < 2; ++half) {
    __m512i s[8];
    __m512i* r = turned[half];
    GRADTRACE_UNROLLED
    for (int j = 0; j < 8; ++j) {
      const int64_t* column = columns + 8 * half + j;
      r[j] = full               ? _mm512_loadu_si512(from + *column)
          : 8 * half + j < wide ? _mm512_maskz_loadu_epi64(mask, from + *column)
                                : _mm512_setzero_si512();
    }
    GRADTRACE_UNROLLED
    for (int j = 0; j < 8; j += 2) {
      s[j] = _mm512_unpacklo_epi64(r[j], r[j + 1]);
      s[j + 1] = _mm512_unpackhi_epi64(r[j], r[j + 1]);
    }
    GRADTRACE_UNROLLED
    for (int i = 0; i < 2; ++i) { // rows i, 2 + i, 4 + i, 6 + i of two columns each
      const __m512i first = _mm512_shuffle_i64x2(s[i], s[i + 2], 0x88);
      const __m512i second = _mm512_shuffle_i64x2(s[i], s[i + 2], 0xDD);
      const __m512i third = _mm512_shuffle_i64x2(s[i + 4], s[i + 6], 0x88);
      const __m512i fourth = _mm512_shuffle_i64x2(s[i + 4], s[i + 6], 0xDD);
      r[i] = _mm512_shuffle_i64x2(first, third, 0x88);
      r[i + 2] = _mm512_shuffle_i64x2(second, fourth, 0x88);
      r[i + 4] = _mm512_shuffle_i64x2(first, third, 0xDD);
      r[i + 6] = _mm512_shuffle_i64x2(second, fourth, 0xDD);
    }
  }
  GRADTRACE_UNROLLED
  for (int i = 0; i < 8; ++i) {
    if (full || i < high) {
      _mm512_storeu_si512(rows[i] + at, turned[0][i]);
      _mm512_storeu_si512(rows[i] + at + 8, turned[1][i]);
    }
  }
}

template <bool full>
GRADTRACE_WIDER_VECTORS inline void turn_lines(
    const uint16_t* from, const int64_t* columns, int high, int wide, uint16_t* const* rows, int64_t at) {
  const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << high) - 1);
  __m512i turned[2][8]; // rows i, 8 + i, 16 + i, 24 + i of eight columns
  GRADTRACE_UNROLLED
  for (int half = 0; half < 2; ++half) {
    __m512i s[8];
    __m512i* r = turned[half];
    GRADTRACE_UNROLLED
    for (int j = 0; j < 8; ++j) {
      const int64_t* column = columns + 8 * half + j;
      r[j] = full               ? _mm512_loadu_si512(from + *column)
          : 8 * half + j < wide ? _mm512_maskz_loadu_epi16(mask, from + *column)
                                : _mm512_setzero_si512();
    }
    GRADTRACE_UNROLLED
    for (int i = 0; i < 4; ++i) {
      s[2 * i] = _mm512_unpacklo_epi16(r[i], r[i + 4]);
      s[2 * i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 4]);
    }
    GRADTRACE_UNROLLED
    for (int i = 0; i < 4; ++i) {
      r[2 * i] = _mm512_unpacklo_epi16(s[i], s[i + 4]);
      r[2 * i + 1] = _mm512_unpackhi_epi16(s[i], s[i + 4]);
    }
    GRADTRACE_UNROLLED
    for (int i = 0; i < 4; ++i) {
      s[2 * i] = _mm512_unpacklo_epi16(r[i], r[i + 4]);
      s[2 * i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 4]);
    }
    GRADTRACE_UNROLLED
    for (int i = 0; i < 8; ++i) {
      r[i] = s[i];
    }
  }
  const __m512i places[2] = {
      _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)};
  GRADTRACE_UNROLLED
  for (int k = 0; k < 32; k += 16) {
    __m512i two[8]; // rows k + i and k + 8 + i
    GRADTRACE_UNROLLED
    for (int i = 0; i < 8; ++i) {
      two[i] = _mm512_permutex2var_epi64(turned[0][i], places[k / 16], turned[1][i]);
      if (full || k + i < high) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[k + i] + at), _mm512_castsi512_si256(two[i]));
      }
    }
    GRADTRACE_UNROLLED
    for (int i = 0; i < 8; ++i) {
      if (full || k + 8 + i < high) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[k + 8 + i] + at), _mm512_extracti64x4_epi64(two[i], 1));
      }
    }
  }
}

#endif

// Of elements that are further apart, fewer than that are in a line of the cache.
constexpr int64_t kMostStep = 8;

constexpr bool is_near(int64_t step) {
  return step >= 2 && step <= kMostStep;
}

// So many elements are a line of the cache.
template <class Word>
constexpr int kLine = 64 / sizeof(Word);

// Copies a tile: element i of column j, which begins `columns[j]` elements from `from` and goes on by `step`, comes to
// `rows[i][at + j]`. There are at most kLine rows and 16 columns. The rest of the 16 places is written, too, if
// `may_fill`, row by row, and then only with zeros.
template <class Word>
void turn_tile(
    const Word* from, const int64_t* columns, int64_t step, int high, int wide, Word* const* rows, int64_t at,
    bool may_fill) {
#ifdef GRADTRACE_AVX2
  const int vectors_on = step == 1 ? vectors.load(std::memory_order_relaxed) : 0;
  if (vectors_on > 1 && (wide == 16 || may_fill)) {
    if (high == kLine<Word> && wide == 16) {
      turn_lines<true>(from, columns, high, wide, rows, at);
    } else {
      turn_lines<false>(from, columns, high, wide, rows, at);
    }
    return;
  }
  if constexpr (sizeof(Word) <= 4) {
    if (vectors_on && high == kLine<Word> && wide == 16) {
      for (int i = 0; i < kLine<Word>; i += 8) {
        for (int j = 0; j < 16; j += 8) {
          turn_eight(from + i, columns + j, rows + i, at + j);
        }
      }
      return;
    }
  }
#endif
  for (int i = 0; i < high; ++i) {
    for (int j = 0; j < wide; ++j) {
      rows[i][at + j] = from[columns[j] + i * step];
    }
  }
}

#ifdef GRADTRACE_AVX2

GRADTRACE_WIDER_VECTORS inline __m512i some_of(uint64_t mask, const uint16_t* from, uint64_t kept) {
  const __mmask32 wanted = static_cast<__mmask32>(mask);
  return _mm512_maskz_compress_epi16(wanted, _mm512_maskz_loadu_epi16(static_cast<__mmask32>(kept), from));
}

GRADTRACE_WIDER_VECTORS inline __m512i some_of(uint64_t mask, const uint32_t* from, uint64_t kept) {
  const __mmask16 wanted = static_cast<__mmask16>(mask);
  return _mm512_maskz_compress_epi32(wanted, _mm512_maskz_loadu_epi32(static_cast<__mmask16>(kept), from));
}

GRADTRACE_WIDER_VECTORS inline __m512i some_of(uint64_t mask, const uint64_t* from, uint64_t kept) {
  const __mmask8 wanted = static_cast<__mmask8>(mask);
  return _mm512_maskz_compress_epi64(wanted, _mm512_maskz_loadu_epi64(static_cast<__mmask8>(kept), from));
}

// Every `step`th element, of whole lines that are read: after `step` lines they are in the same places again.
template <class Word>
GRADTRACE_WIDER_VECTORS void gather_every(const Word* from, int64_t count, int64_t step, Word* to) {
  uint64_t masks[kMostStep] = {};
  int taken[kMostStep] = {};
  for (int64_t at = 0; at < step * kLine<Word>; at += step) {
    masks[at / kLine<Word>] |= uint64_t{1} << at % kLine<Word>;
    ++taken[at / kLine<Word>];
  }
  const int64_t end = (count - 1) * step + 1;
  int line = 0;
  for (int64_t at = 0; at < end; at += kLine<Word>) {
    const uint64_t kept = end - at < kLine<Word> ? (uint64_t{1} << (end - at)) - 1 : ~uint64_t{0};
    _mm512_storeu_si512(to, some_of(masks[line] & kept, from + at, kept));
    to += taken[line];
    line = line + 1 == step ? 0 : line + 1;
  }
}

#endif

// Copies every `step`th element. There is room for a line more than `count`.
template <class Word>
void gather_row(const Word* from, int64_t count, int64_t step, Word* to) {
#ifdef GRADTRACE_AVX2
  if (is_near(step) && count >= 2 * kLine<Word> && vectors.load(std::memory_order_relaxed) > 1) {
    gather_every(from, count, step, to);
    return;
  }
#endif
  for (int64_t j = 0; j < count; ++j) {
    to[j] = from[j * step];
  }
}

} // namespace
} // namespace gradtrace
