// The journal without torch and Python: what is written lies where it should, and threads that write at once spoil nothing.
#include "journal/journal.h"

#include "holds.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

using namespace gradtrace;

namespace {

constexpr int kKind = layout::kKindNodeEvents;
constexpr int64_t kHalf = 64;

// A journal over memory of its own, which ends with it.
struct File {
  static constexpr int64_t kThreads = layout::kThreadSlots * (16 + layout::kThreadDepth * sizeof(layout::Running));
  static constexpr int64_t kHeld = layout::kHeaderBytes + kThreads;
  static constexpr int64_t kRecords = (kHeld + layout::kHeldPlaces * layout::kRecordBytes + 63) / 64 * 64;
  static constexpr int64_t kLength = kRecords + 2 * kHalf * layout::kRecordBytes;

  char* const memory = static_cast<char*>(std::aligned_alloc(64, (kLength + 63) / 64 * 64));
  Journal journal;

  File() {
    std::memset(memory, 0, kLength);
    HOLDS(journal.open(memory, kLength, Parts{layout::kHeaderBytes, kHeld, kRecords, kHalf}));
  }
  ~File() {
    std::free(memory);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int64_t word(int64_t at) const {
    int64_t value;
    std::memcpy(&value, memory + at, 8);
    return value;
  }
  char* record(int64_t number) const {
    return memory + kRecords + (number - 1) % (2 * kHalf) * layout::kRecordBytes;
  }
  bool is_whole(int64_t number) const {
    const int64_t at = record(number) - memory;
    return word(at) == number && word(at + layout::kRecordBytes - 8) == number;
  }
  layout::NodeEvents row(int64_t number) const {
    layout::NodeEvents row;
    std::memcpy(&row, record(number), sizeof row);
    return row;
  }
};

struct Made {
  alignas(8) char record[layout::kRecordBytes] = {};

  explicit Made(int32_t step, int64_t thread = 0) {
    auto& row = *reinterpret_cast<layout::NodeEvents*>(record);
    row.record_kind = kKind;
    row.step = step;
    row.thread = thread;
  }
};

void parts_that_do_not_lie_in_the_memory_are_refused() {
  alignas(8) static char memory[layout::kHeaderBytes];
  const int64_t most = int64_t{1} << 62;
  for (const int64_t length : {int64_t{0}, int64_t{sizeof memory}}) {
    for (const int64_t offset : {int64_t{-8}, int64_t{0}, int64_t{1}, most}) {
      for (const int64_t half : {int64_t{-1}, int64_t{0}, int64_t{1}, most}) {
        Journal journal;
        HOLDS(!journal.open(memory, length, Parts{offset, offset, offset, half}));
        HOLDS(!journal.append(kKind, 0, Made(0).record)); // and what was never opened takes nothing
        HOLDS(journal.hold(Made(0).record) == -1);
        journal.push(1, layout::Running());
        HOLDS(journal.move(1, layout::Place()) == -1);
        journal.mark_drained(5);
      }
    }
  }
}

void records_lie_one_behind_the_other_until_there_is_no_room() {
  File file;
  for (int32_t step = 1; step <= 2 * kHalf; ++step) {
    HOLDS(file.journal.append(kKind, step, Made(step).record));
    HOLDS(file.is_whole(step) && file.row(step).step == step);
  }
  HOLDS(file.journal.half_is_full->is_set());
  HOLDS(!file.journal.append(kKind, 999, Made(999).record));
  HOLDS(file.journal.drops[kKind].count == 1 && file.journal.drops[kKind].last_step == 999);
  HOLDS(file.word(layout::kHeaderDropped) == 1);
  file.journal.mark_drained(kHalf);
  HOLDS(file.word(layout::kHeaderDrained) == kHalf);
  HOLDS(file.journal.append(kKind, 7, Made(7).record) && file.is_whole(2 * kHalf + 1));
  HOLDS(file.is_whole(kHalf + 1)); // of the half that is not drained
}

void of_a_held_row_and_its_replacement_one_is_read() {
  File file;
  std::vector<int> places;
  for (int i = 0; i < layout::kHeldPlaces; ++i) {
    places.push_back(file.journal.hold(Made(i).record));
    HOLDS(places.back() >= 0 && file.word(File::kHeld + places.back() * layout::kRecordBytes) == 1);
  }
  HOLDS(file.journal.hold(Made(0).record) == -1);
  const int64_t at = File::kHeld + places[3] * layout::kRecordBytes;
  file.journal.settle(places[3], kKind, 3, Made(3).record);
  HOLDS(file.word(at) == 0 && file.word(at + layout::kRecordBytes - 8) == 1 && file.is_whole(1));
  HOLDS(file.journal.hold(Made(0).record) == places[3]);
  for (int times = 0; times < 2; ++times) {
    file.journal.release(places[3]); // once more than it was held: nothing comes to be held twice
  }
  HOLDS(file.journal.hold(Made(0).record) == places[3] && file.journal.hold(Made(0).record) == -1);
}

void what_is_amended_lies_in_its_record() {
  File file;
  for (int32_t step = 1; step <= 3; ++step) {
    file.journal.append(kKind, step, Made(step).record);
  }
  const uint64_t numbers[] = {1, 3};
  const int64_t offsets[] = {offsetof(layout::NodeEvents, end_ns), offsetof(layout::NodeEvents, end_ns)};
  const int64_t ends[] = {11, 33};
  HOLDS(file.journal.amend(numbers, offsets, reinterpret_cast<const char*>(ends), 2, 8));
  HOLDS(file.row(1).end_ns == 11 && file.row(2).end_ns == 0 && file.row(3).end_ns == 33);
  for (const int64_t wrong : {int64_t{-8}, int64_t{0}, layout::kRecordBytes - 15, layout::kRecordBytes}) {
    HOLDS(!file.journal.amend(numbers, &wrong, reinterpret_cast<const char*>(ends), 1, 8));
  }
  HOLDS(file.is_whole(1) && file.is_whole(2) && file.is_whole(3));
}

void a_ring_lets_go_of_whole_steps_and_writes_again_what_lasts() {
  File file;
  Journal& journal = file.journal;
  journal.ring.is_kept = true;
  journal.append_lasting(kKind, 0, Made(0, 77).record);
  for (int32_t step = 0; step < 50; ++step) {
    for (int i = 0; i < 10; ++i) {
      HOLDS(journal.append(kKind, step, Made(step).record));
    }
    Ring::Mark mark;
    mark.step = step;
    mark.number = journal.written;
    std::memcpy(mark.counts, journal.counts, sizeof mark.counts);
    journal.ring.marks.push_back(mark);
  }
  HOLDS(journal.ring.shortened > 0 && journal.drops[kKind].count == 0);
  int lasting = 0;
  for (int64_t number = journal.drained + 1; number <= journal.written; ++number) {
    HOLDS(file.is_whole(number));
    lasting += file.row(number).thread == 77;
  }
  HOLDS(lasting == 1);
}

// As in a job: threads run Nodes, one holds and settles rows, one amends, one drains. Each record is whole when it is drained.
void threads_that_write_at_once_spoil_nothing() {
  constexpr int kWriters = 3, kEach = 4000;
  File file;
  Journal& journal = file.journal;
  std::atomic<int> running{kWriters + 2};
  int64_t drained = 0, rows[kWriters + 2] = {};
  std::vector<std::thread> threads;
  for (int writer = 0; writer < kWriters; ++writer) {
    threads.emplace_back([&, writer] {
      layout::Running entry;
      for (int i = 0; i < kEach; ++i) {
        entry.event_index = i;
        journal.push(writer + 1, entry);
        journal.finish(writer + 1, kKind, i, [&](char* place) {
          std::memcpy(place + 8, Made(i, writer + 1).record + 8, layout::kRecordBytes - 16);
        });
        layout::Place place;
        place.moved_ns = place.moved_ns_again = i;
        journal.move(writer + 1, place);
      }
      --running;
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < kEach; ++i) {
      const int place = journal.hold(Made(i).record);
      journal.settle(place, kKind, i, Made(i, kWriters + 1).record);
    }
    --running;
  });
  threads.emplace_back([&] {
    for (int i = 0; i < kEach; ++i) {
      const uint64_t number = i + 1;
      const int64_t offset = offsetof(layout::NodeEvents, device_ns), value = i;
      HOLDS(journal.amend(&number, &offset, reinterpret_cast<const char*>(&value), 1, 8));
    }
    --running;
  });
  const auto drain_to = [&](int64_t last) {
    for (int64_t number = drained + 1; number <= last; ++number) {
      HOLDS(file.is_whole(number));
      const int64_t thread = file.row(number).thread;
      HOLDS(thread >= 1 && thread <= kWriters + 1);
      ++rows[thread];
    }
    journal.mark_drained(last);
    drained = last;
  };
  const auto newest = [&] {
    const std::lock_guard<Lock> held(journal.lock);
    return journal.written;
  };
  while (running > 0) {
    journal.half_is_full->wait(0.01);
    journal.half_is_full->clear();
    if (newest() >= drained + kHalf) {
      drain_to(drained + kHalf);
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  while (drained < journal.written) {
    drain_to(std::min(drained + kHalf, journal.written));
  }
  int64_t all = 0;
  for (const int64_t count : rows) {
    all += count;
  }
  HOLDS(all == journal.written && all == journal.counts[kKind]);
  HOLDS(all + static_cast<int64_t>(journal.drops[kKind].count) == (kWriters + 1) * kEach);
}

} // namespace

int main() {
  parts_that_do_not_lie_in_the_memory_are_refused();
  records_lie_one_behind_the_other_until_there_is_no_room();
  of_a_held_row_and_its_replacement_one_is_read();
  what_is_amended_lies_in_its_record();
  a_ring_lets_go_of_whole_steps_and_writes_again_what_lasts();
  threads_that_write_at_once_spoil_nothing();
}
