// Operators written by hand: those that make or name memory, and copies across the link.
#pragma once

#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

#include "fallback.h"
#include "hooks.h"

namespace lowtide_sim {

using Sizes = c10::IntArrayRef;

inline Tensor empty(
    Sizes size,
    std::optional<c10::ScalarType> type,
    std::optional<c10::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, device_memory(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(type), format);
}

inline Tensor empty_strided(
    Sizes size,
    Sizes stride,
    std::optional<c10::ScalarType> type,
    std::optional<c10::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, device_memory(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(type));
}

inline const Tensor& resize_(const Tensor& self, Sizes size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  if (bytes > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  impl->set_sizes_contiguous(size);
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

inline Tensor& set_storage_offset(Tensor& self, Storage source, int64_t offset, Sizes size, Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  c10::SmallVector<int64_t, 6> strides(stride.begin(), stride.end());
  if (stride.empty() && !size.empty()) {
    strides.resize(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0;) {
      strides[i] = step;
      step *= std::max<int64_t>(size[i], 1);
    }
  }
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}

inline Tensor& set_storage(Tensor& self, Storage source) {
  int64_t elements = (int64_t)(source.nbytes() / self.element_size());
  return set_storage_offset(self, std::move(source), 0, {elements}, {});
}

inline Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_storage_offset(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

inline Tensor& set_nothing(Tensor& self) {
  Storage nothing(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), 0, DataPtr(nullptr, self.device()), device_memory(), true));
  return set_storage_offset(self, std::move(nothing), 0, {0}, {});
}

inline void record_stream(Tensor& self, c10::Stream stream) {
  device_memory()->recordStream(self.storage().data_ptr(), stream);
}

// ---- copies ----------------------------------------------------------------------------------------------------

inline Engine* link(DeviceIndex index, bool out) {
  auto& s = state();
  if (s.rates.shared_link) {
    return &s.shared_link;
  }
  auto& d = s.devices[index];
  return out || s.rates.half_duplex ? &d.out : &d.in;
}

// Keeps pinned pages open while we ourselves write or read them, and closes them to the host again as the copy asks.
class OpenPages {
 public:
  explicit OpenPages(Block* block) : block_(block) {
    set(kOpen);
  }
  ~OpenPages() {
    if (block_) {
      std::lock_guard<std::mutex> lock(state().mutex);
      protect(block_, wanted_protection(block_));
    }
  }
  OpenPages(const OpenPages&) = delete;
  OpenPages& operator=(const OpenPages&) = delete;

 private:
  void set(int wanted) {
    if (block_) {
      std::lock_guard<std::mutex> lock(state().mutex);
      protect(block_, wanted);
    }
  }
  Block* block_;
};

// What the copy has written is not there before somebody is ordered after it: NaN until then.
inline void hold_back(Block* block, const Tensor& target, std::pair<int, uint64_t> when) {
  size_t bytes = (size_t)target.numel() * target.element_size();
  Arrival arrival{(char*)target.mutable_data_ptr(), {}, when.first, when.second};
  arrival.bytes.assign(arrival.target, arrival.target + bytes);
  std::memset(arrival.target, 0xFF, bytes);
  std::lock_guard<std::mutex> lock(state().mutex);
  block->arrivals.push_back(std::move(arrival));
}

inline void let_wait(DeviceIndex waiting, DeviceIndex other) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto *late = current_stream(waiting), *early = current_stream(other);
  join(late->clock, early->clock);
  late->time = std::max(late->time, early->time);
}

// Between two devices the current streams of both are ordered around the copy, as torch orders them.
inline void copy_on_device(const Tensor& source, const Tensor& target) {
  auto from = index_of(source.device()), to = index_of(target.device());
  if (from != to) {
    let_wait(from, to);
  }
  Call call("copy_");
  call.reads(source);
  call.writes(target);
  call.before();
  if (state().compute) {
    Shadows shadows(false);
    at::AutoDispatchBelowADInplaceOrView below;
    shadows.of(target).copy_(shadows.of(source));
  }
  call.launch();
  if (from != to) {
    let_wait(to, from);
  }
}

// Across the link. Asynchronous where the host's side is pinned and the caller does not want to wait.
inline void copy_over_link(const Tensor& source, const Tensor& target, bool non_blocking) {
  bool out = source.device().type() == kSim;
  const Tensor& device_side = out ? source : target;
  const Tensor& host_side = out ? target : source;
  auto& s = state();
  Block* pinned = find_pinned(host_side.storage().data());
  bool waits = !non_blocking || !pinned;
  Call call(out ? "copy to host" : "copy to device");
  call.use(device_side, !out);
  call.add(pinned, out);
  double bytes = (double)target.numel() * (double)target.element_size();
  double rate = (out ? s.rates.out : s.rates.in) * (pinned ? 1.0 : s.rates.pageable);
  Work work{out ? "copy to host" : "copy to device", out ? "out" : "in", s.rates.link_latency + bytes / rate, bytes,
            link(call.index(), out)};
  OpenPages open(pinned);
  call.before();
  if (s.compute) {
    Shadows shadows(false);
    at::AutoDispatchBelowADInplaceOrView below;
    (out ? target : shadows.of(target)).copy_(out ? shadows.of(source) : source);
  }
  auto when = call.queue(work, waits);
  if (s.compute && s.poison && !waits && target.numel() && target.is_contiguous()) {
    hold_back(out ? pinned : block_of(target.storage()), target, when);
  }
}

inline Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  if (source.device().type() == kSim && target.device().type() == kSim) {
    copy_on_device(source, target);
  } else {
    copy_over_link(source, target, non_blocking);
  }
  return target;
}

inline Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

inline c10::Scalar local_scalar(const Tensor& self) {
  Call call("item");
  call.use(self, false);
  call.before();
  double latency = state().rates.link_latency;
  call.queue({"item", "out", latency, (double)self.element_size(), link(call.index(), true)}, true);
  if (!state().compute) {
    return c10::Scalar(0);
  }
  Shadows shadows(false);
  at::AutoDispatchBelowADInplaceOrView below;
  return at::native::_local_scalar_dense_cpu(shadows.of(self));
}

} // namespace lowtide_sim
