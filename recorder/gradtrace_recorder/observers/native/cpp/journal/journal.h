// The mapped journal as every thread writes it, Python's calls and hooks without the GIL alike. Its layout is that of
// gradtrace_schemas/journal.py. Python hands over where each part of the file begins, how large its entries are and
// where the fields lie that hooks fill in. Compiled in here are the ends of a record (its number first and last, its
// kind at byte 8, its step at byte 10) and the fields of what threads run, of their places and of drops: of these only
// the sizes are held against what Python says. The file, its strings and which rows are held stay with
// gradtrace_recorder/journal.py; a held row is written there too, with this lock.
//
// What several threads share lies under one lock, but for Event, which has its own, and what is atomic. No thread
// waits for the lock while it holds the GIL: it lets go of it first. So whoever holds the lock may wait for the GIL,
// as Python code that has taken it does where the interpreter changes threads; nothing here does.
#pragma once

#include "journal/ring.h"

#include <Python.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gradtrace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the journal's numbers are little-endian");

constexpr int kMostSlots = 64, kPlaceFields = 7;

// What a thread is about to run, as the journal's RUNNING has it.
#pragma pack(push, 1)
struct RunningEntry {
  uint32_t node_name, module_fqn;
  int32_t root, call_index, step, microbatch, backward_index, event_index;
  uint32_t phase, parameter_fqn;
  int64_t autograd_seq, start_ns;
  int32_t stage_index, spare;
};
#pragma pack(pop)

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

struct Layout {
  int64_t records_offset = 0, record_bytes = 0, running_offset = 0, thread_bytes = 0, thread_head = 0,
          places_offset = 0, place_bytes = 0, drops_offset = 0, drop_bytes = 0, dropped_offset = 0,
          drained_offset = 0;
  int64_t thread_slots = 0, thread_depth = 0, first_inside = 0, last_inside = 0;
};

class Journal {
 public:
  Layout layout;
  std::shared_ptr<Event> half_is_full;
  Lock lock;
  int64_t places = 0, half_records = 0;
  int64_t written = 0, limit = 0, next_half = 0, drained = 0;
  int64_t mapped = 0; // bytes of the records' pages that are in memory, or need no more be brought there
  int64_t counts[kMostKinds] = {};
  struct Drop {
    int64_t count = 0;
    int32_t first = 0, last = 0;
  } drops[kMostKinds];
  int64_t dropped = 0;
  Ring ring;
  // Whether a hook has seen a value that is not finite in a gradient.
  std::atomic<bool> saw_not_finite{false};
  char* map = nullptr;

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
    if ((summary.nans != 0 || summary.infs != 0) && !saw_not_finite.load(std::memory_order_relaxed)) {
      saw_not_finite.store(true, std::memory_order_relaxed);
    }
    return summary;
  }
  void push(int64_t thread, const RunningEntry& entry);
  void pop(int64_t thread);
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

  int64_t threads[kMostSlots] = {};
  int64_t depths[kMostSlots] = {};
  int64_t place_kinds[kMostSlots] = {};
  PyObject* place_objects[kMostSlots] = {}; // under the GIL
  int slot_count = 0;

 private:
  bool put_record(int kind, int32_t step, const char* record); // under the lock
  char* place_for(int kind, int32_t step);                     // the same; null where there is none
  void put_numbers(int kind, char* place);                     // the same: the record in its place is whole
  // The record that comes soon after that one: its memory has been out of every cache for long.
  void expect_record(const char* place) const;
  void pop_entry(int64_t thread);        // the same
  bool found_room();                     // the same
  void free_up_to(int64_t last);         // the same
  void carry(int64_t last, int32_t step); // the same
  void store(int64_t offset, int64_t value) {
    __atomic_store_n(reinterpret_cast<int64_t*>(map + offset), value, __ATOMIC_RELEASE);
  }
};

struct PyJournal {
  PyObject_HEAD
  std::shared_ptr<Journal>* core; // hooks hold it too, as long as they are on a Node
  Py_buffer view;
  PyObject* event;
  std::vector<std::string>* formats;
  int summary_bytes;
};

// Adds the types `Journal` and `Event`. Returns the type of a journal, null with an exception set.
PyTypeObject* add_journal_types(PyObject* module);

} // namespace gradtrace
