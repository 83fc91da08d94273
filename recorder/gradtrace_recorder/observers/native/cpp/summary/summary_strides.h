// A strided tensor in logical order: gathered into a buffer, and handed on in pieces of it; or one element, expanded.
// Part of summary.cpp.
#pragma once

#include "summary/summary_wide.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
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

// Memory of this thread's for whatever it summarises: to ask for it each time takes system calls. Who has it has it
// until the next that asks.
inline void* room_of_thread(size_t bytes) {
  struct Room {
    void* memory = nullptr;
    size_t size = 0;
    ~Room() {
      std::free(memory);
    }
  };
  static thread_local Room room;
  if (room.size < bytes) {
    std::free(room.memory);
    room.size = (bytes + 4095) / 4096 * 4096;
    room.memory = std::aligned_alloc(64, room.size);
    if (!room.memory) {
      room.size = 0;
      throw std::bad_alloc();
    }
  }
  return room.memory;
}

// Where rows or columns of several dimensions begin, from the first on, in logical order.
class Starts {
 public:
  Starts(int dimensions, const int64_t* sizes, const int64_t* strides)
      : dimensions_(dimensions), sizes_(sizes), strides_(strides) {}

  // The next, at most so many. None once after the last, and then from the first on again.
  int64_t next(int64_t* starts, int64_t most) {
    int64_t made = 0;
    const int last = dimensions_ - 1;
    while (made < most && !is_over_) {
      const int64_t run = std::min(most - made, sizes_[last] - index_[last]);
      for (int64_t k = 0; k < run; ++k) {
        starts[made + k] = at_ + k * strides_[last];
      }
      made += run;
      at_ += run * strides_[last];
      index_[last] += run;
      for (int d = last; index_[d] == sizes_[d]; --d) {
        at_ -= sizes_[d] * strides_[d];
        index_[d] = 0;
        if (d == 0) {
          is_over_ = true;
          break;
        }
        ++index_[d - 1];
        at_ += strides_[d - 1];
      }
    }
    if (!made) {
      is_over_ = false;
    }
    return made;
  }

 private:
  const int dimensions_;
  const int64_t* const sizes_;
  const int64_t* const strides_;
  int64_t index_[kMostDimensions] = {};
  int64_t at_ = 0;
  bool is_over_ = false;
};

// Copies `rows` x `columns` in logical order. Where the rows are nearer to each other in memory than the columns (a
// transposed matrix), memory is read along them, in tiles. There is room for a line more.
template <class Word>
void gather_matrix(
    const Word* from, int64_t rows, int64_t row_stride, int64_t columns, int64_t column_stride, Word* to) {
  if (column_stride == 1) {
    const size_t bytes = columns * sizeof(Word);
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(to + i * columns, from + i * row_stride, bytes);
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

template <size_t bytes, class Word>
void copy_rows(const Word* from, const int64_t* starts, int64_t count, Word* to) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(reinterpret_cast<char*>(to) + i * bytes, from + starts[i], bytes);
  }
}

// Rows of at most so many elements, such as those of attention heads, are copied without a call for each.
constexpr int64_t kShortRow = 256;

// Walks rows, each of which lies in memory as it is, and hands them on in pieces of whole groups: `give(words, count)`.
template <class Word, class Give>
void gather_rows(const Word* from, int dimensions, const int64_t* n, const int64_t* s, Give give) {
  constexpr int64_t most = 512;
  const int64_t columns = n[dimensions - 1];
  const int64_t wanted = std::max<int64_t>(kLanes, std::min(most, kChunk / columns / kLanes * kLanes));
  Word* const buffer = static_cast<Word*>(room_of_thread(wanted * columns * sizeof(Word)));
  Starts rows(dimensions - 1, n, s);
  int64_t starts[most];
  while (const int64_t count = rows.next(starts, wanted)) {
    switch (columns * sizeof(Word)) {
      case 16:
        copy_rows<16>(from, starts, count, buffer);
        break;
      case 32:
        copy_rows<32>(from, starts, count, buffer);
        break;
      case 64:
        copy_rows<64>(from, starts, count, buffer);
        break;
      case 128:
        copy_rows<128>(from, starts, count, buffer);
        break;
      default:
        for (int64_t i = 0; i < count; ++i) {
          std::memcpy(buffer + i * columns, from + starts[i], columns * sizeof(Word));
        }
    }
    give(buffer, count * columns);
  }
}

// Walks a strided tensor in logical order, and hands it on in pieces of whole chunks: `give(words, count)`.
template <class Word, class Give>
class Gatherer {
 public:
  Gatherer(int64_t count, Give give)
      : give_(give),
        room_(std::min<int64_t>(kGatheredBytes / sizeof(Word), (count + kChunk - 1) / kChunk * kChunk)),
        buffer_(static_cast<Word*>(room_of_thread((room_ + kChunk) * sizeof(Word)))) {}

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
        gather_matrix(from + i * row_stride, count, row_stride, columns, column_stride, buffer_ + held_);
        held_ += count * columns;
        i += count;
        give(false);
        continue;
      }
      for (int64_t j = 0; j < columns;) { // a row that does not fit is cut
        const int64_t count = std::min(columns - j, room_ - held_);
        gather_matrix(
            from + i * row_stride + j * column_stride, 1, 0, count, column_stride, buffer_ + held_);
        held_ += count;
        j += count;
        give(false);
      }
      ++i;
    }
  }

  void give(bool last) {
    if (held_ == room_ || last) {
      give_(buffer_, held_);
      held_ = 0;
    }
  }

 private:
  Give give_;
  const int64_t room_;
  Word* const buffer_; // and a line more
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
