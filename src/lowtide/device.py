"""The only file that names a backend: streams, events, pinned memory, generators, memory counters.

Everything above asks for streams and events by meaning ("the stream this thread
computes on"), so that a second framework could stand behind the same few verbs.
Law: nothing here waits on the host unless its name says so, and a stream is
asked for at the moment of use, never remembered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

__all__ = [
    "Event",
    "NumericFlags",
    "Stream",
    "allocated_bytes",
    "capturing",
    "current_stream",
    "default_generator",
    "has_accelerator",
    "is_accelerator",
    "max_allocated_bytes",
    "new_stream",
    "note_reader",
    "numeric_flags",
    "pinned_bytes",
    "record_event",
    "reset_peak",
    "synchronize",
    "training_device",
    "use_stream",
    "wait_event",
    "wait_stream",
    "with_default_device",
    "with_numeric_flags",
]


class Event(Protocol):
    """What a copy leaves behind; ordered by, never polled."""

    def synchronize(self) -> None:
        """Block the host until the event has happened."""


class Stream(Protocol):
    """A queue of work on a device."""

    def wait_event(self, event: Any) -> None:
        """Order later work on this stream after ``event``."""


def has_accelerator() -> bool:
    """Whether torch sees a device other than the CPU."""
    return torch.accelerator.is_available()


def training_device() -> torch.device:
    """The accelerator where there is one, else the CPU.

    >>> training_device().type in {"cpu", "cuda", "npu", "xpu", "mps"}
    True
    """
    if has_accelerator():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return torch.device(found)
    return torch.device("cpu")


def is_accelerator(device: torch.device) -> bool:
    """Whether tensors of ``device`` live outside of plain host memory, and copies have streams."""
    return device.type not in {"cpu", "meta"}


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operators of ``device`` use when they are given none."""
    if device.type in {"cpu", "meta"}:  # what is drawn on meta is drawn nowhere
        return torch.default_generator
    module = getattr(torch, device.type)
    index = device.index if device.index is not None else module.current_device()
    generators: Any = module.default_generators
    return generators[index]  # type: ignore[no-any-return]


def current_stream(device: torch.device) -> Stream:
    """The stream this thread computes on now."""
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> Stream:
    """A stream of its own for copies."""
    return torch.Stream(device=device)


@contextlib.contextmanager
def use_stream(stream: Any) -> Iterator[None]:
    """Run the body on ``stream``."""
    with stream:
        yield


def record_event(stream: Any) -> Event:
    """An event after all work queued on ``stream`` so far."""
    event: Event = stream.record_event()
    return event


def wait_event(stream: Any, event: Any) -> None:
    """Order later work on ``stream`` after ``event``; the host does not wait."""
    stream.wait_event(event)


def note_reader(tensor: torch.Tensor) -> None:
    """Keep the block behind a tensor, once it is freed, until the current stream has done what is queued on it now."""
    if is_accelerator(tensor.device):
        tensor.record_stream(current_stream(tensor.device))  # type: ignore[arg-type]


def wait_stream(stream: Any, other: Any) -> None:
    """Order later work on ``stream`` after all work queued on ``other`` so far."""
    stream.wait_stream(other)


def pinned_bytes(nbytes: int) -> torch.Tensor:
    """A flat uint8 tensor of page-locked host memory, whatever the default device. Slow (milliseconds): pool it."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


# Backends whose page-locked memory comes from torch's caching host allocator.
_ROUNDS_UP = frozenset({"cuda", "xpu", "npu"})


def pinned_footprint(nbytes: int, device: torch.device) -> int:
    """Bytes of host memory that :func:`pinned_bytes` really takes where ``device`` is the accelerator.

    torch's caching host allocator rounds requests up to a power of two (all of them up to 2.10, and later unless it was
    told a size above which it should not).

    >>> pinned_footprint(5 << 20, torch.device("cuda")) >> 20, pinned_footprint(5 << 20, torch.device("cpu")) >> 20
    (8, 5)
    """
    if device.type not in _ROUNDS_UP or nbytes <= 1:
        return nbytes
    return 1 << (nbytes - 1).bit_length()


NumericFlags = tuple[str, bool, bool, bool, bool, bool, int]


def numeric_flags() -> NumericFlags:
    """The process-wide switches that decide the bits of a kernel's result (R12).

    The number of compute threads is one: it decides where a reduction on the CPU is cut.
    """
    cudnn = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn.enabled
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        mkldnn,
        torch.get_num_threads(),
    )


@contextlib.contextmanager
def with_numeric_flags(flags: NumericFlags) -> Iterator[None]:
    """Run the body under the switches of another moment, and put today's back."""
    now = numeric_flags()
    if now == flags:
        yield
        return
    _set_numeric_flags(flags)
    try:
        yield
    finally:
        _set_numeric_flags(now)


def _set_numeric_flags(flags: NumericFlags) -> None:
    precision, deterministic, enabled, benchmark, cudnn_deterministic, mkldnn, threads = flags
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())
    torch.backends.cudnn.enabled = enabled
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.deterministic = cudnn_deterministic
    torch.backends.mkldnn.enabled = mkldnn  # type: ignore[assignment]
    torch.set_num_threads(threads)


@contextlib.contextmanager
def with_default_device(where: torch.device) -> Iterator[None]:
    """Make tensors on ``where`` by default in the body: backward's threads do not know the default of forward's."""
    if torch.get_default_device() == where:
        yield
        return
    with where:
        yield


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a device graph."""
    module = getattr(torch, device.type, None)
    probe = getattr(module, "is_current_stream_capturing", None)
    return bool(probe()) if probe is not None and is_accelerator(device) else False


def synchronize(device: torch.device) -> None:
    """Block the host until ``device`` is idle; nothing to do on a plain CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    """Bytes that tensors of an accelerator hold now."""
    return int(torch.accelerator.memory_allocated(device))


def max_allocated_bytes(device: torch.device) -> int:
    """Largest value of :func:`allocated_bytes` since :func:`reset_peak`."""
    return int(torch.accelerator.max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Start a new peak measurement on an accelerator."""
    torch.accelerator.reset_peak_memory_stats(device)
