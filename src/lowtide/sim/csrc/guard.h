// Devices, streams and events as torch asks for them.
//
// Law: recording and waiting change clocks and times, nothing else; only what says "synchronize" lets the host wait.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace lowtide_sim {

constexpr size_t kStreamPool = 32; // as many as torch's CUDA pool; then the first is given out again

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  Device exchangeDevice(Device device) const override {
    Device before(kSim, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(kSim, current_device);
  }
  void setDevice(Device device) const override {
    current_device = index_of(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = index_of(device);
  }
  DeviceIndex deviceCount() const noexcept override {
    return (DeviceIndex)state().devices.size();
  }

  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(kSim, (DeviceIndex)device), id);
  }
  static StreamState* of(const c10::Stream& stream) {
    return state().devices.at(index_of(stream.device())).streams.at(stream.id());
  }
  c10::Stream getStream(Device device) const noexcept override {
    int index = index_of(device);
    return stream(index, current_stream_id[index]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return stream(index_of(device), 0);
  }
  c10::Stream getNewStream(Device device, int = 0) const override {
    std::lock_guard<std::mutex> lock(state().mutex);
    int index = index_of(device);
    auto& d = state().devices[index];
    if (d.streams.size() <= kStreamPool) {
      return stream(index, new_stream(index)->id);
    }
    d.next_stream = d.next_stream % kStreamPool + 1;
    return stream(index, (int64_t)d.next_stream);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream wanted) const noexcept override {
    int index = wanted.device_index();
    return stream(index, std::exchange(current_stream_id[index], wanted.id()));
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete (EventState*)event;
  }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto& s = state();
    if (!*event) {
      *event = new EventState;
    }
    std::lock_guard<std::mutex> lock(s.mutex);
    auto* made = (EventState*)*event;
    auto* queue = of(stream);
    join(queue->clock, s.host);
    made->recorded = true;
    made->clock = queue->clock;
    made->time = std::max(queue->time, s.host_time);
    made->epoch = s.epoch;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) {
      return;
    }
    std::lock_guard<std::mutex> lock(state().mutex);
    auto* known = (EventState*)event;
    auto* queue = of(stream);
    if (known->recorded) {
      join(queue->clock, known->clock);
      queue->time = std::max(queue->time, time_of(known));
    }
  }
  bool queryEvent(void* event) const override {
    if (!event) {
      return true;
    }
    auto& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    auto* known = (EventState*)event;
    if (known->recorded && time_of(known) > s.host_time) {
      return false;
    }
    host_learns(known->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) {
      return;
    }
    auto& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    auto* known = (EventState*)event;
    if (known->recorded) {
      s.host_time = std::max(s.host_time, time_of(known));
      host_learns(known->clock);
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    auto* queue = of(stream);
    if (queue->time > s.host_time) {
      return false;
    }
    host_learns(queue->clock);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> lock(state().mutex);
    host_waits(of(stream));
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& d = state().devices.at(index < 0 ? current_device : index);
    for (auto* queue : d.streams) {
      host_waits(queue);
    }
    reap(d);
  }
  void recordDataPtrOnStream(const DataPtr& data, const c10::Stream& stream) const override {
    device_memory()->recordStream(data, stream);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return (time_of((EventState*)second) - time_of((EventState*)first)) * 1e3;
  }
};

} // namespace lowtide_sim
