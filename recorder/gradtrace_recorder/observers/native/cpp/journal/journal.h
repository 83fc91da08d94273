// The mapped journal as every thread writes it, Python's calls and hooks without the GIL alike; nothing here knows
// Python or torch. What lies where in the file is made from gradtrace_schemas/journal.py (record_layouts.h); where its parts
// begin, and how many records there are, is said once, and held against the length of the map. The file and its strings
// stay with gradtrace_recorder/journal/writer.py.
//
// What several threads share lies under one lock, but for Event, which has its own, and what is atomic. Whoever holds the
// lock runs code of this file alone: none of Python's, and nothing that waits for the GIL.
#pragma once

#include "journal/ring.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace gradtrace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the journal's numbers are little-endian");

class Event {
 public:
  bool wait(double seconds);
  void set();
  void clear();
  bool is_set();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// A recursive lock that is cheap where nobody waits: it is let go of by a plain store, which waits for no cache line that
// was written under it. Whoever finds it taken tries again, soon and then less often.
class Lock {
 public:
  bool try_lock() {
    const uintptr_t mine = static_cast<uintptr_t>(pthread_self());
    uintptr_t owner = 0;
    if (owner_.load(std::memory_order_relaxed) != mine &&
        !owner_.compare_exchange_strong(owner, mine, std::memory_order_acquire)) {
      return false;
    }
    ++depth_;
    return true;
  }
  void lock() {
    if (!try_lock()) {
      wait();
    }
  }
  void unlock() {
    if (--depth_ == 0) {
      owner_.store(0, std::memory_order_release);
    }
  }

 private:
  std::atomic<uintptr_t> owner_{0};
  int depth_ = 0; // the owner's

  void wait(); // and take it
};

// Where the parts of a file begin whose places are not the same in every journal, and how many records half of it has.
struct Parts {
  int64_t running_offset = 0, held_offset = 0, records_offset = 0, half_records = 0;
};

class Journal {
 public:
  Parts parts;
  std::shared_ptr<Event> half_is_full = std::make_shared<Event>();
  Lock lock;
  int64_t places = 0;
  int64_t written = 0, next_half = 0, drained = 0;
  int64_t limit = -1; // the last record that has room; less than 0: nothing is written (any more)
  int64_t mapped = 0; // bytes of the records' pages that are in memory, or need no more be brought there
  int64_t counts[kMostKinds] = {};
  layout::Drop drops[kMostKinds];
  int64_t dropped = 0;
  Ring ring;
  // Whether a hook has seen a value that is not finite in a gradient.
  std::atomic<bool> saw_not_finite{false};
  char* map = nullptr;

  // Write into this memory from now on. False where the parts do not all lie in it, and it is left alone.
  bool open(char* memory, int64_t length, const Parts& where);
  // Write nothing any more.
  void close();
  // `record` has all but its two numbers; any thread, with or without the GIL. Whether there was room.
  bool append(int kind, int32_t step, const char* record);
  // The same for a record that a ring keeps when its step is let go of.
  void append_lasting(int kind, int32_t step, const char* record);
  void drop(int kind, int32_t step);
  // Parts hold all records up to `last`: their half is free again, of a ring each place.
  void mark_drained(int64_t last);
  void let_go_of_oldest(); // step of the ring, under the lock
  // The same summary of a gradient, after a look whether all of it is finite.
  template <class Summary>
  const Summary& seen(const Summary& summary) {
    if ((summary.nan_count != 0 || summary.inf_count != 0) && !saw_not_finite.load(std::memory_order_relaxed)) {
      saw_not_finite.store(true, std::memory_order_relaxed);
    }
    return summary;
  }
  // Keep a row that `settle` will complete, or `release` forget. Its place, -1 where all are taken.
  int hold(const char* record);
  // Write the complete row in place of a held one: one alone of the two is read, whenever the process dies.
  void settle(int place, int kind, int32_t step, const char* record);
  void release(int place);
  // Write `width` bytes each over the records of these numbers, each at its own offset. Those that are drained, or that the
  // ring has let go of, stay as they are. False where one would not lie in its record, and none is written.
  bool amend(const uint64_t* numbers, const int64_t* offsets, const char* data, int64_t count, int64_t width);
  void push(int64_t thread, const layout::Running& entry);
  void pop(int64_t thread);
  // The thread is there from now on. Its slot, -1 where there is none.
  int move(int64_t thread, const layout::Place& place);
  // A record that `fill` writes where it lies: all but its two numbers. It must not throw.
  template <class F>
  void write(int kind, int32_t step, F fill) {
    const std::lock_guard<Lock> held(lock);
    if (char* place = place_for(kind, step)) {
      fill(place);
      put_numbers(kind, place);
    }
  }
  // The same of what the thread noted last, which has ended.
  template <class F>
  void finish(int64_t thread, int kind, int32_t step, F fill) {
    const std::lock_guard<Lock> held(lock);
    pop_entry(thread);
    write(kind, step, fill);
  }
  // The slot of a thread, -1 where there is none left. Under the lock.
  int slot_of(int64_t thread);
  int known_slot(int64_t thread) const;
  void forget(char* elsewhere);

  int64_t threads[layout::kThreadSlots] = {};
  int64_t depths[layout::kThreadSlots] = {};
  uint32_t place_kinds[layout::kThreadSlots] = {};
  int slot_count = 0;

 private:
  uint64_t held_ = 0; // a bit for each place that a held row has
  static_assert(layout::kHeldPlaces == 64);

  char* held_at(int place) const {
    return map + parts.held_offset + place * layout::kRecordBytes;
  }
  bool is_held(int place) const {
    return place >= 0 && place < layout::kHeldPlaces && (held_ >> place & 1) != 0;
  }
  char* thread_at(int slot) const {
    return map + parts.running_offset + slot * kThreadBytes;
  }
  static constexpr int64_t kThreadHead = 16;
  static constexpr int64_t kThreadBytes = kThreadHead + layout::kThreadDepth * sizeof(layout::Running);
  bool put_record(int kind, int32_t step, const char* record); // under the lock
  char* place_for(int kind, int32_t step);                     // the same; null where there is none
  void put_numbers(int kind, char* place);                     // the same: the record in its place is whole
  // The record that comes soon after that one: its memory has been out of every cache for long.
  void expect_record(const char* place) const;
  void pop_entry(int64_t thread);        // the same
  bool found_room();                     // the same
  void free_up_to(int64_t last);         // the same
  void carry(int64_t last, int32_t step); // the same
  static void store(char* at, int64_t value) {
    __atomic_store_n(reinterpret_cast<int64_t*>(at), value, __ATOMIC_RELEASE);
  }
};

} // namespace gradtrace
