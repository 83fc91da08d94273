// What every place of a chunk has (weight, sign, lane), and the summary of one chunk element by element: the reference
// that the vector code is held against. Part of summary.cpp.
#pragma once

#include "summary.h"

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

// What each place of a chunk has. `turned_signs` are the sign bits of a group's elements in the order of the lanes
// that they go to, so that a group is turned first.
struct Tables {
  alignas(64) int32_t weights[kChunk];
  alignas(64) uint32_t turned_signs[kChunk];
  alignas(64) int32_t orders[8][8];
  alignas(64) int32_t wide_orders[kLanes][kLanes];
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

} // namespace
} // namespace gradtrace
