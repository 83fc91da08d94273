// What every place of a chunk has (weight, sign, lane), and the summary of a piece element by element: the reference
// that the vector code is held against. Part of summary.cpp.
#pragma once

#include "summary/summary.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace gradtrace {
namespace {

constexpr uint64_t kWeightSeed = 0xA0761D6478BD642F;
constexpr uint64_t kMultiplierSeed = 0xD1B54A32D192ED03;
constexpr uint64_t kSketchSeed = 0x8CB92BA72F3D8DD7;
constexpr uint64_t kTurnSeed = 0xABC98388FB8FAC03;
constexpr int kGroups = kChunk / kLanes;

// Elements whose words lie in one chunk of words: a piece that is summarised at once lies in one such span.
template <Kind kind>
constexpr int64_t kSpan = kind == Kind::f64 ? kChunk / 2 : kChunk;

// What each place of a chunk has. `turned_signs` are the sign bits of a group's elements in the order of the lanes
// that they go to, so that a group is turned first.
struct Tables {
  alignas(64) int32_t weights[kChunk];
  alignas(64) uint32_t turned_signs[kChunk];
  alignas(64) int32_t orders[8][8];
  alignas(64) int32_t wide_orders[kLanes][kLanes];
  uint16_t turned_bits[kGroups] = {}; // the same signs, a bit each
  uint8_t turns[kGroups];
  float signs[kChunk];
  // Of elements that are all the same: what each half of a chunk adds to the lanes, and a chunk's weights in even and
  // in odd places.
  double lane_sums[2][kLanes] = {};
  uint64_t weight_sums[2] = {};

  Tables() {
    for (int64_t j = 0; j < kChunk; ++j) {
      weights[j] = static_cast<int32_t>((mixed(j, kWeightSeed) >> 33) | 1);
      signs[j] = (mixed(j, kSketchSeed ^ kTurnSeed) & 1) ? -1.0f : 1.0f;
      weight_sums[j & 1] += weights[j];
    }
    for (int g = 0; g < kGroups; ++g) {
      turns[g] = mixed(g, kSketchSeed) & 15;
      for (int k = 0; k < kLanes; ++k) {
        const bool is_minus = signs[g * kLanes + k] < 0;
        turned_signs[g * kLanes + (k ^ turns[g])] = is_minus ? 0x80000000u : 0;
        turned_bits[g] |= static_cast<uint16_t>(is_minus << (k ^ turns[g]));
        lane_sums[g >= kGroups / 2][k ^ turns[g]] += is_minus ? -1.0 : 1.0;
      }
    }
    for (int turn = 0; turn < 8; ++turn) {
      for (int k = 0; k < 8; ++k) {
        orders[turn][k] = k ^ turn;
      }
    }
    for (int turn = 0; turn < kLanes; ++turn) {
      for (int k = 0; k < kLanes; ++k) {
        wide_orders[turn][k] = k ^ turn;
      }
    }
  }
};

const Tables& tables() {
  static const Tables made;
  return made;
}

// What a piece of one span adds, before it is turned and flipped.
struct Part {
  double square = 0, abs_max = 0, sum = 0;
  int64_t nans = 0, infs = 0;
  uint64_t words = 0;
  double lanes[kLanes] = {};
};

// Adds the words and lanes of span number `span`, which are turned and flipped as its chunk is.
template <Kind kind, class Lane>
void add_turned(uint64_t words, const Lane* lanes, uint64_t span, Numbers& to) {
  to.fingerprint += words * multiplier(span);
  const uint64_t chunk = span * kSpan<kind> / kChunk;
  const uint64_t drawn = chunk ? mixed(chunk, kTurnSeed) : 0;
  const int turn = drawn & 15;
  const double flip = (drawn >> 4) & 1 ? -1.0 : 1.0;
  for (int k = 0; k < kLanes; ++k) {
    to.lanes[k ^ turn] += flip * lanes[k];
  }
}

template <Kind kind, bool whole>
void add_part(const Part& part, uint64_t span, Numbers& to) {
  to.square += part.square;
  to.abs_max = std::max(to.abs_max, part.abs_max);
  to.sum += part.sum;
  to.nans += part.nans;
  to.infs += part.infs;
  if constexpr (whole) {
    add_turned<kind>(part.words, part.lanes, span, to);
  }
}

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

// The weights of the words of a chunk's elements from `place` on.
template <Kind kind>
const int32_t* weights_at(int64_t place) {
  return tables().weights + (kind == Kind::f64 ? 2 * place % kChunk : place);
}

template <Kind kind, bool whole>
void plain_part(const void* data, int64_t count, int64_t place, Part& part) {
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
      const int64_t at = place + i;
      part.lanes[(at ^ of.turns[at / kLanes]) & 15] += of.signs[at] * value;
    }
  }
  if constexpr (whole) {
    using Word = std::conditional_t<width_of(kind) == 2, int16_t, int32_t>;
    const Word* words = static_cast<const Word*>(data);
    const int32_t* weights = weights_at<kind>(place);
    for (int64_t i = 0; i < (kind == Kind::f64 ? 2 * count : count); ++i) {
      part.words += static_cast<uint64_t>(static_cast<int64_t>(words[i]) * weights[i]);
    }
  }
}

} // namespace
} // namespace gradtrace
