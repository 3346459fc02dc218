"""``cpu_optimizer``: masters, state and gradients in host memory, and the step there too.

Law: parameters, masters and state have the bits that the optimizer inside gives when it steps float32 masters on the
CPU. Gradients leave the device while backward runs, one by one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import device
from lowtide.errors import ConfigError, StateError, UnsupportedError, explain
from lowtide.optim import host_row
from lowtide.optim.gradients import Lanes, Slabs
from lowtide.optim.host_gradient import BesideBackward
from lowtide.optim.host_row import HostRow, Offload, batches_of, demand_host_room, offload, refresh, step_rows
from lowtide.optim.kinds import Kind, StateSpec, kind_of, spec_from_state, spec_of
from lowtide.optim.late import LateSteps
from lowtide.optim.masters import MASTER, choose
from lowtide.optim.stand_in import left, used_elsewhere
from lowtide.optim.tensors import is_sharded, local_part
from lowtide.optim.worker import Worker
from lowtide.optim.wrapper import WrappedOptimizer, counts_on_device

__all__ = ["CpuOptimizer", "CpuOptimizerReport", "cpu_optimizer"]

Tensor = torch.Tensor

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class CpuOptimizerReport:
    """What a :class:`CpuOptimizer` holds in host memory and moves; bytes.

    ``host_bytes`` are in masters, state and gradients now, ``pinned_bytes`` the page-locked blocks that some of it is
    in. ``down_bytes`` are gradients that left the device so far, ``up_bytes`` parameters that came back. The last
    ``step()`` returned before ``late_parameters`` of them were updated.
    """

    parameters: int
    host_bytes: int
    pinned_bytes: int
    down_bytes: int
    up_bytes: int
    steps: int
    late_parameters: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        mib = 1 << 20
        held = f"{self.host_bytes / mib:.1f} MiB of {self.parameters} parameters in host memory"
        moved = f"{self.down_bytes / mib:.1f} MiB down, {self.up_bytes / mib:.1f} MiB up"
        return "\n".join([held, f"{self.steps} steps, {moved}", *self.notes])


class CpuOptimizer(WrappedOptimizer):
    """See :func:`cpu_optimizer`, which makes it."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        master: str | None = "fp32",
        grad_offload: bool = False,
        overlap: bool = False,
    ) -> None:
        _check(master, grad_offload, overlap)
        super().__init__(inner)
        self._master = master
        self._grad_offload = grad_offload
        self._kind, note = kind_of(inner, elementwise=None, where="cpu_optimizer")
        self.notes += [] if note is None else [note]
        self._rows: list[HostRow] = []
        self._by_id: dict[int, HostRow] = {}
        self._lanes = Lanes()
        self._beside = BesideBackward()
        self._slabs: list[Slabs] = []
        # Torch keeps a hook with the parameter, and the parameter may outlive this optimizer.
        self._handles: list[Any] = []
        self._watched: list[tuple[weakref.ref[Tensor], weakref.ref[HostRow]]] = []
        self._unhook = weakref.finalize(self, _remove, self._handles, self._watched)
        self._unhook.atexit = False
        self._late = LateSteps() if overlap else None
        self._half = False  # the last step failed after it had reached some parameters
        self._steps = 0
        states = dict(inner.state)
        self._add(self._plan(range(len(self.param_groups)), states))
        self._import(states)
        inner.state.clear()
        self._take_over()

    # ---- planning ------------------------------------------------------------------------------

    def _plan(self, groups: Sequence[int], states: Mapping[Tensor, Any]) -> list[HostRow]:
        rows = []
        for number in groups:
            group = self.param_groups[number]
            if group.get("capturable"):
                raise _no_capture()
            parameters = group["params"]
            names = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(parameters))]
            for name, parameter in zip(names, parameters, strict=True):
                _demand_whole(parameter, self._kind, name)
                stepped = choose(parameter.dtype, self._master, "exact").stepped or parameter.dtype
                spec = self._spec(number, parameter, stepped, states.get(parameter))
                row = HostRow(
                    parameter, number, name, stepped=stepped, spec=spec, lanes=self._lanes, beside=self._beside
                )
                rows.append(row)
        return rows

    def _spec(self, group: int, parameter: Tensor, stepped: torch.dtype, state: Any) -> StateSpec:
        shape = local_part(parameter).shape
        if state:
            found = spec_from_state(state, parameter.shape, self._kind)
            # What is stepped from now on may have more bits than what was stepped so far.
            arrays = {
                name: (stepped if kind is parameter.dtype else kind, other)
                for name, (kind, other) in found.arrays.items()
                if name != MASTER
            }
            return StateSpec(arrays)
        with device.with_default_device(_HOST):
            return spec_of(self._inner, group, shape, dtype=stepped, where=_HOST, kind=self._kind)

    def _add(self, rows: list[HostRow]) -> None:
        """Take memory and gradients of new rows. Memory of frozen ones is taken when they need it."""
        trainable = [row for row in rows if row.parameter.requires_grad]
        demand_host_room(trainable)
        by_device: dict[torch.device, list[HostRow]] = {}
        for row in trainable:
            by_device.setdefault(local_part(row.parameter).device, []).append(row)
        for where, here in by_device.items():
            self._slabs.append(Slabs(where, expected=sum(row.pinned_bytes for row in here)))
            # The largest first: what is left of its block serves the others.
            for row in sorted(here, key=lambda row: -row.pinned_bytes):
                row.allocate(self._slabs[-1])
        self._rows += rows
        self._by_id.update({id(row.parameter): row for row in rows})
        if self._grad_offload:
            with torch.no_grad():
                for row in trainable:
                    self._hook(row)

    def _added(self) -> None:
        self._add(self._plan([len(self.param_groups) - 1], {}))

    def _hook(self, row: HostRow) -> None:
        """Take the parameter's gradient, if it has one, and every later one when it is there."""
        self._handles.append(row.parameter.register_post_accumulate_grad_hook(Offload(row)))
        self._watched.append((weakref.ref(row.parameter), weakref.ref(row)))
        row.hooked = True
        offload(row, row.parameter)

    # ---- gradients -----------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """See ``torch.optim.Optimizer.zero_grad``; forgets, or makes zeros of, gradients in host memory too."""
        super().zero_grad(set_to_none=set_to_none)
        for row in self._rows:
            if row.has_gradient and row.parameter.grad is None:
                row.forget_gradient()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; for ``grad_offload=True``.

        Effect: torch's formula over the gradients in host memory. The factor is applied by ``step()``. Returns the norm
        before, in host memory. Cost: the host waits until all gradients have arrived, and reads them once.

        Raises:
            UnsupportedError: a parameter is a DTensor: the norm would be of this process's part alone.
            StateError: ``grad_offload=False``: the gradients are where torch's own function finds them.
        """
        if not self._grad_offload:
            raise StateError(
                explain(
                    "these gradients were not offloaded",
                    expected="an optimizer with grad_offload=True",
                    got="grad_offload=False",
                    where="clip_grad_norm_",
                    remedy="Call torch.nn.utils.clip_grad_norm_ with the parameters.",
                )
            )
        with torch.no_grad(), device.with_default_device(_HOST):
            for row in self._rows:
                self._collect(row)  # what was set by hand or dropped since backward
            due = [row for row in self._rows if row.pending]
            for row in due:
                if is_sharded(row.parameter):
                    raise _no_norm(row.name)
            if not due:
                return torch.tensor(0.0)
            kind = float(norm_type)
            # One at a time: only one gradient of 16 bits is held in float32 as well.
            norms = [row.gradient.norm(kind) for row in due]
            total: Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
            factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
            for row in due:
                row.gradient.scale(factor)
            return total

    def _passed(self) -> dict[str, Any]:
        found = super()._passed()
        return {name: value.to("cpu") if isinstance(value, Tensor) else value for name, value in found.items()}

    # ---- one step ------------------------------------------------------------------------------

    def _update(self) -> None:
        self.wait()
        passed = self._passed()
        for row in self._rows:
            self._collect(row)
        due = [row for row in self._rows if row.pending]
        refresh(due)  # and wait for all that reads or writes a parameter
        late = [] if self._late is None else self._late.choose(due)
        later = {id(row) for row in late}
        worker = Worker(self._inner, passed, late=bool(late))
        self._half = True
        try:
            for batch in batches_of([row for row in due if id(row) not in later], host_row.BATCH_BYTES):
                step_rows(batch, worker)
        finally:
            for lane in self._lanes.all():
                lane.end()
        if late and self._late is not None:
            self._late.begin(late, worker, self._lanes)
        else:
            self._half = False
            changes = worker.carry_back()
            if due and self._late is not None:
                self._late.learn(changes_groups=changes)
        self._steps += 1

    def wait(self) -> None:
        """Wait for the step that goes on beside the loop; for ``overlap=True``, else there is none.

        Needed before what reads parameters in a way that torch lets nobody override, such as ``torch.tensor(p)`` or the
        replay of a captured graph; docs/cpu-optimizer.md lists them.

        Raises:
            StateError: that step failed. The parameters that it did not reach are as before, and those of their
                gradients that were not set to None wait for the next ``step()``.
        """
        if self._late is not None and self._late.goes_on:
            self._late.end()
            self._half = False

    def _collect(self, row: HostRow) -> None:
        parameter = row.parameter
        if not self._grad_offload:
            if row.has_gradient:
                row.gradient.used()
            if parameter.grad is not None and not (self._half and row.reached and row.was_fetched):
                row.fetch()
            return
        if not row.hooked and parameter.requires_grad:  # it was frozen until now
            self._hook(row)
        if parameter.grad is None:
            if row.has_gradient:
                row.forget_gradient()
        elif used_elsewhere(parameter.grad) and not left(parameter.grad, row):
            raise _used_by_another(row.name)
        else:
            offload(row, parameter)

    # ---- state ---------------------------------------------------------------------------------

    def _with_state(self) -> list[Tensor]:
        self.wait()
        return [row.parameter for row in self._rows if row.has_state]

    @torch.no_grad()
    def _export(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, dict[str, Any]]]:
        self.wait()
        rows = [self._by_id[id(parameter)] for parameter in parameters]
        refresh([row for row in rows if row.has_master])
        return [(row.parameter, row.export()) for row in rows]

    @torch.no_grad()
    def _import(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self.wait()
        for row in self._rows:
            row.take(states.get(row.parameter))

    def _accepts(self, parameter: Tensor, name: str, value: Any) -> str | None:
        return self._by_id[id(parameter)].accepts(name, value)

    def _keywords(self) -> dict[str, Any]:
        return {"master": self._master, "grad_offload": self._grad_offload, "overlap": self._late is not None}

    @torch.no_grad()
    def unwrap(self) -> torch.optim.Optimizer:
        """The plain optimizer, with all state on the device again, and gradients that were not used. Masters are lost.

        Cost: the bytes of state and gradients on the device.
        """
        self.wait()
        inner = self._inner
        for row in self._rows:
            where = local_part(row.parameter).device
            on_device = counts_on_device(self.param_groups[row.group])
            state = {name: value for name, value in row.export().items() if name != MASTER}
            if state:
                inner.state[row.parameter] = {
                    name: value.to(where) if isinstance(value, Tensor) and (value.dim() or on_device) else value
                    for name, value in state.items()
                }
            if self._grad_offload:
                row.give_back()
        self._unhook()
        return self._let_go()

    def report(self) -> CpuOptimizerReport:
        """What is held and moved, in bytes; costs no synchronisation."""
        lanes = self._lanes.all()
        return CpuOptimizerReport(
            parameters=len(self._rows),
            host_bytes=sum(row.host_bytes for row in self._rows),
            pinned_bytes=sum(slabs.pinned_bytes for slabs in self._slabs),
            down_bytes=sum(lane.down_bytes for lane in lanes),
            up_bytes=sum(lane.up_bytes for lane in lanes),
            steps=self._steps,
            late_parameters=0 if self._late is None else self._late.count,
            notes=(*self.notes, *(() if self._late is None else self._late.notes)),
        )


def _remove(handles: list[Any], watched: list[tuple[weakref.ref[Tensor], weakref.ref[HostRow]]]) -> None:
    """Take hooks off, and gradients whose elements are gone."""
    for handle in handles:
        handle.remove()
    for parameter, row in ((of_parameter(), of_row()) for of_parameter, of_row in watched):
        if parameter is not None and left(parameter.grad, row):
            parameter.grad = None
    handles.clear()
    watched.clear()


def cpu_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    master: str | None = "fp32",
    grad_offload: bool = False,
    overlap: bool = False,
) -> CpuOptimizer:
    """Keep an optimizer's masters, state and gradients in host memory, and step there.

    Effect: returns an optimizer over the same parameters and the same ``param_groups``, for schedulers, checkpoints and
    loops as they are. Of all that training holds, the device keeps the parameters alone: each gradient is copied to
    host memory as soon as backward has it, and its memory is free again; ``step()`` updates on the host and copies the
    parameters back. ``optimizer`` itself refuses further use. Several backwards a step are added up on the host in
    float32: more exact than autograd's sum of 16 bits, and for one backward the same. ``step()`` uses gradients up.

    Cost: each gradient goes down once a backward and each parameter up once a step. The host does the arithmetic: give
    classes that have it ``fused=True``, several times as fast there as their loops. From the second backward of a step
    on, the host also adds: a thread does, while backward goes on. Beside the parameters the device holds the gradients
    that are on their way, 64 MiB or one of them. Host memory for AdamW: up to 18 bytes an element of 16 bits, 20 of 32.

    On the CPU the result has the bits of the same loop with separate float32 masters. Under an accelerator it has not
    the bits of a step there, which :func:`lowtide.swap_optimizer` has: other kernels.

    With ``grad_offload=True``, after a gradient has left, ``parameter.grad`` stands in for it: the same shape, type and
    device, no memory there. Clipping, ``GradScaler``, ``zero_grad`` of the optimizer or of the model,
    DistributedDataParallel and FSDP2 use it as any other; norms are of the float32 sums. Others get a device copy.

    Hazard: a function that reads such a gradient makes the host wait. After ``step()`` it is used up, and reading it
    raises. Editing a parameter makes its master anew for the edited elements. With ``overlap=True``, what torch lets
    nobody override (``torch.tensor(p)``, scripted functions, the replay of a captured graph) reads what is there at the
    moment: it needs :meth:`CpuOptimizer.wait` first; and a step that fails raises where what it did not reach is used.

    Args:
        optimizer: an instance of a ``torch.optim`` optimizer, before or after its first step. Its state moves over.
        master: ``"fp32"``: parameters of 16 bits are stepped through a float32 master. None: in their own type.
        grad_offload: whether gradients leave the device in backward. False: they stay in ``parameter.grad`` until
            ``step()``, for a loop that computes much with them.
        overlap: ``step()`` returns when it is known what will be stepped; a thread steps, and who uses a parameter
            waits for it. Not the first step, nor parameters that could be read unasked, which are counted.

    Raises:
        ConfigError: an argument has a wrong value.
        UnsupportedError: the class cannot be taken apart (see :func:`lowtide.swap_optimizer`), or is ``capturable``; in
            backward: a sparse gradient.
        CapacityError: host memory has no room; nothing was moved.
        StateError: what was given is no plain optimizer.

    >>> import torch
    >>> from lowtide.optim.cpu import cpu_optimizer
    >>> layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    >>> optimizer = cpu_optimizer(torch.optim.AdamW(layer.parameters(), fused=True), grad_offload=True)
    >>> layer(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    >>> layer.weight.grad
    LeftGradient(parameter 0 of group 0, shape=(64, 64), dtype=torch.bfloat16)
    >>> float(torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)) > 1
    True
    >>> optimizer.step()
    >>> optimizer.report().up_bytes
    8320
    """
    return CpuOptimizer(optimizer, master=master, grad_offload=grad_offload, overlap=overlap)


def _check(master: object, grad_offload: object, overlap: object) -> None:
    if master is not None and master != "fp32":
        raise _wrong("master", "'fp32' or None", master)
    for name, value in (("grad_offload", grad_offload), ("overlap", overlap)):
        if not isinstance(value, bool):
            raise _wrong(name, "True or False", value)


def _wrong(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        explain(
            f"{name} has no such value", expected=expected, got=repr(got), where="cpu_optimizer", remedy="Correct it."
        )
    )


def _demand_whole(parameter: Tensor, kind: Kind, name: str) -> None:
    if is_sharded(parameter) and kind is Kind.WHOLE_TENSOR:
        raise UnsupportedError(
            explain(
                "an optimizer of whole tensors cannot step a part of one",
                expected="parameters that are not sharded, or an elementwise optimizer",
                got="a DTensor",
                where=name,
                remedy="Leave this optimizer as it is.",
            )
        )


def _no_capture() -> UnsupportedError:
    return UnsupportedError(
        explain(
            "a step on the host is not part of a device graph",
            expected="capturable=False",
            got="capturable=True",
            where="cpu_optimizer",
            remedy="Make the optimizer without it.",
        )
    )


def _no_norm(name: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "the norm of gradients in host memory is that of this process's part alone",
            expected="parameters that are not sharded",
            got="a DTensor",
            where=name,
            remedy="Call torch.nn.utils.clip_grad_norm_ with the parameters: it reduces the norm.",
        )
    )


def _used_by_another(name: str) -> StateError:
    return StateError(
        explain(
            "another optimizer has used this gradient up",
            expected="one optimizer that gradients leave for",
            got="two over the same parameter",
            where=name,
            remedy="Use cpu_optimizer(..., grad_offload=False) for both, or a backward of its own for each step.",
        )
    )
