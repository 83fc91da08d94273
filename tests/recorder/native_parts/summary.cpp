// The summary without torch and Python: the same numbers whatever the strides, the vectors and the thread.
#include "summary/summary.h"

#include "holds.h"

#include <cmath>
#include <limits>
#include <thread>
#include <vector>

using namespace gradtrace;

namespace {

std::vector<float> some(int64_t count, uint64_t seed) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(static_cast<double>(mixed(i, seed) >> 11) * 0x1p-53 - 0.5);
  }
  return values;
}

Numbers of(const float* data, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  return summarised(Kind::f32, data, static_cast<int>(sizes.size()), sizes.data(), strides.data(), true);
}

bool is_near(double one, double other, double norm) {
  return std::fabs(one - other) <= 1e-6 * norm;
}

bool is_same(const Numbers& one, const Numbers& other) {
  const double norm = std::sqrt(one.square);
  bool same = one.fingerprint == other.fingerprint && one.abs_max == other.abs_max && one.nans == other.nans &&
      one.infs == other.infs && is_near(norm, std::sqrt(other.square), norm) && is_near(one.sum, other.sum, norm);
  for (int lane = 0; lane < kLanes; ++lane) {
    same = same && is_near(one.lanes[lane], other.lanes[lane], norm);
  }
  return same;
}

void strides_and_vectors_change_nothing() {
  const int best = use_vectors(2);
  for (const int64_t rows : {1, 3, 64, 97}) {
    for (const int64_t columns : {1, 5, 128, 331}) {
      // Exactly so many, so that a sanitizer sees what is read behind the end.
      std::vector<float> lying = some(rows * columns, 7), turned(rows * columns);
      lying[rows * columns / 2] = std::numeric_limits<float>::quiet_NaN();
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          turned[j * rows + i] = lying[i * columns + j];
        }
      }
      use_vectors(0);
      const Numbers plain = of(lying.data(), {rows, columns}, {columns, 1});
      HOLDS(plain.nans == 1);
      for (int vectors = 0; vectors <= best; ++vectors) {
        use_vectors(vectors);
        HOLDS(is_same(plain, of(lying.data(), {rows, columns}, {columns, 1})));
        HOLDS(is_same(plain, of(turned.data(), {rows, columns}, {1, rows})));
      }
    }
  }
  HOLDS(of(nullptr, {0, 4}, {4, 1}).square == 0);
}

void another_value_has_another_fingerprint() {
  std::vector<float> values = some(5000, 3);
  const uint64_t before = of(values.data(), {5000}, {1}).fingerprint;
  std::swap(values[17], values[4711]);
  HOLDS(of(values.data(), {5000}, {1}).fingerprint != before);
}

void threads_that_summarise_at_once_agree() {
  const std::vector<float> values = some(40'000, 11);
  const Numbers alone = of(values.data(), {200, 200}, {1, 200});
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int times = 0; times < 50; ++times) {
        HOLDS(is_same(alone, of(values.data(), {200, 200}, {1, 200})));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

} // namespace

int main() {
  strides_and_vectors_change_nothing();
  another_value_has_another_fingerprint();
  threads_that_summarise_at_once_agree();
}
