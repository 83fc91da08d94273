// A strided tensor in logical order: gathered into a buffer, and handed on in whole chunks; or one element, expanded. Part
// of summary.cpp.
#pragma once

#include "summary_wide.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

namespace gradtrace {
namespace {

constexpr int kMostDimensions = 64;
constexpr int64_t kGatheredBytes = 65536; // less than what a system call is made for

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

// Where a strided tensor's dimensions lie nearest to each other in memory: that with the least stride but 0.
int nearest_of(int dimensions, const int64_t* strides) {
  int nearest = dimensions - 1;
  for (int d = dimensions - 1; d >= 0; --d) {
    if (strides[d] && (!strides[nearest] || std::abs(strides[d]) < std::abs(strides[nearest]))) {
      nearest = d;
    }
  }
  return nearest;
}

int64_t product_of(int dimensions, const int64_t* sizes, int first) {
  int64_t product = 1;
  for (int d = first; d < dimensions; ++d) {
    product *= sizes[d];
  }
  return product;
}

template <Kind kind>
using WordOf = std::conditional_t<
    width_of(kind) == 8,
    uint64_t,
    std::conditional_t<width_of(kind) == 4, uint32_t, uint16_t>>;

// As `memcpy`, without a call for short rows of a usual size, such as those of attention heads.
inline void copy_row(const void* from, void* to, size_t bytes) {
  constexpr size_t some = 16;
  if (bytes % some || bytes > 16 * some) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (size_t at = 0; at < bytes; at += some) {
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, some);
  }
}

// Copies `rows` x `columns` in logical order. Where the rows are nearer to each other in memory than the columns (a
// transposed matrix), memory is read along them, in tiles. There is room for a line more.
template <class Word>
void gather_matrix(
    const Word* from, int64_t rows, int64_t row_stride, int64_t columns, int64_t column_stride, Word* to) {
  if (column_stride == 1) {
    const size_t bytes = columns * sizeof(Word);
    for (int64_t i = 0; i < rows; ++i) {
      copy_row(from + i * row_stride, to + i * columns, bytes);
    }
    return;
  }
  if (rows == 1 || row_stride == 0 || is_near(column_stride) || std::abs(row_stride) >= std::abs(column_stride)) {
    for (int64_t i = 0; i < rows; ++i) {
      gather_row(from + i * row_stride, columns, column_stride, to + i * columns);
    }
    return;
  }
  for (int64_t i0 = 0; i0 < rows; i0 += kLine<Word>) {
    const int high = static_cast<int>(std::min<int64_t>(rows - i0, kLine<Word>));
    Word* lines[kLine<Word>];
    for (int i = 0; i < high; ++i) {
      lines[i] = to + (i0 + i) * columns;
    }
    // Backwards: what a tile writes beyond its row is the beginning of the next, which is written later.
    for (int64_t j0 = (columns - 1) / kLanes * kLanes; j0 >= 0; j0 -= kLanes) {
      int64_t starts[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) {
        starts[j] = (j0 + j) * column_stride;
      }
      const int wide = static_cast<int>(std::min<int64_t>(columns - j0, kLanes));
      turn_tile(from + i0 * row_stride, starts, row_stride, high, wide, lines, j0, true);
    }
  }
}

// Walks a strided tensor in logical order, and hands it on in pieces of whole chunks: `give(words, count)`.
template <class Word, class Give>
class Gatherer {
 public:
  Gatherer(int64_t count, Give give)
      : give_(give),
        room_(std::min<int64_t>(kGatheredBytes / sizeof(Word), (count + kChunk - 1) / kChunk * kChunk)),
        buffer_(new Word[room_ + std::max(kLanes, kLine<Word>)]) {}

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
      const int64_t fit = (room_ - held_) / columns;
      if (fit) {
        const int64_t count = std::min(fit, rows - i);
        gather_matrix(from + i * row_stride, count, row_stride, columns, column_stride, buffer_.get() + held_);
        held_ += count * columns;
        i += count;
        give(false);
        continue;
      }
      for (int64_t j = 0; j < columns;) { // a row that does not fit is cut
        const int64_t count = std::min(columns - j, room_ - held_);
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
    if (held_ == room_ || last) {
      give_(buffer_.get(), held_);
      held_ = 0;
    }
  }

 private:
  Give give_;
  const int64_t room_;
  std::unique_ptr<Word[]> buffer_;
  int64_t held_ = 0;
};

// One element, `count` times: an expanded scalar, such as the gradient of a sum. Its chunks differ only in how they are
// turned and flipped.
template <Kind kind, bool whole>
void add_repeated(const void* element, int64_t count, Adder<kind, whole>& to) {
  constexpr size_t width = width_of(kind);
  const Tables& of = tables();
  const double value = value_at<kind>(element, 0);
  const bool is_finite = std::isfinite(value);
  int32_t words[2] = {};
  if constexpr (width == 2) {
    words[0] = *static_cast<const int16_t*>(element);
  } else {
    std::memcpy(words, element, width);
  }
  int64_t position = 0;
  for (; count - position >= kSpan<kind>; position += kSpan<kind>) {
    Part part;
    if (is_finite) {
      part.square = kSpan<kind> * (value * value);
      part.abs_max = std::fabs(value);
      part.sum = kSpan<kind> * value;
    } else {
      (std::isnan(value) ? part.nans : part.infs) = kSpan<kind>;
    }
    if constexpr (whole) {
      const uint64_t first = static_cast<uint64_t>(int64_t{words[0]});
      const uint64_t second = kind == Kind::f64 ? static_cast<uint64_t>(int64_t{words[1]}) : first;
      part.words = first * of.weight_sums[0] + second * of.weight_sums[1];
      const int half = position % kChunk != 0;
      for (int k = 0; k < kLanes && is_finite; ++k) {
        part.lanes[k] = value * (of.lane_sums[half][k] + (kind == Kind::f64 ? 0 : of.lane_sums[1][k]));
      }
    }
    to.add(part, position / kSpan<kind>);
  }
  constexpr int64_t some = kLanes * kLanes;
  alignas(64) unsigned char held[some * width];
  for (size_t at = 0; at < sizeof held; at += width) {
    std::memcpy(held + at, element, width);
  }
  while (position < count) {
    const int64_t few = std::min(some, count - position);
    add_run(held, few, position, 0, to);
    position += few;
  }
}

} // namespace
} // namespace gradtrace
