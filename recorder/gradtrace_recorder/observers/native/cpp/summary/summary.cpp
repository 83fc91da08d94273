#include "summary/summary.h"

#include "summary/summary_strips.h"

namespace gradtrace {
namespace {

template <Kind kind, bool whole>
Numbers summarised_as(const void* data, int dimensions, const int64_t* sizes, const int64_t* strides) {
  Adder<kind, whole> adder(vectors.load(std::memory_order_relaxed));
  int64_t n[kMostDimensions], s[kMostDimensions];
  const int left = joined(dimensions, sizes, strides, n, s);
  if (left == 0 || (left == 1 && s[0] == 1)) {
    add_run(data, left ? n[0] : 1, 0, kAhead, adder);
    return adder.all();
  }
  if (left == 1 && s[0] == 0) {
    add_repeated<kind, whole>(data, n[0], adder);
    return adder.all();
  }
  const WordOf<kind>* words = static_cast<const WordOf<kind>*>(data);
  const int nearest = nearest_of(left, s);
  if (nearest < left - 1 && !is_near(s[left - 1]) && product_of(left, n, nearest + 1) >= kNarrow) {
    // Not on the stack, of which a thread of the job's may have little.
    using Own = Strips<kind, whole>;
    static_assert(std::is_trivially_destructible_v<Own>);
    (new (room_of_thread(sizeof(Own))) Own(left, n, s, nearest, adder))->add_all(words, n, s);
    return adder.all();
  }
  int64_t position = 0;
  const auto give = [&](const void* held, int64_t count) {
    add_run(held, count, position, 0, adder);
    position += count;
  };
  if (s[left - 1] == 1 && n[left - 1] <= kShortRow) {
    gather_rows(words, left, n, s, give);
    return adder.all();
  }
  Gatherer<WordOf<kind>, decltype(give)> gatherer(product_of(left, n, 0), give);
  gatherer.walk(words, left, n, s);
  gatherer.give(true);
  return adder.all();
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

bool is_same_order(
    int dimensions,
    const int64_t* sizes,
    const int64_t* strides,
    int other_dimensions,
    const int64_t* other_sizes,
    const int64_t* other_strides) {
  int64_t n[kMostDimensions], s[kMostDimensions], other_n[kMostDimensions], other_s[kMostDimensions];
  const int left = joined(dimensions, sizes, strides, n, s);
  return left == joined(other_dimensions, other_sizes, other_strides, other_n, other_s) &&
      std::equal(n, n + left, other_n) && std::equal(s, s + left, other_s);
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
