// Where in the program an operator was launched: Python frames, or the autograd node and the frames of its forward.
//
// Stacks are interned: an access carries a number. Law: taken before `State::mutex`, since it needs the interpreter.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/python_headers.h>

#include <ATen/SequenceNumber.h>

#include "state.h"

namespace lowtide_sim {

// The number of the autograd node that was made last: VariableType makes it before it calls the kernel.
inline uint64_t last_node() {
  auto next = at::sequence_number::peek();
  return next ? next - 1 : 0;
}

struct Frame {
  PyObject* code; // owned
  int line;
};

struct PythonStack {
  std::vector<Frame> frames; // innermost first
  std::string node; // the autograd node that launched it, if any
  int forward = 0; // the stack of the operator whose backward this is
};

class StackTable {
 public:
  // The number of the stack of this thread; 0 where nothing is known. Takes the interpreter's lock.
  int here() {
    if (!state().stacks || closed_ || !Py_IsInitialized()) {
      return 0;
    }
    PythonStack found;
    uint64_t hash = 1469598103934665603ull;
    auto mix = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211ull; };
    auto node = torch::autograd::get_current_node();
    if (node) {
      found.node = node->name();
      found.forward = forward_of(node->sequence_nr());
      mix((uint64_t)found.forward + 1);
      for (char c : found.node) {
        mix((uint64_t)c);
      }
    }
    auto held = PyGILState_Ensure();
    walk(found, mix);
    int number = intern(std::move(found), hash);
    PyGILState_Release(held);
    if (!node && at::GradMode::is_enabled()) {
      remember(last_node(), number);
    }
    return number;
  }

  // One line a frame, innermost first. The interpreter's lock must be held.
  std::vector<std::string> text(int number) {
    std::vector<std::string> lines;
    std::lock_guard<std::mutex> lock(mutex_);
    for (int depth = 0; number > 0 && depth < 2; depth++) {
      const auto& stack = stacks_[number];
      if (!stack.node.empty()) {
        lines.push_back("backward of " + stack.node);
      }
      for (const auto& frame : stack.frames) {
        lines.push_back(describe(frame));
      }
      number = stack.forward;
    }
    return lines;
  }

  // From now on no stack is taken: the interpreter is about to end.
  void close() {
    closed_ = true;
  }

 private:
  static constexpr int kDeepest = 24;
  static constexpr size_t kRemembered = 1 << 18;

  template <typename Mix>
  void walk(PythonStack& found, Mix& mix) {
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF((PyObject*)frame);
    for (int depth = 0; frame && depth < kDeepest; depth++) {
      auto* code = (PyObject*)PyFrame_GetCode(frame);
      int line = PyFrame_GetLineNumber(frame);
      mix((uint64_t)code);
      mix((uint64_t)line);
      found.frames.push_back({code, line});
      auto* outer = PyFrame_GetBack(frame);
      Py_DECREF((PyObject*)frame);
      frame = outer;
    }
    Py_XDECREF((PyObject*)frame);
  }

  // Keeps the frames' code objects alive the first time, and gives them back when the stack is known already.
  int intern(PythonStack&& found, uint64_t hash) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto known = by_hash_.find(hash);
    if (known != by_hash_.end()) {
      for (auto& frame : found.frames) {
        Py_DECREF(frame.code);
      }
      return known->second;
    }
    stacks_.push_back(std::move(found));
    int number = (int)stacks_.size() - 1;
    by_hash_[hash] = number;
    return number;
  }

  static std::string describe(const Frame& frame) {
    auto text = [](PyObject* code, const char* name) {
      PyObject* value = PyObject_GetAttrString(code, name);
      std::string out = "?";
      if (value) {
        if (const char* utf8 = PyUnicode_AsUTF8(value)) {
          out = utf8;
        }
        Py_DECREF(value);
      }
      PyErr_Clear();
      return out;
    };
    return text(frame.code, "co_filename") + ":" + std::to_string(frame.line) + " in " + text(frame.code, "co_name");
  }

  void remember(uint64_t sequence, int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (forward_.size() >= kRemembered) {
      forward_.erase(forward_.begin());
    }
    forward_[sequence] = number;
  }

  int forward_of(uint64_t sequence) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = forward_.upper_bound(sequence);
    return after == forward_.begin() ? 0 : std::prev(after)->second;
  }

  std::mutex mutex_;
  bool closed_ = false;
  std::vector<PythonStack> stacks_{PythonStack{}};
  std::unordered_map<uint64_t, int> by_hash_;
  std::map<uint64_t, int> forward_;
};

inline StackTable& stacks() {
  static StackTable* made = new StackTable;
  return *made;
}

// Which module of the model launches work: set by the module hooks of `backend.py` while a trace is kept. A kernel of
// backward belongs to the module whose forward made its node.
class Labels {
 public:
  int enter(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = numbers_.find(name);
    int number = found != numbers_.end() ? found->second : (numbers_[name] = (int)names_.size());
    if (number == (int)names_.size()) {
      names_.push_back(name);
    }
    return exchange(number);
  }

  int exchange(int number) {
    return std::exchange(current(), number);
  }

  int here() {
    auto node = torch::autograd::get_current_node();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!node) {
      if (at::GradMode::is_enabled()) {
        by_sequence_[last_node()] = current();
      }
      return current();
    }
    if (current() != 0) {
      return current(); // a module that runs again inside of backward
    }
    auto after = by_sequence_.upper_bound(node->sequence_nr());
    return after == by_sequence_.begin() ? 0 : std::prev(after)->second;
  }

  std::string name(int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return names_[number];
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    by_sequence_.clear();
  }

 private:
  static int& current() {
    static thread_local int label = 0;
    return label;
  }

  std::mutex mutex_;
  std::vector<std::string> names_{""};
  std::unordered_map<std::string, int> numbers_{{"", 0}};
  std::map<uint64_t, int> by_sequence_;
};

inline Labels& labels() {
  static Labels* made = new Labels;
  return *made;
}

} // namespace lowtide_sim
