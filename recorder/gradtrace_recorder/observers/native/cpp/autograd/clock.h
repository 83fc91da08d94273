// The host's monotonic clock for hooks: worked out from the processor's own counter, which is read in a third of the time.
// Part of observer.cpp.
//
// The counter is asked for its rate over the whole run, and held against the clock itself every quarter of a
// millisecond: whatever it does, a time is wrong by no more than that takes. Where the kernel does not trust it for its own
// clock, or there is none, every time is the clock's.
#pragma once

#include "autograd/tensors.h"

#include <cmath>
#include <fstream>

namespace gradtrace {
namespace {

// Both clocks at one moment. Not sure: the thread was interrupted between them.
struct BothClocks {
  uint64_t ticks = 0;
  int64_t ns = 0;
  bool is_sure = false;
};

BothClocks both_clocks() {
  constexpr uint64_t kMostBetween = 4000;
  BothClocks both;
  for (int tries = 0; tries < 4 && !both.is_sure; ++tries) {
    const uint64_t before = ticks();
    both.ns = now();
    const uint64_t between = ticks() - before;
    both.ticks = before + between / 2;
    both.is_sure = between < kMostBetween;
  }
  return both;
}

// How long a tick is. Under the GIL.
class TickLength {
 public:
  // Nanoseconds of a tick times 2^32, 0 where that is not known: not yet, or not any more.
  uint64_t learn(const BothClocks& both) {
    if (!is_usable_ || !both.is_sure) {
      return 0;
    }
    const int64_t elapsed = both.ns - base_.ns;
    if (!base_.is_sure || elapsed < 0 || both.ticks <= base_.ticks) {
      return start_again(both);
    }
    if (elapsed < kShortest) {
      return length_;
    }
    const double measured = static_cast<double>(elapsed) * 0x1p32 / static_cast<double>(both.ticks - base_.ticks);
    if (length_ && std::fabs(measured / static_cast<double>(length_) - 1) > kMostOff) {
      return start_again(both); // the machine has slept, or moved
    }
    length_ = static_cast<uint64_t>(measured);
    if (elapsed > kLongest) {
      base_ = both;
    }
    return length_;
  }

 private:
  static constexpr int64_t kShortest = 20'000'000, kLongest = 10'000'000'000;
  static constexpr double kMostOff = 1e-3;

  const bool is_usable_ = kernel_uses_it();
  BothClocks base_;
  uint64_t length_ = 0;

  uint64_t start_again(const BothClocks& both) {
    base_ = both;
    length_ = 0;
    return 0;
  }

  static bool kernel_uses_it() {
#ifdef __x86_64__
    std::ifstream source("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    std::string name;
    source >> name;
    return name == "tsc" || name == "kvm-clock";
#else
    return false;
#endif
  }
};

// What one thread reads in one pass. Its times never go back.
class PassClock {
 public:
  PassClock(const BothClocks& both, uint64_t length)
      : length_(length), longest_(length ? (uint64_t{kLongest} << 32) / length : 0), at_(both), last_(both.ns) {}

  // Nanoseconds at a moment that `ticks()` has just given.
  int64_t at(uint64_t moment) {
    const uint64_t since = moment - at_.ticks;
    int64_t ns;
    if (since < longest_) {
      ns = at_.ns + static_cast<int64_t>(since * length_ >> 32);
    } else if (longest_) {
      at_ = both_clocks();
      longest_ = at_.is_sure ? longest_ : 0;
      ns = at_.ns;
    } else {
      ns = now();
    }
    last_ = std::max(last_, ns);
    return last_;
  }

 private:
  static constexpr uint32_t kLongest = 250'000;
  const uint64_t length_;
  uint64_t longest_; // ticks; 0: the counter is not used
  BothClocks at_;
  int64_t last_;
};

} // namespace
} // namespace gradtrace
