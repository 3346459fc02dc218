// What every part of the simulated device includes. Names of torch that several parts use, and nothing of our own.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <torch/version.h>

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define LOWTIDE_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

namespace lowtide_sim {

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::StorageImpl;
using c10::TensorImpl;

constexpr auto kSim = c10::DeviceType::PrivateUse1;

} // namespace lowtide_sim
