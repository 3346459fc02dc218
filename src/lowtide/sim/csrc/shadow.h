// CPU tensors over the memory of device tensors, and the way back: how CPU kernels compute for the device.
//
// A shadow shares the bytes and owns nothing. The same tensor has one shadow in a call, and the same storage one shadow
// storage, so that a kernel sees the aliasing that the caller sees. Where nothing is computed, shadows are on Meta.
#pragma once

#include <ATen/EmptyTensor.h>

#include "call.h"

namespace lowtide_sim {

class Shadows {
 public:
  explicit Shadows(bool meta) : meta_(meta) {}

  Tensor of(const Tensor& t) {
    for (auto& [original, shadow] : tensors_) {
      if (original.is_same(t)) {
        return shadow;
      }
    }
    auto keys = DispatchKeySet(meta_ ? DispatchKey::Meta : DispatchKey::CPU);
    Tensor made = at::detail::make_tensor<TensorImpl>(of(t.storage()), keys, t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
      made.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    if (!meta_ && (t.is_conj() || t.is_neg())) { // only a copy sees these bits; for all else torch has resolved them
      made._set_conj(t.is_conj());
      made._set_neg(t.is_neg());
    }
    tensors_.emplace_back(t, made);
    return made;
  }

  // A result of the kernel as a tensor of the device: an argument, a view of one, or a tensor of its own.
  Tensor original(const Tensor& result, Call& call) {
    if (!result.defined()) {
      return result;
    }
    for (auto& [original, shadow] : tensors_) {
      if (shadow.is_same(result)) {
        return original;
      }
    }
    for (auto& [original, shadow] : storages_) {
      if (shadow.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        return with_layout(Storage(original), result);
      }
    }
    Tensor made = with_layout(own(result, call.index()), result);
    call.writes(made);
    tensors_.emplace_back(made, result);
    return made;
  }

  // Arguments that the kernel has resized (out= variants) get their new size and, if need be, new memory.
  void adopt_resizes(Call& call) {
    for (auto& [original, shadow] : tensors_) {
      if (original.device().type() != kSim || original.sizes() == shadow.sizes()) {
        continue;
      }
      size_t bytes = needed_bytes(shadow);
      auto* impl = original.storage().unsafeGetStorageImpl();
      if (impl->nbytes() < bytes) {
        c10::OptionalDeviceGuard guard(original.device());
        DataPtr data = device_memory()->allocate(bytes);
        if (!meta_) {
          std::memcpy(data.get(), shadow.storage().data(), bytes);
        }
        impl->set_data_ptr_noswap(std::move(data));
        impl->set_nbytes(bytes);
        call.add(block_of(original.storage()), true);
      }
      original.unsafeGetTensorImpl()->set_sizes_and_strides(shadow.sizes(), shadow.strides(), shadow.storage_offset());
    }
  }

  bool is_argument_storage(const Storage& storage) const {
    for (const auto& [original, shadow] : storages_) {
      if (original.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        return true;
      }
    }
    return false;
  }

 private:
  Storage of(const Storage& storage) {
    for (auto& [original, shadow] : storages_) {
      if (original.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        return shadow;
      }
    }
    auto device = Device(meta_ ? c10::kMeta : c10::kCPU);
    auto* data = meta_ ? nullptr : const_cast<void*>(storage.data());
    Storage made(c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), storage.nbytes(), DataPtr(data, device), c10::GetAllocator(device.type()), true));
    storages_.emplace_back(storage, made);
    return made;
  }

  static Tensor with_layout(Storage storage, const Tensor& like) {
    Tensor made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return made;
  }

  // Take over the memory that the kernel has allocated for its result, without a copy.
  Storage own(const Tensor& result, DeviceIndex index) {
    size_t bytes = result.storage().nbytes();
    c10::OptionalDeviceGuard guard(Device(kSim, index));
    DataPtr data = meta_ || bytes == 0
        ? device_memory()->allocate(bytes)
        : device_memory()->adopt(std::move(const_cast<DataPtr&>(result.storage().data_ptr())), bytes, index);
    return Storage(c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), bytes, std::move(data), device_memory(), true));
  }

  bool meta_;
  c10::SmallVector<std::pair<Tensor, Tensor>, 8> tensors_;
  c10::SmallVector<std::pair<Storage, Storage>, 8> storages_;
};

} // namespace lowtide_sim
