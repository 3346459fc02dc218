// What torch asks of an accelerator as a whole.
#pragma once

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "generator.h"
#include "memory.h"

namespace lowtide_sim {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return !state().devices.empty();
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return (DeviceIndex)state().devices.size();
  }
  void setCurrentDevice(DeviceIndex index) const override {
    current_device = index;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = current_device;
    if (index >= 0) {
      current_device = index;
    }
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<SimGenerator>(index < 0 ? current_device : index);
  }
  bool isPinnedPtr(const void* data) const override {
    return find_pinned(data) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_memory();
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(kSim, current_device);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    size_t before = impl->nbytes();
    if (bytes == before) {
      return;
    }
    c10::OptionalDeviceGuard guard(storage.device());
    DataPtr data = device_memory()->allocate(bytes);
    if (bytes && before && state().compute) {
      std::memcpy(data.get(), storage.data(), std::min(bytes, before));
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

} // namespace lowtide_sim
