#include "journal/journal.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

namespace gradtrace {

void Lock::wait() {
  for (int tries = 0; !try_lock(); ++tries) {
    if (tries < 100) {
      sched_yield();
    } else {
      const timespec a_while = {0, 20'000};
      nanosleep(&a_while, nullptr);
    }
  }
}

bool Event::wait(double seconds) {
  std::unique_lock<std::mutex> held(mutex_);
  changed_.wait_for(held, std::chrono::duration<double>(seconds), [this] { return set_; });
  return set_;
}

void Event::set() {
  std::lock_guard<std::mutex> held(mutex_);
  set_ = true;
  changed_.notify_all();
}

void Event::clear() {
  std::lock_guard<std::mutex> held(mutex_);
  set_ = false;
}

bool Event::is_set() {
  std::lock_guard<std::mutex> held(mutex_);
  return set_;
}

bool Journal::append(int kind, int32_t step, const char* record) {
  const std::lock_guard<Lock> held(lock);
  return put_record(kind, step, record);
}

void Journal::append_lasting(int kind, int32_t step, const char* record) {
  const std::lock_guard<Lock> held(lock);
  if (put_record(kind, step, record) && ring.is_kept) {
    ring.lasting.push_back({written, kind, {record, record + layout.record_bytes}});
  }
}

void Journal::mark_drained(int64_t last) {
  const std::lock_guard<Lock> held(lock);
  if (!ring.is_kept) {
    free_up_to(last);
    limit = last / half_records * half_records + places;
    return;
  }
  while (!ring.lasting.empty() && ring.lasting.front().number <= last) {
    ring.lasting.pop_front();
  }
  free_up_to(last);
}

void Journal::free_up_to(int64_t last) {
  store(layout.drained_offset, last);
  std::atomic_thread_fence(std::memory_order_release); // before anything is written over them
  drained = last;
  limit = last + places;
}

bool Journal::found_room() {
  if (limit < 0 || !ring.may_let_go()) {
    return false;
  }
  ++ring.shortened; // the ring is full before the steps that it should keep have ended
  let_go_of_oldest();
  return written < limit;
}

void Journal::let_go_of_oldest() {
  const Ring::Mark mark = ring.take_oldest();
  const int32_t kept = ring.marks.empty() ? mark.step : ring.marks.back().step;
  // A rank that is killed in between has a lasting row twice rather than not at all.
  const bool has_room = limit - written >= ring.stale(mark.number);
  if (has_room) {
    carry(mark.number, kept);
  }
  free_up_to(mark.number);
  if (!has_room) {
    carry(mark.number, kept);
  }
}

void Journal::carry(int64_t last, int32_t step) {
  while (!ring.lasting.empty() && ring.lasting.front().number <= last) {
    Ring::Lasting one = std::move(ring.lasting.front());
    ring.lasting.pop_front();
    std::memcpy(one.record.data() + 10, &step, sizeof step);
    if (put_record(one.kind, step, one.record.data())) {
      one.number = written;
      ring.lasting.push_back(std::move(one));
    }
  }
}

void Journal::expect_record(const char* place) const {
  constexpr int64_t ahead = 3;
  if (written + ahead < limit) {
    const int64_t all = places * layout.record_bytes;
    int64_t at = place - map - layout.records_offset + ahead * layout.record_bytes;
    at += layout.records_offset - (at < all ? 0 : all);
    for (int64_t line = 0; line < layout.record_bytes; line += 64) {
      __builtin_prefetch(map + at + line, 1);
    }
  }
}

bool Journal::put_record(int kind, int32_t step, const char* record) {
  char* place = place_for(kind, step);
  if (!place) {
    return false;
  }
  std::memcpy(place + 8, record + 8, layout.record_bytes - 16);
  put_numbers(kind, place);
  return true;
}

char* Journal::place_for(int kind, int32_t step) {
  if (written >= limit && !found_room()) {
    drop(kind, step);
    return nullptr;
  }
  return map + layout.records_offset + (written++ % places) * layout.record_bytes;
}

void Journal::put_numbers(int kind, char* place) {
  const int64_t number = written;
  std::memcpy(place + layout.record_bytes - 8, &number, 8);
  __atomic_store_n(reinterpret_cast<int64_t*>(place), number, __ATOMIC_RELEASE);
  ++counts[kind];
  expect_record(place);
  if (number == next_half) {
    next_half += half_records;
    half_is_full->set();
  }
}

void Journal::drop(int kind, int32_t step) {
  const std::lock_guard<Lock> held(lock);
  Drop& of = drops[kind];
  const bool is_first = of.count == 0;
  of.first = is_first ? step : std::min(of.first, step);
  of.last = is_first ? step : std::max(of.last, step);
  ++of.count;
  ++dropped;
  if (limit >= 0) {
    store(layout.dropped_offset, dropped);
    std::memcpy(map + layout.drops_offset + kind * layout.drop_bytes, &of, sizeof of);
  }
}

int Journal::known_slot(int64_t thread) const {
  for (int slot = 0; slot < slot_count; ++slot) {
    if (threads[slot] == thread) {
      return slot;
    }
  }
  return -1;
}

int Journal::slot_of(int64_t thread) {
  int slot = known_slot(thread);
  if (slot >= 0) {
    return slot;
  }
  if (slot_count < layout.thread_slots) {
    slot = slot_count;
  } else {
    // Threads come and go: the slot of one that runs nothing serves the next.
    for (int idle = 0; idle < slot_count && slot < 0; ++idle) {
      const bool is_inside =
          place_kinds[idle] >= layout.first_inside && place_kinds[idle] <= layout.last_inside;
      if (depths[idle] == 0 && !is_inside) {
        slot = idle;
      }
    }
    if (slot < 0) {
      return -1;
    }
  }
  threads[slot] = thread;
  place_kinds[slot] = 0;
  depths[slot] = 0;
  slot_count = std::max(slot_count, slot + 1);
  std::memset(map + layout.places_offset + slot * layout.place_bytes, 0, layout.place_bytes);
  const int64_t head[2] = {thread, 0};
  std::memcpy(map + layout.running_offset + slot * layout.thread_bytes, head, sizeof head);
  return slot;
}

void Journal::push(int64_t thread, const RunningEntry& entry) {
  const std::lock_guard<Lock> held(lock);
  if (limit < 0) {
    return;
  }
  const int slot = slot_of(thread);
  if (slot < 0) {
    return;
  }
  const int64_t depth = depths[slot]++;
  if (depth < layout.thread_depth) {
    const int64_t start = layout.running_offset + slot * layout.thread_bytes;
    std::memcpy(map + start + layout.thread_head + depth * sizeof entry, &entry, sizeof entry);
    store(start + 8, depth + 1);
  }
}

void Journal::pop(int64_t thread) {
  const std::lock_guard<Lock> held(lock);
  pop_entry(thread);
}

void Journal::pop_entry(int64_t thread) {
  const int slot = known_slot(thread);
  if (limit < 0 || slot < 0 || depths[slot] == 0) {
    return;
  }
  const int64_t depth = --depths[slot];
  if (depth < layout.thread_depth) {
    store(layout.running_offset + slot * layout.thread_bytes + 8, depth);
  }
}

void Journal::forget(char* elsewhere) {
  new (&lock) Lock(); // a thread that is not here may have held it
  new (half_is_full.get()) Event();
  new (&ring) Ring(); // another thread may have been about to change it: what it held stays where it is
  limit = -1;
  map = elsewhere;
}

} // namespace gradtrace
