"""Workloads that move tensors by hand: every state, every mistake, several streams that compute.

As in ``workloads``: plain and with lowtide, and no host read before the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kit import Kit, expect, made

__all__ = ["HANDMADE"]


def _busy(kit: Kit, times: int = 3) -> None:
    """The compute stream allocates, writes and frees blocks, as a model would between two calls."""
    for _ in range(times):
        torch.full((5000,), 1.0, device=kit.device).mul_(3)


def _move(kit: Kit, tensor: Tensor, verbs: tuple[str, ...]) -> Any:
    import lowtide

    swap = lowtide.SwapTensor(tensor)
    del tensor
    for verb in verbs:
        getattr(swap, verb)()
        _busy(kit)
    return swap


_VERBS = ("async_offload", "wait_offload", "async_load", "wait_load")


def tensors(kit: Kit) -> None:
    """Every verb in order, stopped at every state, then read twice, or dropped there."""
    for last in range(len(_VERBS) + 1):
        want = made(kit, last)
        if kit.plain:
            kit.note(want, want, want)
            continue
        dropped = _move(kit, made(kit, 9), _VERBS[:last])
        swap = _move(kit, want, _VERBS[:last])
        del want, dropped
        kit.note(swap.bring_back("here"), swap.get_val(), swap.bring_back("again"))
        kit.check(swap._carrier.live_bytes() == 0, "what is back has no copy on the host")
        del swap
        _busy(kit)


def twice(kit: Kit) -> None:
    """A tensor goes down and up again and again; its buffer serves others in between."""
    if kit.plain:
        kit.note(*(made(kit, number) * 2 for number in range(4)))
        return
    for number, last in enumerate((4, 5, 6, 7)):
        swap = _move(kit, made(kit, number), (_VERBS * 2)[:last])
        kit.note(swap.bring_back("here") * 2)
        del swap
        dropped = _move(kit, made(kit, 9), (_VERBS * 2)[:last])
        del dropped
        side = torch.Stream(device=kit.device)
        with side:
            _round_trip(kit, number, torch.Stream(device=kit.device), silent=True)
        torch.accelerator.current_stream(kit.device).wait_stream(side)


def storages(kit: Kit) -> None:
    """What one module saved, driven by hand: a batch a direction."""
    if kit.plain:
        kit.note(*(made(kit, number, 1000 * number) for number in range(2, 5)))
        return
    import lowtide

    storage = lowtide.Storage("by hand")
    for number in range(2, 5):
        storage.swap(lowtide.SwapTensor(made(kit, number, 1000 * number)))
    for verb in ("launch_offload", "wait_offload", "launch_load", "wait_load"):
        getattr(storage, verb)()
        _busy(kit)
    kit.check(lowtide.SwapManager().lower_bytes() == 0, "what was waited for has no copy on the host")
    kit.note(*(tensor.get_val() for tensor in storage.tensors))


def mistakes(kit: Kit) -> None:
    """Calls that do not fit, and a buffer and a carrier used by hand: each mistake raises and breaks nothing."""
    kit.note(made(kit, 1) * 2)
    if kit.plain:
        return
    import lowtide

    wrong = functools.partial(expect, lowtide.errors.StateError)
    swap = lowtide.SwapTensor(made(kit, 1))
    storage = lowtide.Storage("by hand")
    storage.swap(swap)
    group = lowtide.SwapGroup("mistakes")
    group.add(storage)
    call: Callable[[], Any]
    for call in (swap.wait_offload, swap.async_load, group.wait_offload, group.launch_load, group.wait_load):
        wrong(call)
    group.launch_offload()
    for call in (swap.async_load, group.launch_load, swap.wait_load):
        wrong(call)
    group.wait_offload()
    for call in (swap.get_val, swap.wait_load):
        wrong(call)
    group.launch_load()
    for call in (swap.get_val, swap.async_offload, group.launch_offload):
        wrong(call)
    group.wait_load()
    kit.check(swap.state is lowtide.SwapState.DEVICE, "what was waited for is resident")
    carrier: Any = lowtide.SwapManager().carrier_for(kit.device)
    ((slot, copy),) = carrier.copy_out([torch.zeros(100, dtype=torch.uint8, device=kit.device)])
    carrier.release(slot, [copy])
    wrong(lambda: slot.tensor)
    wrong(functools.partial(carrier.release, slot, [copy]))
    copy.wait()
    carrier.close()
    kit.check(carrier.pool.allocated_bytes == 0, "a closed carrier holds nothing")


def _round_trip(kit: Kit, seed: int, copy_stream: Any = None, *, silent: bool = False) -> None:
    want = made(kit, seed)
    if kit.plain:
        kit.note(want * 2)
        return
    import lowtide

    swap = lowtide.SwapTensor(want)
    del want
    swap.async_offload(copy_stream)
    _busy(kit)
    swap.wait_offload()
    _busy(kit)
    swap.async_load(copy_stream)
    _busy(kit)
    swap.wait_load()
    if not silent:
        kit.note(swap.get_val() * 2)


def two_streams(kit: Kit) -> None:
    """Two compute streams that know nothing of each other share a pool; each moves tensors of its own."""
    default = torch.accelerator.current_stream(kit.device)
    streams = [torch.Stream(device=kit.device) for _ in range(2)]
    copies = [torch.Stream(device=kit.device) for _ in range(2)]
    for stream in streams:
        stream.wait_stream(default)
    for number in range(4):
        with streams[number % 2]:
            _round_trip(kit, number, copies[number % 2] if number < 2 else None)
    for stream in streams:
        default.wait_stream(stream)


def dropped_then_another_stream(kit: Kit) -> None:
    """A tensor is dropped while it leaves, or comes; a stream that knows nothing of it takes its buffer next."""
    if kit.plain:
        for number in range(4):
            kit.note(made(kit, number) * 2)
        return
    default = torch.accelerator.current_stream(kit.device)
    for number, verbs in enumerate((_VERBS[:1], _VERBS[:3]) * 2):
        _move(kit, made(kit, 9), verbs)
        side = torch.Stream(device=kit.device)
        with side:
            _round_trip(kit, number, torch.Stream(device=kit.device))
        default.wait_stream(side)


def refused_batch(kit: Kit) -> None:
    """A batch that the budget refuses gives back what it took, for a stream that knows nothing of the last reader."""
    if kit.plain:
        kit.note(made(kit, 1) * 2, made(kit, 2) * 2)
        return
    import lowtide
    from lowtide.residency.swap_tensor import launch_offload

    kit.configure(host_bytes=40_000)
    default = torch.accelerator.current_stream(kit.device)
    _round_trip(kit, 1)
    batch = [lowtide.SwapTensor(made(kit, seed, count)) for seed, count in ((3, 5000), (4, 9000))]
    expect(lowtide.errors.CapacityError, functools.partial(launch_offload, batch))
    storage = lowtide.Storage("batch")
    for tensor in batch:
        tensor.must = True
        storage.swap(tensor)
    del batch, tensor
    side = torch.Stream(device=kit.device)
    with side:
        _round_trip(kit, 2, torch.Stream(device=kit.device))
    default.wait_stream(side)
    expect(lowtide.errors.CapacityError, storage.launch_offload)


def crossing(kit: Kit) -> None:
    """A load is launched on one compute stream and waited for on another, which knows nothing of the first."""
    if kit.plain:
        kit.note(*(made(kit, number) * 2 for number in range(3)))
        return
    default = torch.accelerator.current_stream(kit.device)
    for number, launched in enumerate((3, 2, 2)):
        swap = _move(kit, made(kit, number), _VERBS[:launched])
        side = torch.Stream(device=kit.device)
        with side:
            if launched == 2:
                swap.async_load(torch.Stream(device=kit.device) if number == 1 else None)
            swap.wait_load()
            kit.note(swap.get_val() * 2)
        default.wait_stream(side)
        del swap


def retired(kit: Kit) -> None:
    """The lower tier changes while tensors are in every state; they keep the one they lie on."""
    for last in range(len(_VERBS) + 1):
        for drops in (False, True):
            want = made(kit, last)
            if kit.plain:
                kit.note(want)
                continue
            swap = _move(kit, want, _VERBS[:last])
            del want
            kit.configure(host_bytes=1_000_000 + last + 10 * drops)
            if not drops:
                kit.note(swap.bring_back("here"))
            else:
                kit.note(made(kit, last))
            del swap
            _busy(kit)


def scarce(kit: Kit) -> None:
    """The system refuses pinned memory that the budget would allow: idle buffers are freed for it."""
    if kit.plain:
        kit.note(*(made(kit, number, count) for number, count in enumerate((5000, 9000))))
        return
    pool = kit.manager().carrier_for(made(kit, 0).device).pool
    allocate = pool._allocate

    def refuse(nbytes: int) -> Tensor:
        if pool._live_bytes + pool._idle_bytes + nbytes > 45_000:
            raise MemoryError("the system has no more")
        memory: Tensor = allocate(nbytes)
        return memory

    pool._allocate = refuse
    for number, count in enumerate((5000, 9000)):
        kit.note(_move(kit, made(kit, number, count), _VERBS).get_val())


HANDMADE: dict[str, Callable[[Kit], None]] = {
    "tensors": tensors,
    "twice": twice,
    "storages": storages,
    "mistakes": mistakes,
    "two streams": two_streams,
    "dropped": dropped_then_another_stream,
    "refused": refused_batch,
    "crossing": crossing,
    "retired": retired,
    "scarce": scarce,
}
