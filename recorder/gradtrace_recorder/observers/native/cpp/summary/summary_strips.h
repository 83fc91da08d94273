// A tensor whose last dimension is not the one that lies in memory, such as a transposed matrix or one in
// channels_last. Memory is read in lines of the cache, each once: a strip of rows at a time, along its columns, in
// blocks. A block is turned, and then a piece of each of its rows is added where that lies in logical order. Part of
// summary.cpp.
#pragma once

#include "summary/summary_strides.h"

namespace gradtrace {
namespace {

// Rows of fewer columns are gathered instead.
constexpr int64_t kNarrow = 128;

template <Kind kind, bool whole>
class Strips {
 public:
  using Word = WordOf<kind>;

  Strips(int dimensions, const int64_t* n, const int64_t* s, int rows, Adder<kind, whole>& to)
      : to_(to),
        before_(rows),
        rows_(n[rows]),
        step_(s[rows]),
        length_(product_of(dimensions, n, rows + 1)),
        columns_(dimensions - rows - 1, n + rows + 1, s + rows + 1),
        most_rows_(to.is_wide() ? kMostRows : kLine<Word>),
        most_columns_(to.is_wide() ? kColumns : kMostColumns),
        pitch_(most_columns_ + 2 * kLanes) {}

  // All of the tensor, whose dimensions before that of the rows are walked in logical order.
  void add_all(const Word* from, const int64_t* n, const int64_t* s) {
    count_ = columns_.next(starts_[0], most_columns_);
    int64_t index[kMostDimensions] = {}, position = 0;
    for (int d = 0; d >= 0;) {
      for (int64_t i = 0; i < rows_; i += most_rows_) {
        const bool is_last = i + most_rows_ >= rows_;
        add(from + i * step_, position + i * length_, std::min(rows_ - i, most_rows_),
            is_last ? nullptr : from + (i + most_rows_) * step_);
      }
      position += rows_ * length_;
      for (d = before_ - 1; d >= 0; --d) {
        from += s[d];
        if (++index[d] < n[d]) {
          break;
        }
        from -= n[d] * s[d];
        index[d] = 0;
      }
    }
  }

 private:
  // Four lines of the cache together, and so many columns, were fastest of what was tried. Without the widest vectors a
  // piece costs much besides its elements, and so it is longer.
  static constexpr int64_t kMostRows = 4 * kLine<Word>, kColumns = 256, kMostColumns = 512;
  static constexpr int64_t kNoSpan = -1;

  Adder<kind, whole>& to_;
  const int before_;
  const int64_t rows_, step_, length_;
  Starts columns_;
  const int64_t most_rows_, most_columns_, pitch_;
  int64_t count_ = 0; // of columns in starts_[0]
  int64_t starts_[2][kMostColumns];
  alignas(64) Word words_[std::max(kMostRows * (kColumns + 2 * kLanes), kLine<Word> * (kMostColumns + 2 * kLanes))];
  Held<kind> held_[kMostRows + 2];
  int64_t spans_[kMostRows + 2];

  // One strip, whose first element has that position. The first of its columns are known; so are then those of the
  // strip after it, which begins at `following`.
  void add(const Word* from, int64_t position, int64_t high, const Word* following) {
    Word* ends[kMostRows];
    int64_t positions[kMostRows];
    for (int64_t i = 0; i < high; ++i) {
      // A row begins with zeros, which add nothing, where it does not begin with a group.
      const int64_t begin = position + i * length_, before = begin % kLanes;
      std::memset(words_ + i * pitch_, 0, before * sizeof(Word));
      ends[i] = words_ + i * pitch_ + before;
      positions[i] = begin - before;
    }
    const int64_t slots = high + 2, first_span = positions[0] / kSpan<kind>;
    std::fill(spans_, spans_ + slots, kNoSpan);
    int64_t now = 0;
    for (bool is_last = false; !is_last;) {
      const int64_t next = columns_.next(starts_[1 - now], most_columns_);
      is_last = next == 0;
      const int64_t count = count_;
      count_ = is_last ? columns_.next(starts_[1 - now], most_columns_) : next;
      const Word* ahead = is_last ? following : from;
      for (int64_t j = 0; j < count; j += kLanes) {
        for (int64_t i = 0; i < high; i += kLine<Word>) {
          turn_tile(
              from + i * step_, starts_[now] + j, step_, static_cast<int>(std::min<int64_t>(high - i, kLine<Word>)),
              static_cast<int>(std::min<int64_t>(count - j, kLanes)), ends + i, j, true);
        }
      }
      now = 1 - now;
      int64_t fetched = 0;
      for (int64_t i = 0; i < high; ++i) {
        if (ahead && step_ == 1) {
          for (const int64_t end = count_ * (i + 1) / high; fetched < end; ++fetched) {
            fetch(ahead + starts_[now][fetched], high);
          }
        }
        Word* row = words_ + i * pitch_;
        const int64_t filled = ends[i] - row + count;
        if (is_last) {
          std::memset(row + filled, 0, kLanes * sizeof(Word));
        }
        const int64_t ready = (filled + (is_last ? kLanes - 1 : 0)) / kLanes * kLanes;
        add_row(row, ready, positions[i], length_ >= kSpan<kind> ? i : kNoSpan, first_span);
        positions[i] += ready;
        if (!is_last) {
          std::memcpy(row, row + ready, kLanes * sizeof(Word));
          ends[i] = row + filled - ready;
        }
      }
    }
    if (now) {
      std::copy(starts_[1], starts_[1] + count_, starts_[0]);
    }
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (spans_[slot] != kNoSpan) {
        to_.end(held_[slot], spans_[slot]);
      }
    }
  }

  // A piece of a row. Long rows have each a place for the span that they are in; of short ones several are in one span.
  void add_row(const Word* words, int64_t count, int64_t position, int64_t own_slot, int64_t first_span) {
    while (count) {
      const int64_t span = position / kSpan<kind>, fit = std::min(count, (span + 1) * kSpan<kind> - position);
      const int64_t slot = own_slot == kNoSpan ? span - first_span : own_slot;
      if (spans_[slot] != span) {
        if (spans_[slot] != kNoSpan) {
          to_.end(held_[slot], spans_[slot]);
        }
        held_[slot].clear();
        spans_[slot] = span;
      }
      to_.add(words, fit, position, 0, held_[slot]);
      words += fit;
      position += fit;
      count -= fit;
    }
  }

  static void fetch(const Word* column, int64_t high) {
    const char* from = reinterpret_cast<const char*>(column);
    const int64_t bytes = high * static_cast<int64_t>(sizeof(Word));
    for (int64_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(from + at, 0, 2);
    }
  }
};

} // namespace
} // namespace gradtrace
