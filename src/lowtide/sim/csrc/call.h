// One launch: the blocks that it touches, what it costs, and its place on the current stream.
//
// Shared by the fallback and the operators written by hand. Law: `before` comes ahead of the kernel, so that what has
// arrived is there and what has not is still NaN; `launch` comes after it, with the results known.
#pragma once

#include "cost.h"
#include "memory.h"

namespace lowtide_sim {

[[noreturn]] inline void released(const Tensor& t, const char* name) {
  TORCH_CHECK(
      false, "sim: ", name, " uses a tensor of size ", t.sizes(), " whose storage holds ", t.storage().nbytes(),
      " bytes. It was released (resize_) and not brought back.");
}

inline size_t needed_bytes(const Tensor& t) {
  return t.numel() ? at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size(), t.storage_offset()) : 0;
}

class Call {
 public:
  explicit Call(const char* name) : name_(name) {}

  Cost cost;
  DeviceIndex device = -1;

  DeviceIndex index() const {
    return device < 0 ? current_device : device;
  }

  // An argument on this device.
  void reads(const Tensor& t) {
    use(t, false);
    cost.bytes += moved_bytes(t);
  }
  void writes(const Tensor& t) {
    use(t, true);
    cost.bytes += moved_bytes(t);
  }
  void use(const Tensor& t, bool write) {
    if (needed_bytes(t) > t.storage().nbytes()) {
      released(t, name_);
    }
    if (device < 0) {
      device = t.device().index();
    }
    add(block_of(t.storage()), write);
  }
  void add(Block* block, bool write) {
    if (!block) {
      return;
    }
    for (auto& use : uses_) {
      if (use.block == block) {
        use.write |= write;
        return;
      }
    }
    uses_.push_back({block, write});
  }

  bool writes_anything() const {
    for (const auto& use : uses_) {
      if (use.write) {
        return true;
      }
    }
    return false;
  }

  void before() {
    auto& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    auto* stream = current_stream(index());
    join(stream->clock, s.host);
    for (auto& use : uses_) {
      arrive(use.block, stream->clock);
    }
  }

  // Queue a kernel on the current stream. `waits`: the host waits for it.
  void launch(bool waits = false) {
    queue({name_, "kernel", seconds_of(cost), cost.bytes, &state().devices[index()].compute}, waits);
  }

  // Queue any work; returns its agent and count, for arrivals.
  std::pair<int, uint64_t> queue(const Work& work, bool waits) {
    int stack = stacks().here();
    auto& s = state();
    int label = s.tracing ? labels().here() : 0;
    std::lock_guard<std::mutex> lock(s.mutex);
    auto* stream = current_stream(index());
    uint64_t count = lowtide_sim::launch(stream, work, uses_, stack, label);
    if (waits) {
      host_waits(stream);
    }
    return {stream->agent, count};
  }

 private:
  const char* name_;
  c10::SmallVector<Use, 8> uses_;
};

} // namespace lowtide_sim
