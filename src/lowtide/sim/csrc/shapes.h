// What a kernel returns where none runs: shapes, learned once from the Meta kernel and remembered by the arguments.
#pragma once

#include "operator.h"
#include "shadow.h"

namespace lowtide_sim {

struct ResultShape {
  bool defined = true;
  c10::SmallVector<int64_t, 6> sizes, strides;
  c10::ScalarType type = c10::ScalarType::Float;
};

// One result of the schema: a tensor, or a list of them.
struct ResultShapes {
  bool list = false;
  std::vector<ResultShape> tensors;
};

// The arguments of a call as a string of bytes; invalid where an argument cannot be told by value.
class ShapeKey {
 public:
  ShapeKey(const Operator& op, const torch::jit::Stack& stack, size_t base) {
    const void* self = &op;
    raw(&self, sizeof self);
    for (size_t i = base; i < stack.size() && valid_; i++) {
      add(stack[i]);
    }
  }
  bool valid() const {
    return valid_;
  }
  const std::string& bytes() const {
    return bytes_;
  }

 private:
  void raw(const void* data, size_t size) {
    bytes_.append((const char*)data, size);
  }
  void tag(char c) {
    bytes_ += c;
  }
  void integer(int64_t value) {
    raw(&value, sizeof value);
  }
  void tensor(const Tensor& t) {
    tag('T');
    if (!t.defined()) {
      return tag('u');
    }
    tag((char)t.scalar_type());
    tag(t.device().type() == kSim ? 'd' : 'h');
    tag(t.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : '-');
    integer(t.dim());
    raw(t.sizes().data(), sizeof(int64_t) * (size_t)t.dim());
    raw(t.strides().data(), sizeof(int64_t) * (size_t)t.dim());
  }
  void add(const c10::IValue& v) {
    if (v.isTensor()) {
      tensor(v.toTensor());
    } else if (v.isTensorList()) {
      tag('[');
      for (const Tensor& t : v.toTensorVector()) {
        tensor(t);
      }
      tag(']');
    } else if (v.isInt()) {
      tag('i');
      integer(v.toInt());
    } else if (v.isBool()) {
      tag(v.toBool() ? 'y' : 'n');
    } else if (v.isDouble()) {
      tag('d');
      double number = v.toDouble();
      raw(&number, sizeof number);
    } else if (v.isNone()) {
      tag('0');
    } else if (v.isIntList()) {
      tag('L');
      for (auto number : v.toIntVector()) {
        integer(number);
      }
      tag(']');
    } else if (v.isBoolList()) {
      tag('B');
      for (bool flag : v.toBoolList()) {
        tag(flag ? 'y' : 'n');
      }
      tag(']');
    } else {
      valid_ = false;
    }
  }

  std::string bytes_;
  bool valid_ = true;
};

class ShapeMemory {
 public:
  const std::vector<ResultShapes>* find(const ShapeKey& key) {
    if (!key.valid()) {
      return nullptr;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = known_.find(key.bytes());
    return found == known_.end() ? nullptr : &found->second;
  }

  // Remember the results of a call, unless one of them shares an argument's storage.
  void learn(const ShapeKey& key, const torch::jit::Stack& stack, size_t first, const Shadows& shadows) {
    if (!key.valid()) {
      return;
    }
    std::vector<ResultShapes> shapes;
    for (size_t i = first; i < stack.size(); i++) {
      ResultShapes result;
      result.list = stack[i].isTensorList();
      if (!result.list && !stack[i].isTensor()) {
        return;
      }
      auto tensors = result.list ? stack[i].toTensorVector() : std::vector<Tensor>{stack[i].toTensor()};
      for (const Tensor& t : tensors) {
        if (t.defined() && shadows.is_argument_storage(t.storage())) {
          return;
        }
        result.tensors.push_back(shape_of(t));
      }
      shapes.push_back(std::move(result));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    known_[key.bytes()] = std::move(shapes);
  }

 private:
  static ResultShape shape_of(const Tensor& t) {
    ResultShape shape;
    shape.defined = t.defined();
    if (shape.defined) {
      shape.sizes.assign(t.sizes().begin(), t.sizes().end());
      shape.strides.assign(t.strides().begin(), t.strides().end());
      shape.type = t.scalar_type();
    }
    return shape;
  }

  std::mutex mutex_;
  std::unordered_map<std::string, std::vector<ResultShapes>> known_;
};

inline ShapeMemory& shape_memory() {
  static auto* made = new ShapeMemory;
  return *made;
}

inline Tensor empty_like_shape(const ResultShape& shape, DeviceIndex index) {
  if (!shape.defined) {
    return Tensor();
  }
  c10::OptionalDeviceGuard guard(Device(kSim, index));
  return at::detail::empty_strided_generic(
      shape.sizes, shape.strides, device_memory(), DispatchKeySet(DispatchKey::PrivateUse1), shape.type);
}

} // namespace lowtide_sim
