// Which vectors the processor has, and small matrices turned with them. Part of summary.cpp.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define GRADTRACE_AVX2 1
#define GRADTRACE_VECTORS __attribute__((target("avx2,fma,f16c")))
#include <immintrin.h>
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

// Turns 8 x 8 elements: eight lie next to each other along a column of `from`, and then along a row of `to`.
GRADTRACE_VECTORS inline void turn_eight(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  __m256 r[8], s[8];
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * from_stride));
  }
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    const __m256 first = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    const __m256 second = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    _mm256_storeu_ps(reinterpret_cast<float*>(to + i * to_stride), first);
    _mm256_storeu_ps(reinterpret_cast<float*>(to + (i + 4) * to_stride), second);
  }
}

// The same of 16-bit elements.
GRADTRACE_VECTORS inline void turn_eight(const uint16_t* from, int64_t from_stride, uint16_t* to, int64_t to_stride) {
  __m128i r[8], s[8];
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_stride));
  }
  for (int i = 0; i < 4; ++i) {
    s[2 * i] = _mm_unpacklo_epi16(r[i], r[i + 4]);
    s[2 * i + 1] = _mm_unpackhi_epi16(r[i], r[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    r[2 * i] = _mm_unpacklo_epi16(s[i], s[i + 4]);
    r[2 * i + 1] = _mm_unpackhi_epi16(s[i], s[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m128i low = _mm_unpacklo_epi16(r[i], r[i + 4]), high = _mm_unpackhi_epi16(r[i], r[i + 4]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i * to_stride), low);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (2 * i + 1) * to_stride), high);
  }
}

#endif

// Turns 16 x 16 elements. Whether it can, with vectors.
template <class Word>
bool turned_with_vectors(const Word* from, int64_t from_stride, Word* to, int64_t to_stride) {
#ifdef GRADTRACE_AVX2
  if constexpr (sizeof(Word) <= 4) {
    if (vectors.load(std::memory_order_relaxed)) {
      for (int j = 0; j < 16; j += 8) {
        for (int i = 0; i < 16; i += 8) {
          turn_eight(from + j * from_stride + i, from_stride, to + i * to_stride + j, to_stride);
        }
      }
      return true;
    }
  }
#endif
  return false;
}

} // namespace
} // namespace gradtrace
