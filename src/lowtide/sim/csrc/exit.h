// How a process that has run backward ends cleanly.
//
// Autograd's worker of a device drops what a finished backward held *after* it has woken the thread that waits for it:
// hooks and dispatch modes that were active when backward was called, which are Python objects. Whoever waits for the
// interpreter's lock while the interpreter ends is ended by force, here in the middle of a destructor: the process
// aborts. A worker takes one task after the other, so once a later task is over what it held for all earlier ones is
// gone. This last task is made of C++ objects only: nothing of it needs the interpreter when it is dropped.
#pragma once

#include "stacks.h"
#include "state.h"

namespace lowtide_sim {

// Returns when no worker holds anything of an earlier backward. The interpreter's lock must not be held.
inline void finish_backwards() {
  at::AutoGradMode enabled(true);
  for (size_t i = 0; i < state().devices.size(); i++) {
    auto options = at::TensorOptions().device(Device(kSim, (DeviceIndex)i));
    Tensor leaf = at::empty({1}, options).set_requires_grad(true);
    at::sum(leaf).backward();
  }
}

} // namespace lowtide_sim
