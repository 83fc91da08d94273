// Whether anybody else has hooks on a parameter, or on the Node that accumulates it. Part of observer.cpp.
#pragma once

#include "autograd/raised.h"
#include "autograd/tensors.h"

namespace gradtrace {
namespace {

// A hook of ours: of another pass on the same Node, it does nothing in this one.
struct OursAfter : torch::autograd::FunctionPostHook {};

// Whether the tables that Python's hooks lie in hold any. One that was emptied stays where it was. Torch keeps no others
// on a parameter; on a Node it may (a reducer's), which are asked for by name, as their types are not exported (2.13).
bool has_hooks(const at::Tensor& parameter) {
  const auto& all = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (!all) {
    return false;
  }
  const PyObject* table = static_cast<torch::autograd::PyFunctionTensorPostAccGradHooks&>(*all).dict;
  return !table || !PyDict_Check(table) || reinterpret_cast<const PyDictObject*>(table)->ma_used != 0;
}

// The same from a hook, which has no GIL. That there is no table is seen in one load of a pointer, as the engine sees it;
// a table belongs to Python, where another thread may replace it meanwhile.
bool has_hooks_now(const at::Tensor& parameter) {
  if (!torch::autograd::impl::post_acc_grad_hooks(parameter)) {
    return false;
  }
  const Gil gil;
  return has_hooks(parameter);
}

bool has_hooks(const AccumulateGrad& leaf) {
  for (const auto& one : leaf.post_hooks()) {
    const auto& hook = *one;
    if (dynamic_cast<const OursAfter*>(&hook)) {
      continue;
    }
    const PyObject* table = nullptr;
    if (std::strstr(typeid(hook).name(), "PyFunctionPostHook")) {
      table = static_cast<const torch::autograd::PyFunctionPostHook&>(hook).dict;
    }
    if (!table || !PyDict_Check(table) || reinterpret_cast<const PyDictObject*>(table)->ma_used != 0) {
      return true;
    }
  }
  return has_hooks(leaf.variable);
}

} // namespace
} // namespace gradtrace
