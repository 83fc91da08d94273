// What a pass keeps of one Node. Part of observer.cpp.
#pragma once

#include "autograd/makers.h"

namespace gradtrace {
namespace {

class Pass;

// Of each gradient that came into a Node: how many sizes (-1: there was none, -2: they cannot be told), dtype, sizes.
using CameIn = c10::SmallVector<int64_t, 32>;

// One Node in one pass: what is noted when it begins, and names it in its row. Its two hooks lie in it.
struct NodeState {
  Pass* pass = nullptr;
  alignas(8) unsigned char before[16] = {}, after[16] = {};
  uint32_t name = 0, module_fqn = kNullString, parameter_fqn = kNullString;
  int32_t root = kNullInt32, call_index = kNullInt32;
  uint32_t occurrence = 0;
  int64_t number = kNullInt64;
  int64_t start = 0, thread = 0;
  CameIn* came_in = nullptr;
  AccumulateGrad* leaf = nullptr; // whose hook this state belongs to
  PyObject* frame = nullptr;      // borrowed: the pass owns it
  std::unique_ptr<Maker> maker;   // of a Node that may make others
  std::atomic<int32_t> index{-1};
  bool has_local = false, has_ended = false;
};

} // namespace
} // namespace gradtrace
