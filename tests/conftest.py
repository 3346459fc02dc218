"""What every test starts from: one compute thread, a fixed seed, a swap manager that remembers nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowtide import SwapManager


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Give each test a manager without groups, chains or settings, and leave none behind.

    Also checks that nothing stays installed once a test is done: a dispatch
    mode or a pair of saved-tensor hooks that outlives its region would change
    every later computation of the process.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    SwapManager().reset()
    yield
    SwapManager().reset()
    assert torch.is_grad_enabled()
    assert torch._C._len_torch_dispatch_stack() == 0, "a dispatch mode is still installed"
    probe = torch.ones(1, requires_grad=True) * torch.ones(1)
    assert isinstance(probe.grad_fn, torch.autograd.graph.Node)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "saved-tensor hooks are still installed"
