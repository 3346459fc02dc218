// Virtual time: what a launch costs the host and its stream, what an order means, and what the host learns by waiting.
//
// Law: time depends on the program alone. A kernel starts when its stream, the host that launched it and its engine are
// ready; engines run one thing at a time, in the order of launches.
#pragma once

#include "pages.h"

namespace lowtide_sim {

// Let what was copied arrive where the observer is ordered after the copy. The mutex must be held.
inline void arrive(Block* block, const Clock& observer) {
  auto& waiting = block->arrivals;
  for (auto it = waiting.begin(); it != waiting.end();) {
    if (at_agent(observer, it->agent) < it->count) {
      ++it;
      continue;
    }
    int before = block->protection;
    if (block->device < 0) {
      protect(block, kOpen);
    }
    std::memcpy(it->target, it->bytes.data(), it->bytes.size());
    if (block->device < 0) {
      protect(block, before);
    }
    it = waiting.erase(it);
  }
}

// The host has waited for something with this clock. The mutex must be held.
inline void host_learns(const Clock& clock) {
  auto& s = state();
  join(s.host, clock);
  for (auto& [pointer, block] : s.pinned) {
    if (!block->arrivals.empty()) {
      arrive(block, s.host);
    }
    if (block->protection != kOpen) {
      protect(block, wanted_protection(block));
    }
  }
}

inline void host_waits(StreamState* stream) {
  auto& s = state();
  s.host_time = std::max(s.host_time, stream->time);
  host_learns(stream->clock);
}

struct Work {
  const char* name;
  const char* kind = "kernel";
  double seconds = 0;
  double bytes = 0;
  Engine* engine = nullptr;
};

// Queue work on a stream: check it against every block it touches, and give it its place in time.
// Returns the count of the access, for arrivals. The mutex must be held.
inline uint64_t launch(StreamState* stream, const Work& work, c10::ArrayRef<Use> uses, int stack, int label) {
  auto& s = state();
  s.launches++;
  s.host_time += s.rates.launch;
  s.host_busy += s.rates.launch;
  join(stream->clock, s.host);
  uint64_t count = ++stream->clock[stream->agent];
  Access access{stream->agent, count, work.name, stack};
  for (const auto& use : uses) {
    if (use.block && s.checks) {
      check(use.block, access, use.write, stream->clock);
    }
  }
  for (const auto& use : uses) {
    if (use.block) {
      remember(use.block, access, use.write);
    }
  }
  double start = std::max(stream->time, s.host_time);
  if (work.engine) {
    start = std::max(start, work.engine->free);
  }
  stream->time = start + work.seconds;
  if (work.engine) {
    work.engine->free = stream->time;
    work.engine->busy += work.seconds;
    work.engine->bytes += work.bytes;
  }
  if (s.tracing) {
    s.spans.push_back({work.name, work.kind, stream->device, stream->id, start, stream->time, work.bytes, label});
  }
  s.operators[work.name]++;
  return count;
}

} // namespace lowtide_sim
