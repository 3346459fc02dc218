// Happens-before: which accesses of a block are ordered, and what is reported where they are not.
//
// Law: an access is ordered before an observer whose clock has seen its count. Nothing here looks at virtual time:
// a race is a missing order, whether or not it would have gone wrong this time.
#pragma once

#include "stacks.h"
#include "state.h"

namespace lowtide_sim {

struct Use {
  Block* block;
  bool write;
};

inline void report(const char* kind, const Block* block, const Access& first, const Access& second) {
  state().races.push_back({kind, block->id, first, second});
}

// Compare an access with what is known of the block, then remember it.
inline void check(Block* block, const Access& access, bool write, const Clock& observer) {
  if (!ordered_before(block->write, observer)) {
    report(write ? "write after write" : "read after write", block, block->write, access);
  }
  if (write) {
    for (const auto& read : block->reads) {
      if (!ordered_before(read, observer)) {
        report("write after read", block, read, access);
      }
    }
  }
}

inline void remember(Block* block, const Access& access, bool write) {
  if (write) {
    block->write = access;
    block->reads.clear();
    return;
  }
  for (auto& read : block->reads) {
    if (read.agent == access.agent) {
      read = access;
      return;
    }
  }
  block->reads.push_back(access);
}

inline bool is_recorded(const Block* block, int agent) {
  for (int other : block->recorded) {
    if (other == agent) {
      return true;
    }
  }
  return false;
}

// The accesses that may still run when the block is given back to its owner's pool: neither the owning stream nor the
// host is ordered after them, and nobody has recorded their stream.
inline std::vector<Access> still_using(const Block* block) {
  auto& s = state();
  const auto& owner = s.agents[block->owner]->clock;
  std::vector<Access> found;
  auto look = [&](const Access& access) {
    if (access.agent > 0 && access.agent != block->owner && !is_recorded(block, access.agent) &&
        !ordered_before(access, owner) && !ordered_before(access, s.host)) {
      found.push_back(access);
    }
  };
  look(block->write);
  for (const auto& read : block->reads) {
    look(read);
  }
  return found;
}

} // namespace lowtide_sim
