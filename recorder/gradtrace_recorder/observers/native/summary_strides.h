// A strided tensor in logical order: gathered into a buffer, and handed on in whole chunks. Part of summary.cpp.
#pragma once

#include "summary.h"
#include "transposed.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

namespace gradtrace {
namespace {

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
          if (turned_with_vectors(corner, column_stride, held[0], tile)) {
            for (int64_t i = 0; i < tile; ++i) {
              std::memcpy(into + i * columns, held[i], sizeof held[i]);
            }
            continue;
          }
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

// Walks a strided tensor in logical order, and hands it on in pieces of whole chunks: `give(words, count)`.
template <class Word, class Give>
class Gatherer {
 public:
  Gatherer(int64_t count, Give give)
      : give_(give), room_(std::min(kGathered, (count + kChunk - 1) / kChunk * kChunk)), buffer_(new Word[room_]) {}

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

} // namespace
} // namespace gradtrace
