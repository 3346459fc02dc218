// Every operator that is not written by hand: the CPU's kernel on the device's memory, or only shapes.
//
// Law: one call of an operator is one kernel on the current stream, however many the CPU kernel makes of it; a view is
// none. The blocks it touches and what it costs are read from the arguments in the same way whether or not it computes.
#pragma once

#include "generator.h"
#include "shapes.h"

namespace lowtide_sim {

class Fallback {
 public:
  Fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack)
      : handle_(handle),
        op_(describe(handle)),
        stack_(*stack),
        base_(stack->size() - op_.writes.size()),
        call_(op_.name.c_str()),
        shapes_only_(!state().compute && !op_.waits) {}

  void run() {
    inspect();
    call_.before();
    if (!shapes_only_) {
      compute(nullptr);
    } else if (op_.in_place) {
      answer_in_place();
    } else {
      answer_shapes();
    }
    if (call_.writes_anything() || op_.waits) {
      call_.launch(op_.waits);
    }
  }

 private:
  template <typename Visit>
  void each_tensor(Visit visit) {
    for (size_t i = 0; i < op_.writes.size(); i++) {
      const auto& value = stack_[base_ + i];
      if (value.isTensor()) {
        visit(value.toTensor(), i);
      } else if (value.isTensorList()) {
        for (const Tensor& t : value.toTensorVector()) {
          visit(t, i);
        }
      } else if (value.isOptionalTensorList()) {
        for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
          if (t) {
            visit(*t, i);
          }
        }
      }
    }
  }

  void inspect() {
    for (size_t i = 0; i < op_.writes.size(); i++) {
      const auto& value = stack_[base_ + i];
      if (value.isDevice() && value.toDevice().type() == kSim) {
        call_.device = index_of(value.toDevice());
      }
    }
    each_tensor([&](const Tensor& t, size_t i) { inspect(t, i); });
    call_.cost.operations = matrix_operations(op_.kind, stack_, base_);
  }

  void inspect(const Tensor& t, size_t i) {
    if (!t.defined()) {
      return;
    }
    if (t.device().type() != kSim) {
      TORCH_CHECK(
          t.dim() == 0 || op_.takes_host_tensors, "sim: ", op_.name, ": expected all tensors to be on ",
          Device(kSim, call_.index()), ", got one of size ", t.sizes(), " on ", t.device());
      return;
    }
    call_.use(t, op_.writes[i]);
    call_.cost.half |= t.element_size() <= 2 && t.is_floating_point();
    bool looked_up = op_.kind == Kind::kLookup && t.is_floating_point();
    double bytes = moved_bytes(t);
    call_.cost.bytes += (op_.only_written[i] || looked_up ? 0 : bytes) + (op_.writes[i] ? bytes : 0);
  }

  // Computing nothing: what the Meta kernel said of such arguments before, or says now.
  void answer_shapes() {
    ShapeKey key(op_, stack_, base_);
    if (const auto* known = shape_memory().find(key)) {
      answer(*known);
    } else {
      compute(&key);
    }
  }

  // In place and computing nothing: the arguments are the answer, unless one is to be resized.
  void answer_in_place() {
    std::vector<c10::IValue> results;
    for (size_t i = 0; i < op_.writes.size(); i++) {
      const auto& value = stack_[base_ + i];
      if (!op_.writes[i]) {
        continue;
      }
      if (value.isTensor() && value.toTensor().numel() == 0) {
        return compute(nullptr);
      }
      if (results.size() < handle_.schema().returns().size()) {
        results.push_back(value);
      }
    }
    if (results.size() != handle_.schema().returns().size()) {
      return compute(nullptr);
    }
    replace(std::move(results));
  }

  void answer(const std::vector<ResultShapes>& shapes) {
    std::vector<c10::IValue> results;
    for (const auto& result : shapes) {
      std::vector<Tensor> tensors;
      for (const auto& shape : result.tensors) {
        tensors.push_back(empty_like_shape(shape, call_.index()));
        if (shape.defined) {
          call_.writes(tensors.back());
        }
      }
      results.push_back(result.list ? c10::IValue(tensors) : c10::IValue(tensors[0]));
    }
    count_results(results);
    replace(std::move(results));
  }

  void replace(std::vector<c10::IValue>&& results) {
    stack_.erase(stack_.begin() + (long)base_, stack_.end());
    for (auto& result : results) {
      stack_.push_back(std::move(result));
    }
  }

  void compute(const ShapeKey* key) {
    Shadows shadows(shapes_only_);
    SimGenerator* generator = replace_arguments(shadows);
    {
      at::AutoDispatchBelowADInplaceOrView below;
      narrow_statistics();
      count_as_floats(base_);
      Lent lent(generator);
      handle_.redispatchBoxed(DispatchKeySet(shapes_only_ ? DispatchKey::Meta : DispatchKey::CPU), &stack_);
      widen_statistics();
      if (integers_) {
        stack_.back() = stack_.back().toTensor().to(*integers_);
      }
    }
    shadows.adopt_resizes(call_);
    size_t first = stack_.size() - handle_.schema().returns().size();
    std::vector<c10::IValue> results;
    for (size_t i = first; i < stack_.size(); i++) {
      auto& value = stack_[i];
      if (value.isTensor()) {
        value = shadows.original(value.toTensor(), call_);
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (auto& t : tensors) {
          t = shadows.original(t, call_);
        }
        value = std::move(tensors);
      }
      results.push_back(value);
    }
    count_results(results);
    if (key) {
      shape_memory().learn(*key, stack_, first, shadows);
    }
  }

  // What is looked up is read as far as it is returned; a convolution does its sums for every element it returns.
  void count_results(const std::vector<c10::IValue>& results) {
    if (results.empty() || !results[0].isTensor() || !results[0].toTensor().defined()) {
      return;
    }
    const auto& first = results[0].toTensor();
    if (op_.kind == Kind::kLookup) {
      call_.cost.bytes += moved_bytes(first);
    } else if (op_.kind == Kind::kConvolution) {
      call_.cost.operations *= (double)first.numel();
    }
  }

  // Put shadows, host devices and CPU generators in place of the device's. Returns the generator whose state the CPU's
  // default one must borrow: none where the operator draws nothing or was given a generator.
  SimGenerator* replace_arguments(Shadows& shadows) {
    SimGenerator* generator = nullptr;
    if (op_.random && !shapes_only_) {
      generator = (SimGenerator*)default_generator(call_.index()).unsafeGetGeneratorImpl();
    }
    auto shadow = [&](const Tensor& t) {
      bool device_tensor = t.defined() && t.device().type() == kSim;
      // Python's Meta kernels want scalars of the host as they are.
      bool host_index = shapes_only_ && t.defined() && t.dim() > 0 && t.device().type() == c10::kCPU;
      return device_tensor || host_index ? shadows.of(t) : t;
    };
    for (size_t i = 0; i < op_.writes.size(); i++) {
      auto& value = stack_[base_ + i];
      if (value.isTensor()) {
        value = shadow(value.toTensor());
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        for (auto& t : tensors) {
          t = shadow(t);
        }
        value = std::move(tensors);
      } else if (value.isOptionalTensorList()) {
        auto tensors = value.toOptionalTensorList().copy();
        for (size_t k = 0; k < tensors.size(); k++) {
          std::optional<Tensor> t = tensors.get(k);
          if (t && t->defined()) {
            tensors.set(k, shadow(*t));
          }
        }
        value = std::move(tensors);
      } else if (value.isDevice() && value.toDevice().type() == kSim) {
        value = Device(shapes_only_ ? c10::kMeta : c10::kCPU);
      } else if (value.isGenerator()) {
        auto* given = value.toGenerator().unsafeGetGeneratorImpl();
        if (given->device().type() == kSim) {
          value = ((SimGenerator*)given)->inner;
          generator = nullptr;
        }
      }
    }
    return generator;
  }

  // The CPU counts integers as floating-point numbers, devices as they are.
  void count_as_floats(size_t first) {
    if (op_.name == "histc" && !shapes_only_ && !stack_[first].toTensor().is_floating_point()) {
      integers_ = stack_[first].toTensor().scalar_type();
      stack_[first] = stack_[first].toTensor().to(c10::kDouble);
    }
  }

  // Give a CPU kernel the statistics in the format that it has written them in.
  void narrow_statistics() {
    const auto& known = op_.statistics;
    if (shapes_only_ || known.arguments.empty()) {
      return;
    }
    auto type = stack_[base_ + known.input].toTensor().scalar_type();
    const auto& weight = stack_[base_ + known.weight];
    bool mixed = weight.isTensor() && weight.toTensor().defined() && weight.toTensor().scalar_type() != type;
    if (!c10::isReducedFloatingType(type) || mixed) {
      return;
    }
    for (size_t i : known.arguments) {
      auto& value = stack_[base_ + i];
      if (value.isTensor() && value.toTensor().defined()) {
        value = value.toTensor().to(type);
      }
    }
  }

  void widen_statistics() {
    if (shapes_only_) {
      return;
    }
    size_t first = stack_.size() - handle_.schema().returns().size();
    for (size_t i : op_.statistics.results) {
      auto& value = stack_[first + i];
      if (value.isTensor() && value.toTensor().defined() && c10::isReducedFloatingType(value.toTensor().scalar_type())) {
        value = value.toTensor().to(c10::kFloat);
      }
    }
  }

  const c10::OperatorHandle& handle_;
  const Operator& op_;
  torch::jit::Stack& stack_;
  size_t base_;
  Call call_;
  bool shapes_only_;
  std::optional<c10::ScalarType> integers_;
};

inline void fallback(const c10::OperatorHandle& handle, DispatchKeySet, torch::jit::Stack* stack) {
  Fallback(handle, stack).run();
}

} // namespace lowtide_sim
