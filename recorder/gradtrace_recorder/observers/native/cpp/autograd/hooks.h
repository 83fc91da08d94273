// The two hooks of a Node. Part of observer.cpp.
#pragma once

#include "autograd/pass.h"

namespace gradtrace {
namespace {

// The engine calls hooks with lists of its own, which it replaces by what they give back (`call_pre_hooks` and
// `call_post_hooks` in torch/csrc/autograd/engine.cpp, alike in every version until 2.13): so a list is handed back as it
// is, not copied. The library is kept only if that holds where it was built (`build.py` tries it).
variable_list handed_back(const variable_list& list) {
  return std::move(const_cast<variable_list&>(list));
}

// A hook that a Node deletes gives back its hold on the pass, and no memory.
struct Before : NotCompiled<torch::autograd::FunctionPreHook> {
  explicit Before(NodeState& state) : state_(state) {}
  variable_list operator()(const variable_list& incoming) override {
    state_.pass->before(state_, incoming);
    return handed_back(incoming);
  }
  static void operator delete(void* hook) {
    state_of(hook)->pass->let_go();
  }
  static NodeState* state_of(void* hook) {
    return reinterpret_cast<NodeState*>(static_cast<char*>(hook) - offsetof(NodeState, before));
  }

 private:
  NodeState& state_;
};

struct After : NotCompiled<OursAfter> {
  explicit After(NodeState& state) : state_(state) {}
  variable_list operator()(const variable_list& outgoing, const variable_list& incoming) override {
    state_.pass->after(state_, outgoing, incoming);
    return handed_back(outgoing);
  }
  static void operator delete(void* hook) {
    state_of(hook)->pass->let_go();
  }
  static NodeState* state_of(void* hook) {
    return reinterpret_cast<NodeState*>(static_cast<char*>(hook) - offsetof(NodeState, after));
  }

 private:
  NodeState& state_;
};

static_assert(sizeof(Before) <= sizeof(NodeState::before) && sizeof(After) <= sizeof(NodeState::after));

} // namespace
} // namespace gradtrace
