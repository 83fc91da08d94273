// The mapped journal as hooks write it that hold no GIL. The layout is that of gradtrace_schemas/journal.py, from which
// Python hands over every offset; the file, its strings and its held rows stay with gradtrace_recorder/journal.py.
//
// What several threads share lies under one lock. Whoever holds the GIL lets go of it before waiting for the
// lock, and nobody who holds the lock waits for the GIL: so neither waits for the other.
#pragma once

#include <Python.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gradtrace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the journal's numbers are little-endian");

constexpr int kMostKinds = 64, kMostSlots = 64, kPlaceFields = 7;

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
  bool try_lock();
  void lock();
  void unlock() {
    if (--depth_ == 0) {
      owner_.store(0, std::memory_order_release);
    }
  }

 private:
  std::atomic<uintptr_t> owner_{0};
  int depth_ = 0; // the owner's
};

struct Layout {
  int64_t records_offset = 0, record_bytes = 0, running_offset = 0, thread_bytes = 0, thread_head = 0,
          places_offset = 0, place_bytes = 0, drops_offset = 0, drop_bytes = 0, dropped_offset = 0;
  int64_t thread_slots = 0, thread_depth = 0, first_inside = 0, last_inside = 0;
};

class Journal {
 public:
  Layout layout;
  std::shared_ptr<Event> half_is_full;
  Lock lock;
  int64_t places = 0, half_records = 0;
  int64_t written = 0, limit = 0, next_half = 0;
  int64_t counts[kMostKinds] = {};
  struct Drop {
    int64_t count = 0;
    int32_t first = 0, last = 0;
  } drops[kMostKinds];
  int64_t dropped = 0;
  char* map = nullptr;

  // `record` has all but its two numbers; any thread, with or without the GIL. Whether there was room.
  bool append(int kind, int32_t step, char* record);
  void drop(int kind, int32_t step);
  void push(int64_t thread, const RunningEntry& entry);
  void pop(int64_t thread);
  // What the thread noted last has ended, and this is its record.
  void finish(int64_t thread, int kind, int32_t step, char* record);
  // A record that comes soon: its memory has been out of every cache for long.
  void expect_records() const;
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
  bool put_record(int kind, int32_t step, char* record); // under the lock
  void pop_entry(int64_t thread);                          // the same
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
