"""Which tensors may be swapped by hand, and :class:`SwapTensors`: several of them driven as one.

Law: a storage is copied once, however many of its views are in the list; what
comes back looks as what went in, slices and lazy bits included. Device memory is
freed by dropping our references and never by resizing a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lowtide import _torch
from lowtide.errors import StateError, WrapError, explain
from lowtide.residency.pool import HostBuffer
from lowtide.residency.swap_tensor import SwapState, SwapTensor, launch_load, launch_offload
from lowtide.storage import PLAIN_TYPES, Layout, is_parameter, layout_of, rebuild

__all__ = ["SwapTensors", "is_valid_for_swap", "marked", "why_not_valid"]

Tensor = torch.Tensor
CheckFn = Callable[[Tensor], bool]

_MARK = "swap_this_tensor"


def marked(tensor: Tensor) -> bool | None:
    """What ``swap_this_tensor`` says, or None where a tensor does not have it."""
    mark = getattr(tensor, _MARK, None)
    return None if mark is None else bool(mark)


def why_not_valid(tensor: Any, custom_check_fn: CheckFn | None = None) -> str | None:
    """Why something may not be swapped, or None if it may."""
    if not isinstance(tensor, Tensor):
        return f"it is no tensor but a {type(tensor).__name__}"
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
        return "it is no plain strided tensor"
    reasons = (
        (is_parameter(tensor), "it is a parameter or a view of one"),
        (tensor.device.type == "meta" or not tensor.untyped_storage().nbytes(), "its storage is empty"),
        (marked(tensor) is False, "it is marked swap_this_tensor = False"),
    )
    found = next((reason for applies, reason in reasons if applies), None)
    if found is None and custom_check_fn is not None and not custom_check_fn(tensor):
        return "custom_check_fn refused it"
    return found


def is_valid_for_swap(tensor: Any, custom_check_fn: CheckFn | None = None) -> bool:
    """Whether a tensor may be moved to the lower tier (L2).

    Not a parameter or a view of one, a plain strided tensor, a storage that is
    not empty, not marked ``swap_this_tensor = False``, and ``custom_check_fn``,
    where given, says yes. Costs nothing and moves nothing.

    >>> import torch
    >>> is_valid_for_swap(torch.ones(2)), is_valid_for_swap(torch.nn.Parameter(torch.ones(2)))
    (True, False)
    >>> is_valid_for_swap(torch.ones(2), lambda tensor: tensor.numel() > 8)
    False
    """
    return why_not_valid(tensor, custom_check_fn) is None


class SwapTensors:
    """A list of tensors that leave and come back together (L3).

    ``device -> d2h -> host -> h2d -> device`` by ``swap_to_host``, ``wait_d2h``,
    ``swap_to_device``, ``wait_h2d``. A repeated call is harmless; one that does
    not fit raises and names the missing one. All copies of a call are one batch,
    on the stream of their direction, ordered by events. Costs one copy of each
    storage on the lower tier until it is back. Hazard: as long as somebody else
    holds a storage its device memory is not freed (``held_elsewhere``), so drop
    your own reference and take the tensor from ``tensors`` afterwards.

    Args:
        tensors: one tensor, or several.
        custom_check_fn: see :func:`is_valid_for_swap`.

    Raises:
        WrapError: one of the tensors is not valid.

    >>> import torch
    >>> one = SwapTensors(torch.arange(6.0)[2:4])
    >>> one.swap_to_host(); one.wait_d2h(); one.stat, one.is_slice_tensors
    ('host', [True])
    >>> one.swap_to_device(); one.wait_h2d(); one.tensors
    [tensor([2., 3.])]
    """

    def __init__(self, tensors: Tensor | Iterable[Tensor] = (), custom_check_fn: CheckFn | None = None) -> None:
        self._check_fn = custom_check_fn
        self._moving: list[SwapTensor] = []  # one a storage
        self._places: list[tuple[SwapTensor, Layout]] = []  # one a tensor
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            self.add_tensor(tensor)

    @classmethod
    def over(cls, moving: Sequence[SwapTensor]) -> SwapTensors:
        """Drive swap tensors that a graph owns. Keeps them alive as long as it lives itself."""
        made = cls()
        made._moving = list(moving)
        made._places = [(one, one.layout) for one in moving]
        return made

    def add_tensor(self, tensor: Tensor) -> None:
        """Add a tensor, which moves with the others from the next ``swap_to_host`` on."""
        why_not = why_not_valid(tensor, self._check_fn)
        if why_not is not None:
            raise WrapError(
                explain(
                    "a tensor may not be swapped",
                    expected="a plain tensor with bytes of its own that passes is_valid_for_swap",
                    got=why_not,
                    where="SwapTensors",
                    remedy="Ask is_valid_for_swap(tensor, custom_check_fn) before.",
                )
            )
        if self._places and self.stat != SwapState.DEVICE.value:
            raise self._wrong("add_tensor", "tensors on the device (device)", "swap_to_device and wait_h2d")
        known = next((one for one in self._moving if one.shares(tensor)), None)
        if known is None:
            known = SwapTensor(tensor, name="SwapTensors")
            self._moving.append(known)
        self._places.append((known, layout_of(tensor)))

    # ---- the verbs ----------------------------------------------------------------------------

    def swap_to_host(self, copy_stream: Any = None) -> None:
        """Start the copies down. Harmless when they are there or on their way already."""
        if self._state is SwapState.H2D:
            raise self._wrong("swap_to_host", "tensors on the device (device)", "wait_h2d")
        launch_offload(self._moving, copy_stream)

    def wait_d2h(self) -> None:
        """Order the compute after the copies down and drop our references to the device's bytes."""
        if self._state is SwapState.DEVICE and not self._has_left:
            raise self._wrong("wait_d2h", "copies on their way (d2h)", "swap_to_host")
        for one in self._moving:
            one.wait_offload()

    def swap_to_device(self, copy_stream: Any = None) -> None:
        """Start the copies back. Harmless when they are back or on their way already."""
        if self._state is SwapState.D2H:
            raise self._wrong("swap_to_device", "tensors on the lower tier (host)", "wait_d2h")
        if self._state is SwapState.DEVICE and not self._has_left:
            raise self._wrong("swap_to_device", "tensors on the lower tier (host)", "swap_to_host and wait_d2h")
        launch_load(self._moving, copy_stream)

    def wait_h2d(self) -> None:
        """Order the compute after the copies back; the copies on the lower tier go back to their pool."""
        if self._state is not SwapState.H2D and not (self._state is SwapState.DEVICE and self._has_left):
            missing = {
                SwapState.HOST: "swap_to_device",
                SwapState.D2H: "wait_d2h and swap_to_device",
            }.get(self._state, "swap_to_host, wait_d2h and swap_to_device")
            raise self._wrong("wait_h2d", "copies on their way back (h2d)", missing)
        for one in self._moving:
            one.wait_load()

    # ---- what is where ------------------------------------------------------------------------

    @property
    def _state(self) -> SwapState:
        return self._moving[0].state if self._moving else SwapState.DEVICE

    @property
    def _has_left(self) -> bool:
        return not self._moving or self._moving[0].offloaded_once

    @property
    def stat(self) -> str:
        """``"device"``, ``"d2h"``, ``"host"`` or ``"h2d"``."""
        return self._state.value

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, which must be on the device; raises :class:`StateError` elsewhere."""
        if self._state is not SwapState.DEVICE:
            missing = "wait_h2d" if self._state is SwapState.H2D else "swap_to_device and wait_h2d"
            raise self._wrong("tensors", "tensors on the device (device)", missing)
        return [rebuild(one.get_val(), layout) for one, layout in self._places]

    @property
    def tensor_cpus(self) -> list[Tensor | None]:
        """The pinned host copies, in the order of the tensors; None for one that has none.

        None on the device, and on a machine without an accelerator, where the
        lower tier is a file. Hazard: ``wait_d2h`` orders the device's stream and
        not the host; synchronize before you read.
        """
        return [_on_host(one, layout) for one, layout in self._places]

    @property
    def is_slice_tensors(self) -> list[bool]:
        """For each tensor, whether its storage is larger than what it shows: the whole storage moves."""
        return [one.nbytes != layout.nbytes for one, layout in self._places]

    @property
    def nbytes(self) -> int:
        """Bytes that move: those of whole storages, each once."""
        return sum(one.nbytes for one in self._moving)

    @property
    def held_elsewhere(self) -> bool:
        """Whether somebody else keeps bytes on the device that we have dropped."""
        return any(one.held_elsewhere for one in self._moving)

    def __len__(self) -> int:
        return len(self._places)

    def _wrong(self, call: str, expected: str, missing: str) -> StateError:
        return StateError(
            explain(
                f"{call} does not fit",
                expected=expected,
                got=self.stat,
                where="SwapTensors",
                remedy=f"Call {missing} first.",
            )
        )


def _on_host(one: SwapTensor, layout: Layout) -> Tensor | None:
    buffer = one._slot
    if not isinstance(buffer, HostBuffer):
        return None
    flat = buffer.tensor
    offset = flat.storage_offset() // layout.dtype.itemsize + layout.offset
    with torch.no_grad(), _torch.no_dispatch():
        plain = torch.empty(0, dtype=layout.dtype, device="cpu").set_(
            flat.untyped_storage(), offset, layout.size, layout.stride
        )
        return plain if layout.bits is None else rebuild(plain, layout._replace(offset=offset))
