// Which steps a journal keeps, where it keeps the newest alone: the same as gradtrace_recorder/journal/ring.py, for threads
// without the GIL. Part of journal.h. All of it lies under the journal's lock.
#pragma once

#include "journal/record_layouts.h"

#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

namespace gradtrace {

constexpr int kMostKinds = layout::kDropKinds;

struct Ring {
  // The end of a step: its last record, and how many records each table had by then.
  struct Mark {
    int32_t step = 0;
    int64_t number = 0;
    int64_t counts[kMostKinds] = {};
  };
  // A record that is written again when its step is let go of.
  struct Lasting {
    int64_t number = 0;
    int kind = 0;
    std::vector<char> record;
  };

  bool is_kept = false;
  std::deque<Mark> marks;
  std::deque<Lasting> lasting;
  int64_t wanted = 0; // up to which record parts are wanted, 0 where they are not
  int64_t shortened = 0;
  int64_t overwritten[kMostKinds] = {};

  // No step is let go of while parts are wanted.
  bool may_let_go() const {
    return is_kept && wanted == 0 && !marks.empty();
  }

  // The oldest step is over: what it ends with.
  Mark take_oldest() {
    const Mark mark = marks.front();
    marks.pop_front();
    for (int kind = 0; kind < kMostKinds; ++kind) {
      overwritten[kind] += mark.counts[kind] - gone_[kind];
    }
    std::memcpy(gone_, mark.counts, sizeof gone_);
    return mark;
  }

  // Parts hold all up to `last`; whether that is all that was wanted.
  bool wrote(int64_t last) {
    if (wanted == 0 || wanted > last) {
      return false;
    }
    while (!marks.empty() && marks.front().number <= wanted) {
      std::memcpy(gone_, marks.front().counts, sizeof gone_);
      marks.pop_front();
    }
    wanted = 0;
    return true;
  }

  int64_t stale(int64_t last) const {
    int64_t count = 0;
    for (const Lasting& one : lasting) {
      count += one.number <= last;
    }
    return count;
  }

 private:
  int64_t gone_[kMostKinds] = {}; // records of each table, up to where the journal is let go of
};

} // namespace gradtrace
