// Torch's headers, and all that differs between the versions of torch that this is built against. Part of observer.cpp.
//
// Asked of torch's own types wherever they tell, so that a version between two that were looked at needs no line here.
#pragma once

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <utility>

namespace gradtrace {
namespace {

using torch::autograd::Node;

// A Node is held by shared pointers (2.6 to 2.9), or by intrusive ones (2.13): what is kept of it is weak either way.
using NodePtr = decltype(torch::autograd::THPCppFunction::cdata);

template <class Pointer>
struct Weak;
template <class T>
struct Weak<std::shared_ptr<T>> {
  using Type = std::weak_ptr<T>;
};
template <class T>
struct Weak<c10::intrusive_ptr<T>> {
  using Type = c10::weak_intrusive_ptr<T>;
};
using WeakNode = Weak<NodePtr>::Type;

WeakNode weakly(const NodePtr& node) {
  return WeakNode(node);
}

// A Function's object refers to its Node, which holds it in turn: weakly, where that is told (2.9).
template <class T>
NodePtr held(const std::weak_ptr<T>& node) {
  return node.lock();
}
inline NodePtr held(const NodePtr& node) {
  return node;
}

// The Node of a Python object, empty for what is none, or what has none any more.
NodePtr pointer_to(PyObject* node) {
  if (THPFunction_Check(node)) {
    return held(reinterpret_cast<THPFunction*>(node)->cdata);
  }
  if (torch::autograd::THPCppFunction_Check(node)) {
    return reinterpret_cast<torch::autograd::THPCppFunction*>(node)->cdata;
  }
  return NodePtr();
}

// Compiled autograd, in a pass inside or beside ours, asks each hook of a Node that both share, and fails on one of
// C++'s that does not answer. Nothing is to be compiled of ours. One of the two overrides torch's: it became const (2.7).
template <class Base>
struct NotCompiled : Base {
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) {}
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {}
};

} // namespace
} // namespace gradtrace
