// Pinned host memory while a copy is in flight: the host may not read what is being written, nor write what is being
// read. The pages say so to the processor, so that every access is noticed, whoever makes it.
//
// Law: a fault in a block of ours is a race of the host; it is reported, the pages are opened, and the program goes on.
// The copies themselves open the pages for as long as they run.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "races.h"

namespace lowtide_sim {

inline size_t page_bytes() {
  static const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
  return bytes;
}

inline size_t whole_pages(size_t bytes) {
  return (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

inline void watch_pages();

enum Protection { kOpen = 0, kReadOnly = 1, kClosed = 2 };

inline void protect(Block* block, int wanted) {
  if (block->protection == wanted) {
    return;
  }
  if (wanted != kOpen) {
    watch_pages();
  }
  static const int flags[] = {PROT_READ | PROT_WRITE, PROT_READ, PROT_NONE};
  block->protection = wanted;
  mprotect(block->pointer, whole_pages(block->requested), flags[wanted]);
}

// What the host may do with a pinned block now. The mutex must be held.
inline int wanted_protection(const Block* block) {
  auto& s = state();
  if (!s.checks) {
    return kOpen;
  }
  if (!ordered_before(block->write, s.host)) {
    return kClosed;
  }
  for (const auto& read : block->reads) {
    if (!ordered_before(read, s.host)) {
      return kReadOnly;
    }
  }
  return kOpen;
}

// The pinned block that an address lies in, or null. The mutex must be held.
inline Block* pinned_block(const void* address) {
  auto& pinned = state().pinned;
  auto after = pinned.upper_bound((char*)address);
  if (after == pinned.begin()) {
    return nullptr;
  }
  auto* block = std::prev(after)->second;
  return (char*)address < block->pointer + whole_pages(block->requested) ? block : nullptr;
}

inline struct sigaction& previous_handler() {
  static struct sigaction before = {};
  return before;
}

// Runs in the thread that touched the page, in the middle of a load or store: no lock of ours is held by it then.
inline void on_fault(int signal, siginfo_t* info, void*) {
  auto& s = state();
  Block* block = nullptr;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    block = pinned_block(info->si_addr);
    if (block && block->protection == kOpen) {
      block = nullptr; // somebody else's fault in pages that are open: a real one
    }
  }
  if (!block) {
    sigaction(signal, &previous_handler(), nullptr); // the instruction runs again and meets the handler before ours
    return;
  }
  int stack = stacks().here();
  std::lock_guard<std::mutex> lock(s.mutex);
  bool reads = block->protection == kClosed;
  Access host{0, 0, "host access", stack};
  Access copy = block->write;
  for (const auto& read : block->reads) {
    if (!reads && !ordered_before(read, s.host)) {
      copy = read;
    }
  }
  report(reads ? "host access during a copy to the host" : "host write during a copy to the device", block, copy, host);
  protect(block, kOpen);
}

// Our handler must be the first: another one that was installed since, such as Python's faulthandler, comes after it.
inline void watch_pages() {
  struct sigaction present = {};
  sigaction(SIGSEGV, nullptr, &present);
  if ((present.sa_flags & SA_SIGINFO) && present.sa_sigaction == on_fault) {
    return;
  }
  previous_handler() = present;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, nullptr);
}

} // namespace lowtide_sim
