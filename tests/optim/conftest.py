"""What tests of steps that go on beside the loop start from."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
from torch import nn

from lowtide.optim import arriving, late

from .late_kit import Gate


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(late, "LATE_BYTES", 1)  # every parameter by itself
    made = Gate(monkeypatch)
    made.opened.set()
    yield made
    made.opened.set()


@pytest.fixture(autouse=True)
def no_hook_stays() -> Iterator[None]:
    """No test leaves a hook of all modules behind. One of a step that has ended goes with the next call of any."""
    yield
    if nn.modules.module._global_forward_pre_hooks:
        gc.collect()
        for step in list(arriving._GOING_ON.values()):
            step.join()
        deadline = time.monotonic() + 30
        while nn.modules.module._global_forward_pre_hooks and time.monotonic() < deadline:
            nn.Identity()(None)  # what has been told to have ended says so a moment later
        assert not nn.modules.module._global_forward_pre_hooks, "a hook of all modules has outlived its step"
