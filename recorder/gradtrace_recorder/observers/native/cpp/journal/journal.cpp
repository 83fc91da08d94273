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

namespace {

// Whether so many entries of so many bytes lie in the memory from that offset on, where words are aligned.
bool lies_within(int64_t length, int64_t offset, int64_t count, int64_t bytes) {
  int64_t size, end;
  return offset >= 0 && offset % 8 == 0 && count >= 0 && !__builtin_mul_overflow(count, bytes, &size) &&
      !__builtin_add_overflow(offset, size, &end) && end <= length;
}

} // namespace

bool Journal::open(char* memory, int64_t length, const Parts& where) {
  using namespace layout;
  const std::lock_guard<Lock> held(lock);
  const bool is_known = map == nullptr && where.half_records > 0 && where.half_records <= length &&
      lies_within(length, 0, 1, kHeaderBytes) && lies_within(length, where.running_offset, kThreadSlots, kThreadBytes) &&
      lies_within(length, where.held_offset, kHeldPlaces, kRecordBytes) &&
      lies_within(length, where.records_offset, 2 * where.half_records, kRecordBytes);
  static_assert(kPlacesOffset + kThreadSlots * static_cast<int64_t>(sizeof(Place)) <= kDropsOffset);
  static_assert(kDropsOffset + kDropKinds * static_cast<int64_t>(sizeof(Drop)) <= kHeaderBytes);
  static_assert(kHeaderDrained % 8 == 0 && kHeaderDropped % 8 == 0 && kRecordBytes % 64 == 0);
  if (!is_known) {
    return false;
  }
  map = memory;
  parts = where;
  places = limit = 2 * where.half_records;
  next_half = where.half_records;
  return true;
}

void Journal::close() {
  const std::lock_guard<Lock> held(lock);
  limit = -1;
  map = nullptr;
}

bool Journal::append(int kind, int32_t step, const char* record) {
  const std::lock_guard<Lock> held(lock);
  return put_record(kind, step, record);
}

void Journal::append_lasting(int kind, int32_t step, const char* record) {
  const std::lock_guard<Lock> held(lock);
  if (put_record(kind, step, record) && ring.is_kept) {
    ring.lasting.push_back({written, kind, {record, record + layout::kRecordBytes}});
  }
}

void Journal::mark_drained(int64_t last) {
  const std::lock_guard<Lock> held(lock);
  if (limit < 0) {
    return;
  }
  if (!ring.is_kept) {
    free_up_to(last);
    limit = last / parts.half_records * parts.half_records + places;
    return;
  }
  while (!ring.lasting.empty() && ring.lasting.front().number <= last) {
    ring.lasting.pop_front();
  }
  free_up_to(last);
}

void Journal::free_up_to(int64_t last) {
  store(map + layout::kHeaderDrained, last);
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
    const int64_t all = places * layout::kRecordBytes;
    int64_t at = place - map - parts.records_offset + ahead * layout::kRecordBytes;
    at += parts.records_offset - (at < all ? 0 : all);
    for (int64_t line = 0; line < layout::kRecordBytes; line += 64) {
      __builtin_prefetch(map + at + line, 1);
    }
  }
}

bool Journal::put_record(int kind, int32_t step, const char* record) {
  char* place = place_for(kind, step);
  if (!place) {
    return false;
  }
  std::memcpy(place + 8, record + 8, layout::kRecordBytes - 16);
  put_numbers(kind, place);
  return true;
}

char* Journal::place_for(int kind, int32_t step) {
  if (written >= limit && !found_room()) {
    drop(kind, step);
    return nullptr;
  }
  return map + parts.records_offset + (written++ % places) * layout::kRecordBytes;
}

void Journal::put_numbers(int kind, char* place) {
  const int64_t number = written;
  std::memcpy(place + layout::kRecordBytes - 8, &number, 8);
  __atomic_store_n(reinterpret_cast<int64_t*>(place), number, __ATOMIC_RELEASE);
  ++counts[kind];
  expect_record(place);
  if (number == next_half) {
    next_half += parts.half_records;
    half_is_full->set();
  }
}

void Journal::drop(int kind, int32_t step) {
  const std::lock_guard<Lock> held(lock);
  layout::Drop& of = drops[kind];
  const bool is_first = of.count == 0;
  of.first_step = is_first || step < of.first_step ? step : of.first_step;
  of.last_step = is_first || step > of.last_step ? step : of.last_step;
  ++of.count;
  ++dropped;
  if (limit >= 0) {
    store(map + layout::kHeaderDropped, dropped);
    std::memcpy(map + layout::kDropsOffset + kind * sizeof of, &of, sizeof of);
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
  if (slot_count < layout::kThreadSlots) {
    slot = slot_count;
  } else {
    // Threads come and go: the slot of one that runs nothing serves the next.
    for (int idle = 0; idle < slot_count && slot < 0; ++idle) {
      const bool is_inside =
          place_kinds[idle] >= layout::kInModule && place_kinds[idle] <= layout::kInOptimizer;
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
  std::memset(map + layout::kPlacesOffset + slot * sizeof(layout::Place), 0, sizeof(layout::Place));
  const int64_t head[2] = {thread, 0};
  static_assert(sizeof head == kThreadHead);
  std::memcpy(thread_at(slot), head, sizeof head);
  return slot;
}

int Journal::hold(const char* record) {
  const std::lock_guard<Lock> held(lock);
  if (limit < 0 || ~held_ == 0) {
    return -1;
  }
  const int place = 63 - __builtin_clzll(~held_);
  held_ |= uint64_t{1} << place;
  std::memcpy(held_at(place) + 8, record + 8, layout::kRecordBytes - 16);
  std::memset(held_at(place) + layout::kRecordBytes - 8, 0, 8);
  store(held_at(place), 1);
  return place;
}

void Journal::settle(int place, int kind, int32_t step, const char* record) {
  const std::lock_guard<Lock> held(lock);
  const bool was_held = limit >= 0 && is_held(place);
  if (was_held) {
    if (written >= limit) {
      found_room();
    }
    store(held_at(place) + layout::kRecordBytes - 8, written + 1);
  }
  put_record(kind, step, record);
  if (was_held) {
    release(place);
  }
}

void Journal::release(int place) {
  const std::lock_guard<Lock> held(lock);
  if (limit >= 0 && is_held(place)) {
    store(held_at(place), 0);
    held_ &= ~(uint64_t{1} << place);
  }
}

bool Journal::amend(const uint64_t* numbers, const int64_t* offsets, const char* data, int64_t count, int64_t width) {
  constexpr int64_t kAtOnce = 256; // hooks wait meanwhile
  for (int64_t i = 0; i < count; ++i) {
    if (width < 0 || width > layout::kRecordBytes - 16 || offsets[i] < 8 ||
        offsets[i] > layout::kRecordBytes - 8 - width) {
      return false;
    }
  }
  for (int64_t start = 0; start < count; start += kAtOnce) {
    const std::lock_guard<Lock> held(lock);
    if (limit < 0) {
      break;
    }
    for (int64_t i = start; i < std::min(start + kAtOnce, count); ++i) {
      if (numbers[i] > static_cast<uint64_t>(drained)) {
        char* record = map + parts.records_offset +
            static_cast<int64_t>((numbers[i] - 1) % static_cast<uint64_t>(places)) * layout::kRecordBytes;
        std::memcpy(record + offsets[i], data + i * width, width);
      }
    }
  }
  return true;
}

void Journal::push(int64_t thread, const layout::Running& entry) {
  const std::lock_guard<Lock> held(lock);
  if (limit < 0) {
    return;
  }
  const int slot = slot_of(thread);
  if (slot < 0) {
    return;
  }
  const int64_t depth = depths[slot]++;
  if (depth < layout::kThreadDepth) {
    char* const start = thread_at(slot);
    std::memcpy(start + kThreadHead + depth * sizeof entry, &entry, sizeof entry);
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
  if (depth < layout::kThreadDepth) {
    store(thread_at(slot) + 8, depth);
  }
}

int Journal::move(int64_t thread, const layout::Place& place) {
  const std::lock_guard<Lock> held(lock);
  const int slot = limit < 0 ? -1 : slot_of(thread);
  if (slot >= 0) {
    // First and last the time: a place of which they differ was being written.
    char* to = map + layout::kPlacesOffset + slot * sizeof place;
    const char* from = reinterpret_cast<const char*>(&place);
    std::memcpy(to, from, 8);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    std::memcpy(to + 8, from + 8, sizeof place - 16);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    std::memcpy(to + sizeof place - 8, from + sizeof place - 8, 8);
    place_kinds[slot] = place.kind;
  }
  return slot;
}

void Journal::forget(char* elsewhere) {
  new (&lock) Lock(); // a thread that is not here may have held it
  new (half_is_full.get()) Event();
  new (&ring) Ring(); // another thread may have been about to change it: what it held stays where it is
  held_ = 0;
  limit = -1;
  map = elsewhere;
}

} // namespace gradtrace
