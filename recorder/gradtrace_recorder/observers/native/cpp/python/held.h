// How Python's calls take the journal's lock. Part of journal_type.cpp.
#pragma once

#include "python/journal_object.h"
#include "python/python.h"

namespace gradtrace {
namespace {

// Waits for the lock without the GIL where it is taken.
class Held {
 public:
  explicit Held(Journal& journal) : journal_(journal) {
    take(journal);
  }
  ~Held() {
    journal_.lock.unlock();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  static void take(Journal& journal) {
    while (!journal.lock.try_lock()) {
      const Unlocked unlocked;
      // It is not kept: hooks would be held up until the GIL comes back.
      journal.lock.lock();
      journal.lock.unlock();
    }
  }

 private:
  Journal& journal_;
};

PyJournal* of(PyObject* self) {
  return reinterpret_cast<PyJournal*>(self);
}

Journal& core_of(PyObject* self) {
  return **of(self)->core;
}

} // namespace
} // namespace gradtrace
