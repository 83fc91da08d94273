// Made by `scripts/reference` from gradtrace_schemas.journal; do not edit.
//
// Fields lie as they lie in the file: packed, so none may be bound to a reference. All are zero at first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradtrace::layout {

constexpr char kDigest[] = "8063a491de7cb445";
constexpr int64_t kHeaderBytes = 4096;
constexpr int64_t kRecordBytes = 384;
constexpr int64_t kPlacesOffset = 1024;
constexpr int64_t kDropsOffset = 2048;
constexpr int64_t kNullInt64 = -9223372036854775807 - 1;
constexpr int32_t kNullInt32 = -2147483647 - 1;
constexpr uint32_t kNullString = 4294967295;
constexpr uint32_t kInModule = 1;
constexpr uint32_t kInOptimizer = 3;
constexpr uint8_t kNullBool = 255;
constexpr int kThreadSlots = 16;
constexpr int kThreadDepth = 31;
constexpr int kHeldPlaces = 64;
constexpr int kDropKinds = 64;
constexpr int kMaxDimensions = 8;
constexpr int kSketchLanes = 16;
constexpr uint8_t kStateNone = 0;
constexpr uint8_t kStateFull = 1;
constexpr uint8_t kStateNorms = 2;
constexpr uint8_t kStateShape = 3;
constexpr int64_t kHeaderDrained = 96;
constexpr int64_t kHeaderDropped = 112;
constexpr uint16_t kKindNodeEvents = 7;
constexpr uint16_t kKindNodeTensors = 8;
constexpr uint16_t kKindGradients = 9;

// What the values of a record are, by its kind: as Python's `struct` has them, and `s` for a summary.
constexpr const char* kFormats[kDropKinds] = {
    "",
    "HiiiqqqqqBIIqiiqqqqqqqqq",
    "HiiiiiIBqqqqqqqqs",
    "HiiiiIIIBqqqqqqqqBIs",
    "HiiiiiIIdII",
    "HiiiiIIiIiqqss",
    "HiiiiIIdiiqqqII",
    "HiiiiqIiIiiIIiqqqqiiIBBdss",
    "HiiiiIiBqqqqqqqqs",
    "HiiiiIIBqqqqqqqqs",
    "HiiiiBIIIqqqqqiIIiiqqIss",
    "HiiiiIiqqqIss",
    "HiiiIIIIiIII",
    "HiiiiIiIiiIIIqIqqIiiIIiIi",
};
constexpr char kRunningFormat[] = "IIiiiiiiIIqqi";
constexpr char kPlaceFormat[] = "IIiiiii";

#pragma pack(push, 1)

struct Shape {
  uint8_t ndim = {};
  int64_t sizes[8] = {};
};
static_assert(sizeof(Shape) == 65);
static_assert(offsetof(Shape, ndim) == 0);
static_assert(offsetof(Shape, sizes) == 1);

struct Summary {
  int64_t numel = {};
  double norm = {};
  double abs_max = {};
  double sum = {};
  int64_t nan_count = {};
  int64_t inf_count = {};
  int64_t fingerprint = {};
  float sketch[16] = {};
  uint32_t dtype = {};
  uint8_t state = {};
};
static_assert(sizeof(Summary) == 125);
static_assert(offsetof(Summary, numel) == 0);
static_assert(offsetof(Summary, norm) == 8);
static_assert(offsetof(Summary, abs_max) == 16);
static_assert(offsetof(Summary, sum) == 24);
static_assert(offsetof(Summary, nan_count) == 32);
static_assert(offsetof(Summary, inf_count) == 40);
static_assert(offsetof(Summary, fingerprint) == 48);
static_assert(offsetof(Summary, sketch) == 56);
static_assert(offsetof(Summary, dtype) == 120);
static_assert(offsetof(Summary, state) == 124);

struct Running {
  uint32_t node_name = {};
  uint32_t module_fqn = {};
  int32_t root = {};
  int32_t call_index = {};
  int32_t step = {};
  int32_t microbatch = {};
  int32_t backward_index = {};
  int32_t event_index = {};
  uint32_t phase = {};
  uint32_t parameter_fqn = {};
  int64_t autograd_seq = {};
  int64_t start_ns = {};
  int32_t stage_index = {};
  int32_t spare = {};
};
static_assert(sizeof(Running) == 64);
static_assert(offsetof(Running, node_name) == 0);
static_assert(offsetof(Running, module_fqn) == 4);
static_assert(offsetof(Running, root) == 8);
static_assert(offsetof(Running, call_index) == 12);
static_assert(offsetof(Running, step) == 16);
static_assert(offsetof(Running, microbatch) == 20);
static_assert(offsetof(Running, backward_index) == 24);
static_assert(offsetof(Running, event_index) == 28);
static_assert(offsetof(Running, phase) == 32);
static_assert(offsetof(Running, parameter_fqn) == 36);
static_assert(offsetof(Running, autograd_seq) == 40);
static_assert(offsetof(Running, start_ns) == 48);
static_assert(offsetof(Running, stage_index) == 56);
static_assert(offsetof(Running, spare) == 60);

struct Place {
  int64_t moved_ns = {};
  uint32_t kind = {};
  uint32_t name = {};
  int32_t root = {};
  int32_t call_index = {};
  int32_t step = {};
  int32_t microbatch = {};
  int32_t backward_index = {};
  int32_t spare = {};
  int64_t moved_ns_again = {};
};
static_assert(sizeof(Place) == 48);
static_assert(offsetof(Place, moved_ns) == 0);
static_assert(offsetof(Place, kind) == 8);
static_assert(offsetof(Place, name) == 12);
static_assert(offsetof(Place, root) == 16);
static_assert(offsetof(Place, call_index) == 20);
static_assert(offsetof(Place, step) == 24);
static_assert(offsetof(Place, microbatch) == 28);
static_assert(offsetof(Place, backward_index) == 32);
static_assert(offsetof(Place, spare) == 36);
static_assert(offsetof(Place, moved_ns_again) == 40);

struct Drop {
  uint64_t count = {};
  int32_t first_step = {};
  int32_t last_step = {};
};
static_assert(sizeof(Drop) == 16);
static_assert(offsetof(Drop, count) == 0);
static_assert(offsetof(Drop, first_step) == 8);
static_assert(offsetof(Drop, last_step) == 12);

struct NodeEvents {
  uint64_t record_number = {};
  uint16_t record_kind = {};
  int32_t step = {};
  int32_t microbatch = {};
  int32_t backward_index = {};
  int32_t event_index = {};
  int64_t autograd_seq = {};
  uint32_t node_name = {};
  int32_t root = {};
  uint32_t module_fqn = {};
  int32_t call_index = {};
  int32_t occurrence = {};
  uint32_t parameter_fqn = {};
  uint32_t phase = {};
  int32_t stage_index = {};
  int64_t thread = {};
  int64_t start_ns = {};
  int64_t end_ns = {};
  int64_t device_ns = {};
  int32_t grad_output_count = {};
  int32_t grad_input_count = {};
  uint32_t outcome = {};
  uint8_t grad_output_mutated = {};
  uint8_t replay_equal = {};
  double replay_error = {};
  Summary grad_output_summary = {};
  Summary grad_input_summary = {};
};
static_assert(sizeof(NodeEvents) == 370);
static_assert(offsetof(NodeEvents, record_number) == 0);
static_assert(offsetof(NodeEvents, record_kind) == 8);
static_assert(offsetof(NodeEvents, step) == 10);
static_assert(offsetof(NodeEvents, microbatch) == 14);
static_assert(offsetof(NodeEvents, backward_index) == 18);
static_assert(offsetof(NodeEvents, event_index) == 22);
static_assert(offsetof(NodeEvents, autograd_seq) == 26);
static_assert(offsetof(NodeEvents, node_name) == 34);
static_assert(offsetof(NodeEvents, root) == 38);
static_assert(offsetof(NodeEvents, module_fqn) == 42);
static_assert(offsetof(NodeEvents, call_index) == 46);
static_assert(offsetof(NodeEvents, occurrence) == 50);
static_assert(offsetof(NodeEvents, parameter_fqn) == 54);
static_assert(offsetof(NodeEvents, phase) == 58);
static_assert(offsetof(NodeEvents, stage_index) == 62);
static_assert(offsetof(NodeEvents, thread) == 66);
static_assert(offsetof(NodeEvents, start_ns) == 74);
static_assert(offsetof(NodeEvents, end_ns) == 82);
static_assert(offsetof(NodeEvents, device_ns) == 90);
static_assert(offsetof(NodeEvents, grad_output_count) == 98);
static_assert(offsetof(NodeEvents, grad_input_count) == 102);
static_assert(offsetof(NodeEvents, outcome) == 106);
static_assert(offsetof(NodeEvents, grad_output_mutated) == 110);
static_assert(offsetof(NodeEvents, replay_equal) == 111);
static_assert(offsetof(NodeEvents, replay_error) == 112);
static_assert(offsetof(NodeEvents, grad_output_summary) == 120);
static_assert(offsetof(NodeEvents, grad_input_summary) == 245);

struct NodeTensors {
  uint64_t record_number = {};
  uint16_t record_kind = {};
  int32_t step = {};
  int32_t microbatch = {};
  int32_t backward_index = {};
  int32_t event_index = {};
  uint32_t direction = {};
  int32_t position = {};
  Shape shape = {};
  Summary summary = {};
};
static_assert(sizeof(NodeTensors) == 224);
static_assert(offsetof(NodeTensors, record_number) == 0);
static_assert(offsetof(NodeTensors, record_kind) == 8);
static_assert(offsetof(NodeTensors, step) == 10);
static_assert(offsetof(NodeTensors, microbatch) == 14);
static_assert(offsetof(NodeTensors, backward_index) == 18);
static_assert(offsetof(NodeTensors, event_index) == 22);
static_assert(offsetof(NodeTensors, direction) == 26);
static_assert(offsetof(NodeTensors, position) == 30);
static_assert(offsetof(NodeTensors, shape) == 34);
static_assert(offsetof(NodeTensors, summary) == 99);

struct Gradients {
  uint64_t record_number = {};
  uint16_t record_kind = {};
  int32_t step = {};
  int32_t microbatch = {};
  int32_t backward_index = {};
  int32_t root = {};
  uint32_t parameter_fqn = {};
  uint32_t point = {};
  Shape shape = {};
  Summary summary = {};
};
static_assert(sizeof(Gradients) == 224);
static_assert(offsetof(Gradients, record_number) == 0);
static_assert(offsetof(Gradients, record_kind) == 8);
static_assert(offsetof(Gradients, step) == 10);
static_assert(offsetof(Gradients, microbatch) == 14);
static_assert(offsetof(Gradients, backward_index) == 18);
static_assert(offsetof(Gradients, root) == 22);
static_assert(offsetof(Gradients, parameter_fqn) == 26);
static_assert(offsetof(Gradients, point) == 30);
static_assert(offsetof(Gradients, shape) == 34);
static_assert(offsetof(Gradients, summary) == 99);
#pragma pack(pop)

} // namespace gradtrace::layout
