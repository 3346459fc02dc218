"""The modes that the device check runs, and the baseline that sends everything away.

Most come from ``lowtide.bench.modes``; what is added here needs an accelerator.
Law: a mode changes only what it wraps; models of several modes share their
weights, so that a large model is held once.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import lowtide
from lowtide import SwapManager, checkpoint_wrapper, swap_wrapper
from lowtide._torch import queue_after_backward
from lowtide.bench.modes import MODES, Mode
from lowtide.device import is_accelerator
from lowtide.storage import is_parameter

__all__ = ["EQUAL_MODES", "OURS", "OffloadEverything", "Packed", "packed_by", "step_modes", "twin"]


M = TypeVar("M", bound=nn.Module)


def twin(model: M) -> M:
    """A copy of the module tree over the very same parameters and buffers."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


# ---------------------------------------------------------------- the baseline


class OffloadEverything:
    """Every saved tensor goes to pinned memory on a stream of its own and comes back when backward asks.

    The scheme of the activation offloading in public fine-tuning libraries: no
    recompute, no duplicates removed, at most ``stash`` tensors on their way out,
    and on the way back the copies run one node of the graph ahead of the compute.
    Memory is made on one stream and used on another, so each reference is held
    until the stream that owns the memory waits for the other one.
    """

    def __init__(self, where: torch.device, *, min_bytes: int = 1024, stash: int = 5) -> None:
        self.where = where
        self.min_bytes = min_bytes
        self.stash = stash
        self._stream: Any = None
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        self._node: Any = None  # the node of the graph that unpacks now, and what it got
        self._got: list[Tensor] = []
        self._back: deque[tuple[list[Tensor], Any]] = deque()

    @property
    def stream(self) -> Any:
        """The copy stream: one for good, since memory that the allocator cached for a stream stays with it."""
        if self._stream is None:
            self._stream = torch.Stream(device=self.where)
        return self._stream

    def pack(self, tensor: Tensor) -> Tensor | tuple[Tensor]:
        """Start the copy out; the device's bytes go once at most ``stash`` younger ones are leaving."""
        if tensor.device.type != self.where.type or tensor.nbytes < self.min_bytes or is_parameter(tensor):
            return tensor
        self.stream.wait_stream(self._compute())
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self.stream:
            host.copy_(tensor, non_blocking=True)
        self._leaving.append((tensor, self.stream.record_event()))
        while len(self._leaving) > self.stash:
            self._let_go()
        return (host,)

    def unpack(self, packed: Tensor | tuple[Tensor]) -> Tensor:
        """Copy back and let the compute wait for it."""
        if isinstance(packed, Tensor):
            return packed
        node: Any = torch._C._current_autograd_node()
        if self._node is None:
            queue_after_backward(self._end_backward)
        if node is not self._node:
            self._turn_to(node)
        with self.stream:
            tensor = packed[0].to(self.where, non_blocking=True)
        self._compute().wait_stream(self.stream)
        self._got.append(tensor)
        return tensor

    def _compute(self) -> Any:
        return torch.accelerator.current_stream(self.where)

    def _let_go(self) -> None:
        # The compute stream, which owns the block, may write it again from here on: order that behind the copy.
        self._compute().wait_event(self._leaving[0][1])
        self._leaving.popleft()

    def _turn_to(self, node: Any) -> None:
        """The kernels of the nodes before this one are queued: what the one before the last read may go."""
        self._back.append((self._got, self._compute().record_event()))
        self._node, self._got = node, []
        while len(self._back) > 1:
            self.stream.wait_event(self._back[0][1])
            self._back.popleft()

    def _end_backward(self) -> None:
        self.stream.wait_stream(self._compute())
        self._node, self._got = None, []
        self._back.clear()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """The hooks around one forward."""
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            while self._leaving:
                self._let_go()


@dataclass(frozen=True)
class Packed:
    """What autograd packs in a piece of computation.

    Args:
        unique_bytes: device bytes of unique storages, parameters left out.
        pinned_unique_bytes: the same as torch pins them: each rounded up to a power of two.
        pinned_every_bytes: pinned bytes if every packed tensor is copied, parameters too.
    """

    unique_bytes: int
    pinned_unique_bytes: int
    pinned_every_bytes: int


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def packed_by(run: Callable[[], object]) -> Packed:
    """Run and count; holds all that is packed until the run ends."""
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    unique = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in alive if not is_parameter(t)}
    every = sum(_power_of_two(t.nbytes) for t in alive)
    del out
    return Packed(sum(unique.values()), sum(map(_power_of_two, unique.values())), every)


# ---------------------------------------------------------------- ours


def _recompute(block: nn.Module, kept: Any) -> nn.Module:
    return checkpoint_wrapper(block)


def _recompute_swapped(block: nn.Module, kept: Any) -> nn.Module:
    return checkpoint_wrapper(block, swap_inputs=True)


def _save(block: nn.Module, kept: Any) -> nn.Module:
    return checkpoint_wrapper(block, lowtide.save_matmuls_and_attention())


def _swap(block: nn.Module, kept: Any) -> nn.Module:
    return checkpoint_wrapper(block, lowtide.swap_matmuls_and_attention())


def _swap_inputs_too(block: nn.Module, kept: Any) -> nn.Module:
    return checkpoint_wrapper(block, lowtide.swap_matmuls_and_attention(), swap_inputs=True)


def _swap_all(block: nn.Module, kept: Any) -> nn.Module:
    return swap_wrapper(block)


OURS: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("recompute", _recompute),
        Mode("recompute, swap inputs", _recompute_swapped, order=True),
        Mode("save mm+sdpa", _save),
        Mode("swap mm+sdpa", _swap, order=True),
        Mode("swap mm+sdpa, inputs", _swap_inputs_too, order=True),
        Mode("swap all", _swap_all, order=True),
    )
}


@dataclass(frozen=True)
class ChainMode(Mode):
    """A mode whose blocks are chained instead of learned."""

    def prepare(self, model: nn.Module, kept: Callable[[Any, Any], Any] | None = None) -> None:
        """Wrap and chain every block of ``model.blocks``."""
        super().prepare(model, kept)
        blocks: Any = model.blocks
        for first, second in pairwise(blocks):
            SwapManager().set_forward_prefetch_layer(first, second)


@contextlib.contextmanager
def _as_group() -> Iterator[None]:
    manager, name = SwapManager(), "device check"
    manager.set_current_group_name(name)
    try:
        yield
    finally:
        manager.set_current_group_name(None)
    manager.launch_offload(name)
    manager.wait_offload(name)
    manager.launch_load(name)  # backward waits for each value when it needs it


# Every way to keep, recompute or move, for the comparison of bits.
EQUAL_MODES: dict[str, Mode] = {
    **OURS,
    "swap all, chain": ChainMode("swap all, chain", _swap_all),
    "swap all, group": Mode("swap all, group", _swap_all, around=_as_group),
}


def step_modes(where: torch.device) -> dict[str, Mode]:
    """Peers, then ours, for the comparison of large steps; ``plain`` comes first."""
    pinned = is_accelerator(where)

    def around() -> contextlib.AbstractContextManager[Any]:
        return save_on_cpu(pin_memory=pinned, device_type=where.type) if pinned else save_on_cpu()

    peers = [
        MODES["plain"],
        MODES["checkpoint"],
        MODES["sac"],
        Mode("save_on_cpu", lambda block, kept: block, around=around),
    ]
    if pinned:
        everything = OffloadEverything(where)
        peers.append(Mode("offload everything", lambda block, kept: block, around=everything.hooks))
    return {mode.name: mode for mode in (*peers, *OURS.values())}
