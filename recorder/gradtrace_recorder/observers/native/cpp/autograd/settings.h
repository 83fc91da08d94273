// What all passes of a recording share: what is the same in their rows, what names Nodes, memory that is used again.
// Part of observer.cpp.
#pragma once

#include "autograd/clock.h"
#include "journal/journal.h"

#include <array>
#include <cstdlib>
#include <new>
#include <utility>

namespace gradtrace {
namespace {

// A record with what is the same in all of its kind.
using Record = std::array<char, layout::kRecordBytes>;

// The fields of a table's record, where it lies.
template <class Row>
Row& row_in(char* record) {
  static_assert(alignof(Row) == 1 && sizeof(Row) + 8 <= layout::kRecordBytes, "its number comes last");
  return *reinterpret_cast<Row*>(record);
}

// What names an AccumulateGrad: as numbers of strings, and the frame that stands for the parameter's module.
struct LeafNames {
  int32_t root = kNullInt32;
  uint32_t holder = kNullString, parameter = kNullString;
  PyObject* frame = nullptr;
  PyObject* named = nullptr;
  bool is_parameter = true;
};

// Where a parameter is held, as Python knew it when it gave all that it had given.
struct LeafPlace {
  PyObject* module = nullptr; // a weak reference
  PyObject* own = nullptr;    // its name there
  const LeafNames* names = nullptr;
};

// Memory of one kind that is used again by the next that wants no more: asking for it, and clearing it, is dear.
class Spare {
 public:
  ~Spare() {
    std::free(memory_);
  }

  // At least so many bytes, aligned to a line of the cache. `size` is what it has.
  void* take(size_t wanted, size_t& size) {
    {
      const std::lock_guard<Lock> held(lock_);
      if (memory_ && size_ >= wanted) {
        size = size_;
        return std::exchange(memory_, nullptr);
      }
    }
    size = (wanted + 63) / 64 * 64;
    void* memory = std::aligned_alloc(64, size);
    if (!memory) {
      throw std::bad_alloc();
    }
    return memory;
  }

  void give(void* memory, size_t size) {
    {
      const std::lock_guard<Lock> held(lock_);
      if (!memory_ || size_ < size) {
        std::swap(memory, memory_);
        size_ = size;
      }
    }
    std::free(memory);
  }

 private:
  Lock lock_;
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// A Node's name as the journal's number, by its type.
struct NodeName {
  uint32_t number = 0;
  bool is_python = false; // each Function of Python's has a name of its own
  PyObject* text = nullptr;
};

// What all passes of a recording share.
struct Buffers;

constexpr size_t kFewestLeaves = 256;

struct Settings {
  std::shared_ptr<Journal> journal;
  Record node = {}, tensor = {}, gradient = {};
  bool is_off = true, is_whole = false;
  uint32_t dtypes[4] = {};
  uint32_t incoming = 0, outgoing = 0;
  int64_t zero_ns = 0;
  TickLength tick_length; // under the GIL
  // These are asked with the GIL. They give a failure of ours back as its text; what they raise is the job's.
  PyObject* foreign = nullptr; // (tensor) -> bytes of Foreign
  // (number, call) and (number): a Node that may make others begins and ends, at these numbers of Nodes.
  PyObject *begins = nullptr, *ends = nullptr;
  std::unordered_map<PyObject*, LeafNames> leaves; // by the name's identity; under the GIL
  size_t most_leaves = kFewestLeaves;              // then those of models that are gone are looked for
  std::unordered_map<PyObject*, LeafPlace> leaf_places; // by the variable; under the GIL
  long long places_given = -1;                          // how often Python had given names when they were asked for
  std::unordered_map<const std::type_info*, NodeName> node_names; // under the GIL
  std::pair<const std::type_info*, NodeName> recent_names[64];    // the same: some of them, by address
  Spare states, remembered; // the memory that the last pass gave back, on any thread
  std::unique_ptr<Buffers> buffers; // the same, under the GIL

  Settings();
  void forget_places();

  ~Settings();
};

} // namespace
} // namespace gradtrace
