"""What tests of steps that go on beside the loop start from."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from torch import nn

from lowtide.optim import late

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
    """No test leaves a hook of all modules behind."""
    yield
    if nn.modules.module._global_forward_pre_hooks:
        gc.collect()
        assert not nn.modules.module._global_forward_pre_hooks, "a hook of all modules has outlived its step"
