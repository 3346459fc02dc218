"""Every recipe leaves nothing on the lower tier, whatever its test did."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lowtide import SwapManager


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    if SwapManager().lower_bytes():
        gc.collect()  # a failure's traceback, or what a model of somebody else's keeps in a cycle
    assert SwapManager().lower_bytes() == 0
