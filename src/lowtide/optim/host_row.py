"""One parameter of an optimizer that steps on the host: its master, its state and its gradient in host memory.

Law: after a step the parameter is, bit for bit, its master's cast. A parameter that was changed from outside since the
last write wins over its master.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lowtide import device
from lowtide._torch import like_sharded
from lowtide.errors import UnsupportedError, explain
from lowtide.optim.gradients import Lanes, Slabs, bytes_of, host_memory
from lowtide.optim.host_gradient import BesideBackward, HostGradient
from lowtide.optim.kinds import StateSpec
from lowtide.optim.masters import MASTER, FullMaster
from lowtide.optim.stand_in import LeftView, demand_current, left, stand_in, used_elsewhere
from lowtide.optim.tensors import Scratch, dense_strides, flat_view, in_order_of, is_sharded, local_part, sum_of_bits
from lowtide.optim.worker import Share, Worker
from lowtide.residency.manager import SwapManager
from lowtide.residency.room import demand_room

__all__ = ["HostRow", "Offload", "batches_of", "demand_host_room", "offload", "refresh", "step_rows"]

Tensor = torch.Tensor

# Stepped at once: enough for every thread, little enough that copies up run beside the rest of the step.
BATCH_BYTES = 64 << 20


def _host_bytes_of(numel: int, dtype: torch.dtype, stepped: torch.dtype, spec: StateSpec, shape: torch.Size) -> int:
    """Host memory of one parameter: its master, its gradient as it arrives and as a sum, and its state."""
    wide = torch.promote_types(dtype, torch.float32)
    state = sum(
        kind.itemsize * (numel if other is None or other == shape else other.numel())
        for kind, other in spec.arrays.values()
    )
    return numel * (stepped.itemsize + dtype.itemsize + wide.itemsize) + state


class HostRow:
    """What the optimizer holds of one parameter. Everything is a row in the order of the parameter's memory."""

    def __init__(
        self,
        parameter: Tensor,
        group: int,
        name: str,
        *,
        stepped: torch.dtype,
        spec: StateSpec,
        lanes: Lanes,
        beside: BesideBackward,
    ) -> None:
        """``stepped``: the type of what is stepped; ``spec``: the state that its class keeps for it."""
        local = local_part(parameter)
        self.parameter = parameter
        self.group = group
        self.name = name
        self.spec = spec
        self.stepped = stepped
        self.state: dict[str, Any] = {}
        self.hooked = False
        self.generation = 0  # of the gradient: what stands in for an earlier one is not this one
        self.reached = False  # by the last step that took a gradient of it
        self._source: tuple[weakref.ref[Tensor], int] | None = None
        self._target: Tensor | None = None
        self._lanes = lanes
        self._beside = beside
        self._size = local.size()
        self._dense = dense_strides(local)
        # Of a row as the class sees it: the parameter's own, where that has no gaps in its memory.
        self._strides = local.stride() if self._dense else torch.empty(local.shape, device="meta").stride()
        self._full = FullMaster() if stepped is not parameter.dtype else None
        self._master: Tensor | None = None
        self._gradient: HostGradient | None = None
        self._made = False  # the master holds what the last step has left
        self._written: int | None = None  # the sum of the parameter's bits as we have written it

    # ---- memory --------------------------------------------------------------------------------

    @property
    def pinned_bytes(self) -> int:
        """Bytes that copies start from or arrive in."""
        numel = local_part(self.parameter).numel()
        # A master of more bits than its parameter goes up through the memory where gradients arrive.
        return numel * self.parameter.dtype.itemsize * (1 if self._full else 2)

    def allocate(self, pinned: Slabs) -> None:
        """Ask for the memory of master and gradient. Harmless when it is there."""
        if self._master is not None:
            return
        local = local_part(self.parameter)
        numel = local.numel()
        self._gradient = HostGradient(local, pinned.row(numel, local.dtype), strides=self._strides, beside=self._beside)
        if self._full is None:
            self._master = pinned.row(numel, self.stepped)
        else:
            self._master = host_memory(numel, self.stepped, pinned=False)

    @property
    def has_gradient(self) -> bool:
        """Whether there is memory for a gradient."""
        return self._gradient is not None

    @property
    def gradient(self) -> HostGradient:
        """The gradient in host memory."""
        if self._gradient is None:
            self.allocate(Slabs(local_part(self.parameter).device))
        assert self._gradient is not None
        return self._gradient

    @property
    def master(self) -> Tensor:
        """What is stepped, as a row."""
        if self._master is None:
            self.allocate(Slabs(local_part(self.parameter).device))
        assert self._master is not None
        return self._master

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory now."""
        held: list[Any] = [self._master, *self.state.values()]
        if self._gradient is not None:
            held.append(self._gradient.landing)
        tensors = [value for value in held if isinstance(value, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) + (
            0 if self._gradient is None else self._gradient.sum_bytes
        )

    def _row_of(self, local: Tensor) -> Tensor:
        """The elements of a tensor like the parameter; over its memory where that has no gaps."""
        return flat_view(local) if self._dense else local.reshape(-1)

    def shaped(self, row: Tensor) -> Tensor:
        """A row as the class is to see it."""
        return row.as_strided(self._size, self._strides)

    # ---- one step ------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether there is a gradient for the next step."""
        return self._gradient is not None and self._gradient.pending

    def replace_gradient(self) -> None:
        """What has stood in for a gradient so far does so no more."""
        self.generation += 1

    def forget_gradient(self) -> None:
        """As ``zero_grad`` does."""
        self.replace_gradient()
        self.gradient.zero(set_to_none=True)

    def receive(self, grad: Tensor) -> None:
        """Launch the copy of a gradient to host memory, where it adds to what is there."""
        if grad.layout is not torch.strided:
            raise _not_dense(grad, self.name)
        local = local_part(self.parameter)
        given = local_part(grad)
        row = flat_view(in_order_of(given, local)) if self._dense else given.reshape(-1)
        self.gradient.arrive(row, self._lanes.of(local.device))

    def fetch(self) -> None:
        """Launch the copy of a gradient that has stayed with its parameter until the step."""
        grad = self.parameter.grad
        assert grad is not None
        self._source = None if grad.is_inference() else (weakref.ref(grad), grad._version)
        self.reached = False
        self.receive(grad)

    @property
    def was_fetched(self) -> bool:
        """Whether the parameter's gradient is the one that was fetched last, and no version tells of a change."""
        grad = self.parameter.grad
        if grad is None or self._source is None:
            return False
        of, version = self._source
        return of() is grad and grad._version == version

    def aim(self) -> None:
        """A step that goes on beside writes where the parameter is now, and looks at the parameter no more.

        Its version has moved by then, once.
        """
        self._target = self.parameter.data

    def take_back(self) -> None:
        """Such a step has ended; what it did not reach waits for the next one."""
        self._target = None
        self.gradient.take_back()

    def share(self) -> Share:
        """What the class is to step. The master was refreshed."""
        grad = self.gradient.for_step().to(self.stepped)
        return Share(self.group, self.shaped(self.master), self.shaped(grad), dict(self.state))

    def finish(self, state: dict[str, Any]) -> None:
        """Keep what the class has made of the state, and launch the copy of the master's cast to the parameter."""
        self.state = state
        self._made = True
        self.gradient.consume()
        local, self._target = local_part(self.parameter) if self._target is None else self._target, None
        image = self.master
        if image.dtype != local.dtype:
            # The gradient that lies there was used, and the next one's copy comes behind ours on the same stream.
            image = self.gradient.landing
            if image.dtype != local.dtype:
                image = host_memory(image.numel(), local.dtype, pinned=image.is_pinned())
            image.copy_(self.master)
        self._written = int(sum_of_bits(image))
        lane = self._lanes.of(local.device)
        if self._dense:
            lane.copy_up(image, flat_view(local))
        else:
            lane.copy_up(image.view(local.shape), local)
        self.reached = True
        self.gradient.let_go()

    def bits(self) -> Tensor:
        """The sum of the parameter's bits now, on its device."""
        return sum_of_bits(self._row_of(local_part(self.parameter)))

    def refresh(self, bits: int) -> None:
        """Make the master what it has to be before a step; ``bits`` is what :meth:`bits` gave.

        Cost: a copy of the parameter to the host if it was written to since the last step.
        """
        if self._made and bits == self._written:
            return
        weight = self._row_of(local_part(self.parameter)).to("cpu")
        if self._full is None:
            self.master.copy_(weight)
        else:
            self._full.target(weight, {MASTER: self.master}, made=self._made, scratch=Scratch())
        self._made, self._written = True, bits

    # ---- state, in full ------------------------------------------------------------------------

    @property
    def has_master(self) -> bool:
        """Whether there is a master that the parameter does not say all of."""
        return self._made and self._full is not None

    @property
    def has_state(self) -> bool:
        """Whether there is anything to keep in a checkpoint."""
        return bool(self.state) or self.has_master

    def export(self) -> dict[str, Any]:
        """Copies of the state, with the master as ``master_param``. The master was refreshed."""
        found = {name: self._out(value) for name, value in self.state.items()}
        if self.has_master:
            found[MASTER] = self._out(self.shaped(self.master))
        return found

    def _out(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copied = value.detach().clone()
        if value.dim() and is_sharded(self.parameter):
            return like_sharded(copied, self.parameter)
        return copied

    def take(self, state: Mapping[str, Any] | None) -> None:
        """Replace the state by a copy of ``state``, which may be none. The parameter is not touched."""
        self.state = {}
        self._made, self._written = False, None
        for name, value in (state or {}).items():
            if name == MASTER:
                if self._full is not None:
                    self.shaped(self.master).copy_(local_part(value))
                    self._made = True  # the parameter is compared with it at the next step
            else:
                self.state[name] = self._in(name, value)

    def _in(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        given = local_part(value).to("cpu")
        known = self.spec.arrays.get(name)
        if known is None:
            return given.clone()
        local = local_part(self.parameter)
        if known[1] is None and self._dense:
            made = torch.empty_strided(local.size(), local.stride(), dtype=known[0], device="cpu")
        else:
            made = torch.empty(given.shape, dtype=known[0], device="cpu")
        return made.copy_(given)

    def accepts(self, name: str, value: Any) -> str | None:
        """None if a value can be this parameter's state ``name``; else what was expected."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return None
        known = self.spec.arrays.get(name)
        if known is None and name != MASTER:
            return None
        shape = self.parameter.shape if known is None or known[1] is None else known[1]
        if value.shape != shape:
            return f"a tensor of {tuple(shape)}"
        return "a DTensor" if is_sharded(self.parameter) and not is_sharded(value) else None

    def give_back(self) -> None:
        """Make the gradient in host memory the parameter's ``grad`` again; one that was used up is gone."""
        if not left(self.parameter.grad, self):
            return
        if not self.pending:
            self.parameter.grad = None
            return
        local = local_part(self.parameter)
        value = self.shaped(self.gradient.value()).to(local.device, local.dtype, copy=True)
        self.gradient.used()
        self.parameter.grad = like_sharded(value, self.parameter) if is_sharded(self.parameter) else value


class Offload:
    """A hook of a parameter that holds nothing of the optimizer."""

    def __init__(self, row: HostRow) -> None:
        self._row = weakref.ref(row)

    def __call__(self, parameter: Tensor) -> None:
        """Runs in backward, on its thread for the device, when the gradient is there."""
        row = self._row()
        if row is not None:
            with torch.no_grad():
                offload(row, parameter)


def offload(row: HostRow, parameter: Tensor) -> None:
    """Let a gradient leave. One that autograd has added to what had left is there already."""
    if parameter.grad is None:
        return
    if left(parameter.grad, row):
        demand_current(parameter.grad)
        return
    if isinstance(local_part(parameter.grad), LeftView):
        parameter.grad = parameter.grad.clone()  # before what it is a view of is forgotten
    if row.has_gradient:
        row.gradient.used()  # what it stood for was taken from the parameter
    if used_elsewhere(parameter.grad):
        parameter.grad = None
        return
    row.receive(parameter.grad.detach())
    parameter.grad = stand_in(row)


def refresh(rows: Sequence[HostRow]) -> None:
    """Make the masters of rows what they have to be before a step: a parameter that was changed wins over its master.

    The host waits for one number of each parameter, which the device sums up: all of a device in one copy. That comes
    after the copies of the last step, so what those were read from may be written again.
    """
    by_device: dict[torch.device, list[HostRow]] = {}
    for row in rows:
        by_device.setdefault(local_part(row.parameter).device, []).append(row)
    for here in by_device.values():
        for row, bits in zip(here, torch.stack([row.bits() for row in here]).tolist(), strict=True):
            row.refresh(bits)


def step_rows(rows: Sequence[HostRow], worker: Worker) -> None:
    """Step rows whose masters were refreshed, and launch the copies of what they have become."""
    shares = [row.share() for row in rows]
    with device.with_default_device(torch.device("cpu")):
        worker.update(shares)
    for row, share in zip(rows, shares, strict=True):
        row.finish(share.state)


def batches_of(rows: Sequence[HostRow], nbytes: int) -> Iterator[list[HostRow]]:
    """Rows in their order, so many at a time as have ``nbytes`` of masters."""
    batch: list[HostRow] = []
    held = 0
    for row in rows:
        size = bytes_of(row.master)
        if batch and held + size > nbytes:
            yield batch
            batch, held = [], 0
        batch.append(row)
        held += size
    if batch:
        yield batch


def demand_host_room(rows: Sequence[HostRow]) -> None:
    """Raise CapacityError if the rows of accelerators' parameters have no room in host memory."""
    needed = 0
    where: torch.device | None = None
    for row in rows:
        local = local_part(row.parameter)
        if device.is_accelerator(local.device):
            where = local.device
            needed += _host_bytes_of(local.numel(), local.dtype, row.stepped, row.spec, local.shape)
    if where is not None:
        demand_room(
            where,
            needed,
            SwapManager().settings,
            problem="host memory has no room for this optimizer",
            formula="masters, state, and gradients as they arrive and as a sum",
            name="cpu_optimizer",
            remedy="Or use lowtide.swap_optimizer with master='residual', which keeps less there. Nothing was moved.",
        )


def _not_dense(grad: Tensor, name: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "this gradient is not dense",
            expected="a strided gradient",
            got=str(grad.layout),
            where=name,
            remedy="Use a dense gradient (Embedding(sparse=False)), or give this parameter an optimizer of its own.",
        )
    )
