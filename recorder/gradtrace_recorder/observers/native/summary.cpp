#include "summary.h"

#include "summary_strides.h"
#include "summary_vectors.h"

namespace gradtrace {
namespace {

template <Kind kind>
using WordOf = std::conditional_t<
    width_of(kind) == 8,
    uint64_t,
    std::conditional_t<width_of(kind) == 4, uint32_t, uint16_t>>;

template <Kind kind, bool whole>
void add_chunk(const void* data, int64_t count, uint64_t chunk, int vectors_on, Numbers& to) {
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
    } else if (
        !(vectors_on > 1 && wider_part<kind, whole>(data, filled, part)) &&
        !vector_part<kind, whole, false>(data, filled, part)) {
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
  const int vectors_on = vectors.load(std::memory_order_relaxed);
  const char* at = static_cast<const char*>(data);
  for (int64_t left = count; left > 0; left -= kChunk, at += kChunk * width_of(kind)) {
    add_chunk<kind, whole>(at, std::min(left, kChunk), chunk++, vectors_on, to);
  }
}

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
  int64_t count = 1;
  for (int d = 0; d < left; ++d) {
    count *= n[d];
  }
  uint64_t chunk = 0;
  const auto give = [&](const void* words, int64_t held) { add_run<kind, whole>(words, held, chunk, numbers); };
  using Word = WordOf<kind>;
  Gatherer<Word, decltype(give)> gatherer(count, give);
  gatherer.walk(static_cast<const Word*>(data), left, n, s);
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

double value_of(Kind kind, const void* element) {
  switch (kind) {
    case Kind::f64:
      return value_at<Kind::f64>(element, 0);
    case Kind::f32:
      return value_at<Kind::f32>(element, 0);
    case Kind::f16:
      return value_at<Kind::f16>(element, 0);
    default:
      return value_at<Kind::bf16>(element, 0);
  }
}

int use_vectors(int wanted) {
  static const int most = vectors.load();
  vectors.store(std::min(wanted, most));
  return vectors.load();
}

} // namespace gradtrace
