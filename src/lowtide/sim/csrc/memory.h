// Device memory and pinned host memory: allocation against a capacity, exact counters, and what a free means to streams
// that may still use the block.
//
// Law: bytes are counted when the host asks, as torch's own allocators do. A block that was recorded on a stream stays
// *active* until the host's time has passed all work that was queued there when it was freed.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "caching.h"
#include "timeline.h"

namespace lowtide_sim {

constexpr size_t kMapFrom = 4096;

inline char* take_memory(size_t bytes, bool pages, bool& mapped) {
  mapped = pages;
  void* found = nullptr;
  if (mapped) {
    found = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "sim: the host has no memory for ", bytes, " bytes");
    return (char*)found;
  }
  TORCH_CHECK(posix_memalign(&found, 64, std::max<size_t>(bytes, 64)) == 0, "sim: the host has no memory for ", bytes, " bytes");
  return (char*)found;
}

inline void poison(char* pointer, size_t bytes) {
  auto& s = state();
  if (s.compute && s.poison) {
    std::memset(pointer, 0xFF, bytes); // NaN in every floating-point format, -1 in every integer
  } else if (!s.compute && bytes < kMapFrom) {
    std::memset(pointer, 0, bytes); // a host read of what no kernel wrote is the same in every run
  }
}

// Tell traces, and torch's profiler, of `bytes` more (or fewer) at an address.
inline void note_memory(int device, void* pointer, int64_t bytes) {
  auto& s = state();
  auto& d = s.devices[device];
  size_t active = d.allocated + d.deferred_bytes;
  c10::reportMemoryUsageToProfiler(pointer, bytes, d.allocated, active, Device(kSim, (DeviceIndex)device));
  if (s.tracing) {
    s.points.push_back({device, s.host_time, d.allocated, active});
  }
}

inline void end_of_block(Block* block) {
  auto& d = state().devices[block->device];
  if (d.caching && block->address) {
    d.caching->give(block->address);
  }
  delete block;
}

// Drop the blocks whose streams the host's time has passed. The mutex must be held.
inline void reap(DeviceState& d) {
  auto& s = state();
  for (size_t i = 0; i < d.deferred.size();) {
    if (d.deferred[i].until <= s.host_time) {
      d.deferred_bytes -= d.deferred[i].block->rounded;
      end_of_block(d.deferred[i].block);
      d.deferred.erase(d.deferred.begin() + (long)i);
    } else {
      i++;
    }
  }
}

[[noreturn]] inline void out_of_memory(DeviceState& d, Block* block) {
  auto& s = state();
  d.out_of_memory++;
  size_t asked = block->rounded, active = d.deferred_bytes, reserved = d.caching ? d.caching->reserved : 0;
  delete block;
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      false,
      "sim out of memory. Tried to allocate ", asked, " bytes. ", d.allocated, " of ", s.capacity, " bytes are allocated, ",
      active, " more are freed but still in use by a stream", d.caching ? ", reserved " : "",
      d.caching ? std::to_string(reserved) : std::string());
}

// Count a new block against the capacity, on the current stream. Throws, having deleted the block. Mutex must be held.
inline void account(Block* block) {
  auto& s = state();
  auto& d = s.devices[block->device];
  auto* stream = current_stream(block->device);
  block->rounded = (block->requested + s.rounding - 1) / s.rounding * s.rounding;
  reap(d);
  auto fits = [&] {
    if (d.caching) {
      if (!block->address) {
        block->address = d.caching->take(block->rounded, stream->agent, s.capacity);
      }
      return block->address != 0;
    }
    return d.allocated + d.deferred_bytes + block->rounded <= s.capacity;
  };
  while (!fits()) { // as torch does: wait for the blocks that streams still use, oldest first, then give up
    if (d.deferred.empty()) {
      out_of_memory(d, block);
    }
    double soonest = d.deferred.front().until;
    for (const auto& waiting : d.deferred) {
      soonest = std::min(soonest, waiting.until);
    }
    s.host_time = std::max(s.host_time, soonest);
    reap(d);
  }
  d.allocated += block->rounded;
  d.allocations++;
  d.peak_allocated = std::max(d.peak_allocated, d.allocated);
  d.peak_active = std::max(d.peak_active, d.allocated + d.deferred_bytes);
  block->id = ++s.blocks;
  block->owner = stream->agent;
  block->write = {stream->agent, stream->clock[stream->agent], "allocation", 0};
  note_memory(block->device, block, (int64_t)block->rounded);
}

inline void release_memory(Block* block) {
  if (block->adopted) {
    block->adopted.clear();
  } else if (block->mapped) {
    munmap(block->pointer, whole_pages(block->requested));
  } else {
    std::free(block->pointer);
  }
  block->pointer = nullptr;
}

// The deleter of device memory.
inline void free_device(void* context) {
  auto* block = (Block*)context;
  if (!block) {
    return;
  }
  auto& s = state();
  std::vector<Access> users;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    if (s.checks) {
      users = still_using(block);
    }
  }
  int stack = users.empty() ? 0 : stacks().here();
  if (s.compute && s.poison) {
    std::memset(block->pointer, 0xFF, block->requested);
  }
  release_memory(block);
  std::lock_guard<std::mutex> lock(s.mutex);
  auto& d = s.devices[block->device];
  for (const auto& user : users) {
    report("freed in use", block, user, {block->owner, 0, "free", stack});
  }
  d.allocated -= block->rounded;
  double until = 0;
  for (int agent : block->recorded) {
    until = std::max(until, s.agents[agent]->time);
  }
  if (until > s.host_time) {
    d.deferred_bytes += block->rounded;
    d.deferred.push_back({until, block});
    note_memory(block->device, block, -(int64_t)block->rounded);
    return;
  }
  note_memory(block->device, block, -(int64_t)block->rounded);
  end_of_block(block);
}

// The block behind a storage of this device; null where it holds nothing.
inline Block* block_of(const Storage& storage) {
  const auto& data = storage.data_ptr();
  return data.get_deleter() == &free_device ? (Block*)data.get_context() : nullptr;
}

inline void record_on(Block* block, const c10::Stream& stream) {
  auto& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  int agent = s.devices[index_of(stream.device())].streams.at(stream.id())->agent;
  if (agent != block->owner && !is_recorded(block, agent)) {
    block->recorded.push_back(agent);
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  DataPtr allocate(size_t bytes) override {
    Device device(kSim, current_device);
    if (bytes == 0) {
      return DataPtr(nullptr, device);
    }
    auto* block = new Block;
    block->requested = bytes;
    block->device = current_device;
    {
      std::lock_guard<std::mutex> lock(state().mutex);
      account(block);
    }
    block->pointer = take_memory(bytes, !state().compute && bytes >= kMapFrom, block->mapped);
    poison(block->pointer, bytes);
    return DataPtr(block->pointer, block, &free_device, device);
  }

  // Make a block of memory that a CPU kernel has allocated and filled.
  DataPtr adopt(DataPtr&& data, size_t bytes, DeviceIndex index) {
    auto* block = new Block;
    block->requested = bytes;
    block->device = index;
    {
      std::lock_guard<std::mutex> lock(state().mutex);
      account(block);
    }
    block->pointer = (char*)data.get();
    block->adopted = std::move(data);
    return DataPtr(block->pointer, block, &free_device, Device(kSim, index));
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool initialized() override {
    return !state().devices.empty();
  }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> lock(state().mutex);
    for (auto& d : state().devices) {
      reap(d);
      if (d.caching) {
        d.caching->give_back();
      }
    }
  }
  void recordStream(const DataPtr& data, c10::Stream stream) override {
    if (data.get_deleter() == &free_device && data.get_context()) {
      record_on((Block*)data.get_context(), stream);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& d = state().devices.at(index);
    reap(d);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& stat, size_t now, size_t peak) {
      stat[0].current = (int64_t)now;
      stat[0].peak = (int64_t)peak;
    };
    size_t active = d.allocated + d.deferred_bytes;
    set(stats.allocated_bytes, d.allocated, d.peak_allocated);
    set(stats.requested_bytes, d.allocated, d.peak_allocated);
    set(stats.active_bytes, active, d.peak_active);
    set(stats.reserved_bytes, d.caching ? d.caching->reserved : active, d.caching ? d.caching->peak_reserved : d.peak_active);
    stats.num_ooms = (int64_t)d.out_of_memory;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().devices.at(index).out_of_memory = 0;
  }
  void resetPeakStats(DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& d = state().devices.at(index);
    reap(d);
    d.peak_allocated = d.allocated;
    d.peak_active = d.allocated + d.deferred_bytes;
    if (d.caching) {
      d.caching->peak_reserved = d.caching->reserved;
    }
  }
#if LOWTIDE_TORCH >= 210
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    std::lock_guard<std::mutex> lock(state().mutex);
    auto& d = state().devices.at(index);
    reap(d);
    size_t used = d.caching ? d.caching->reserved : d.allocated + d.deferred_bytes;
    return {state().capacity - used, state().capacity};
  }
#endif
};

inline DeviceMemory* device_memory() {
  static auto* made = new DeviceMemory;
  return made;
}

// Pinned memory lies on pages of its own, so that they can be closed while a copy is in flight. As in torch, a buffer
// that is freed during a copy stays whole until the copy is over: nothing to check here.
inline void free_pinned(void* context) {
  auto* block = (Block*)context;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    state().pinned.erase(block->pointer);
  }
  munmap(block->pointer, whole_pages(block->requested));
  delete block;
}

struct PinnedMemory final : c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    auto* block = new Block;
    block->requested = std::max<size_t>(bytes, 1);
    block->pointer = take_memory(block->requested, true, block->mapped);
    poison(block->pointer, bytes);
    std::lock_guard<std::mutex> lock(state().mutex);
    block->id = ++state().blocks;
    state().pinned[block->pointer] = block;
    return DataPtr(block->pointer, block, &free_pinned, Device(c10::kCPU));
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

inline PinnedMemory* pinned_memory() {
  static auto* made = new PinnedMemory;
  return made;
}

inline Block* find_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return pinned_block(address);
}

} // namespace lowtide_sim
