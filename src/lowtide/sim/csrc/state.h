// The state of the simulation: vector clocks, streams, events, blocks of memory, and what was seen.
//
// Law: everything here is guarded by `State::mutex`; the interpreter's lock is taken before it, never inside.
// Agents are the host (0) and every stream (1, 2, ...). An agent's own entry of a vector clock counts its work.
#pragma once

#include "common.h"

namespace lowtide_sim {

using Clock = std::vector<uint64_t>;

inline uint64_t at_agent(const Clock& clock, size_t agent) {
  return agent < clock.size() ? clock[agent] : 0;
}

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) {
    into.resize(other.size());
  }
  for (size_t i = 0; i < other.size(); i++) {
    into[i] = std::max(into[i], other[i]);
  }
}

// One access of a block: who, when by that agent's own count, doing what, from where in the program.
struct Access {
  int agent = -1; // -1: nobody so far
  uint64_t count = 0;
  const char* operation = "";
  int stack = 0;
};

inline bool ordered_before(const Access& access, const Clock& observer) {
  return access.agent <= 0 || at_agent(observer, access.agent) >= access.count;
}

// Bytes of an asynchronous copy that have not arrived: the target holds NaN until an observer is ordered after it.
struct Arrival {
  char* target;
  std::vector<char> bytes;
  int agent;
  uint64_t count;
};

// A block of device memory, or of pinned host memory (device < 0).
struct Block {
  char* pointer = nullptr;
  size_t requested = 0;
  size_t rounded = 0;
  int device = -1;
  int owner = 0; // agent of the stream it was allocated on
  uint64_t id = 0;
  bool mapped = false; // by mmap; else by the C allocator
  DataPtr adopted; // memory that a CPU kernel allocated for its result
  Access write;
  c10::SmallVector<Access, 4> reads; // at most one an agent, since the last write
  c10::SmallVector<int, 2> recorded; // agents of `record_stream`
  std::vector<Arrival> arrivals;
  int protection = 0; // of pinned pages: 0 open, 1 the host may read, 2 the host may do nothing
  uint64_t address = 0; // in the caching allocator's model, when it is on
};

struct StreamState {
  int agent;
  int device;
  int64_t id;
  Clock clock;
  double time = 0;
};

struct EventState {
  bool recorded = false;
  Clock clock;
  double time = 0;
  uint64_t epoch = 0; // of `reset`: before it every event has happened
};

// A device as it was described; seconds, bytes and FLOP per second, efficiencies applied.
struct Rates {
  double half = 1e12, single = 1e12, memory = 1e11, out = 1e9, in = 1e9, pageable = 0.5;
  double link_latency = 0, kernel = 0, launch = 0;
  bool half_duplex = false, shared_link = false;
};

// When each engine of a device is free again, and how long it was busy.
struct Engine {
  double free = 0, busy = 0;
  double bytes = 0;
};

struct Deferred {
  double until;
  Block* block;
};

class CachingModel;

struct DeviceState {
  std::vector<StreamState*> streams;
  size_t next_stream = 1;
  size_t allocated = 0, peak_allocated = 0;
  size_t deferred_bytes = 0, peak_active = 0;
  size_t allocations = 0, out_of_memory = 0;
  std::vector<Deferred> deferred; // freed, but a stream that was recorded may still use them
  Engine compute, out, in;
  CachingModel* caching = nullptr;
};

struct Span {
  const char* name;
  const char* kind;
  int device;
  int64_t stream;
  double start, end, bytes;
  int label;
};

struct MemoryPoint {
  int device;
  double time;
  size_t allocated, active;
};

struct Race {
  std::string kind;
  uint64_t block;
  Access first, second;
};

struct State {
  std::mutex mutex;
  std::vector<DeviceState> devices;
  std::vector<StreamState*> agents{nullptr}; // by agent; the host has no stream
  Clock host{1};
  double host_time = 0, host_busy = 0;
  Rates rates;
  size_t capacity = SIZE_MAX;
  size_t rounding = 512;
  bool compute = true, checks = true, poison = true, tracing = false, stacks = true;
  std::vector<Race> races;
  std::vector<Span> spans;
  std::vector<MemoryPoint> points;
  std::map<char*, Block*> pinned;
  std::map<std::string, uint64_t> operators;
  uint64_t blocks = 0, launches = 0, epoch = 0;
  Engine shared_link; // where devices share one
};

// Never destroyed: worker threads of autograd may outlive every static object.
inline State& state() {
  static State* made = new State;
  return *made;
}

inline double time_of(const EventState* event) {
  return event->epoch == state().epoch ? event->time : 0;
}

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<int64_t, 16> current_stream_id{};

inline DeviceIndex index_of(Device device) {
  return device.index() < 0 ? current_device : device.index();
}

inline StreamState* new_stream(int device) {
  auto& s = state();
  auto& streams = s.devices[device].streams;
  auto* made = new StreamState{(int)s.agents.size(), device, (int64_t)streams.size(), {}, 0};
  made->clock.resize(made->agent + 1);
  made->clock[made->agent] = 1;
  s.agents.push_back(made);
  streams.push_back(made);
  return made;
}

inline StreamState* current_stream(int device) {
  return state().devices[device].streams[current_stream_id[device]];
}

} // namespace lowtide_sim
