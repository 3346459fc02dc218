"""What Llama blocks keep and peak at, as formulas and against torch's own checkpointing.

Law: kept bytes are the kept set's bytes and nothing else; the peak is never
above that of ``torch.utils.checkpoint`` or of its selective form at the same
kept set. Bytes are the allocator's own events.
"""

from __future__ import annotations

import functools

import pytest
import torch

from lowtide.bench.footprint import Footprint, Llama, footprint
from lowtide.bench.models import LlamaBlock, Stack
from lowtide.bench.modes import KEPT_SETS, MODES

D, F, B, T, HEADS = 256, 688, 1, 256, 4
STATE, WIDE, LSE = B * T * D * 4, B * T * F * 4, B * HEADS * T * 4
# Bytes of a kept set of one block beside its input. A kept result that backward never asks for is dropped: the
# down-projection always, q and k before the rotation because rotating them back needs only the tables.
KEPT = {
    "none": 0,
    "sdpa": STATE + LSE,
    "sdpa, gate, up": STATE + LSE + 2 * WIDE,
    "mid residual": STATE,
    "mid residual, sdpa": 2 * STATE + LSE,
    "rope q, rope k, v, sdpa, gate, up": 4 * STATE + LSE + 2 * WIDE,
    "rope q, rope k, v, sdpa, gate, up, o": 5 * STATE + LSE + 2 * WIDE,
    "all mm, sdpa": 5 * STATE + LSE + 2 * WIDE,
}
MIB = 1 << 20
GRAIN = 4096  # the scalars of a step: loss, its gradient


@functools.cache
def _measured(mode: str, kept: str, blocks: int, batch: int = B, tokens: int = T) -> Footprint:
    torch.manual_seed(0)
    origin = Stack(*[LlamaBlock(D, HEADS, F, tokens) for _ in range(blocks)])
    return footprint(origin, MODES[mode], kept, Llama(blocks, batch, tokens).inputs(), flops=False)


CASES = [(kept, 1) for kept in KEPT] + [(kept, 3) for kept in ("none", "sdpa", "mid residual", "all mm, sdpa")]


@pytest.mark.parametrize(("kept", "blocks"), CASES)
def test_kept_bytes_are_the_kept_set(kept: str, blocks: int) -> None:
    assert set(KEPT) == set(KEPT_SETS)
    output_and_inputs = (blocks + 1) * STATE
    want = output_and_inputs + blocks * KEPT[kept]
    assert abs(_measured("keep", kept, blocks).kept_bytes - want) <= GRAIN


@pytest.mark.parametrize(("kept", "blocks"), CASES)
def test_peak_is_never_above_selective_checkpointing(kept: str, blocks: int) -> None:
    ours, peer = _measured("keep", kept, blocks), _measured("sac", kept, blocks)
    assert ours.peak_bytes <= peer.peak_bytes
    assert ours.peak_without_gradients <= peer.peak_without_gradients


@pytest.mark.parametrize("blocks", [1, 3])
def test_peak_of_recompute_is_never_above_checkpoint(blocks: int) -> None:
    ours, peer = _measured("recompute", "none", blocks), _measured("checkpoint", "none", blocks)
    assert ours.peak_bytes <= peer.peak_bytes
    assert ours.peak_without_gradients <= peer.peak_without_gradients


def test_half_a_block_is_materialised_at_a_time() -> None:
    """With attention, gate and up kept, the attention half is not replayed until its own backward."""
    assert _measured("keep", "sdpa, gate, up", 1, 4, 512).peak_bytes <= 39.1 * MIB
    assert _measured("sac", "sdpa, gate, up", 1, 4, 512).peak_bytes > 54.9 * MIB


def test_four_blocks_release_what_they_have_used() -> None:
    """A kept value dies at its last use in backward, not at backward's end."""
    peer, ours = _measured("sac", "sdpa", 4, 4, 512), _measured("keep", "sdpa", 4, 4, 512)
    assert peer.peak_bytes - ours.peak_bytes >= 10.0 * MIB
