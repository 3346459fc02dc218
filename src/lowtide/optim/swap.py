"""``swap_optimizer``: state and masters on the lower tier, on the device only while they are stepped (O1-O3, P1).

Law: after N steps the parameters, the masters and the state have the bits that
the optimizer inside would have given them; only where they lie differs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from lowtide import device
from lowtide.errors import ConfigError, StateError, TierError, UnsupportedError, explain
from lowtide.optim import residual
from lowtide.optim.carry import Place, export_states, import_states, kept_bytes
from lowtide.optim.kinds import Kind, StateSpec, kind_of, spec_from_state, spec_of
from lowtide.optim.layout import Layout, plan
from lowtide.optim.masters import MASTER, choose
from lowtide.optim.parameter import SteppedParameter
from lowtide.optim.pipeline import walk
from lowtide.optim.segment import HeldSegment
from lowtide.optim.stepping import update_segment
from lowtide.optim.surroundings import Surroundings
from lowtide.optim.tensors import Scratch, is_sharded, local_part
from lowtide.optim.times import StepTimes, Stopwatch, tier_rates
from lowtide.optim.worker import Worker
from lowtide.optim.wrapper import WrappedOptimizer, counts_on_device
from lowtide.residency.manager import SwapManager
from lowtide.residency.pool import size_class
from lowtide.residency.room import demand_room

__all__ = ["SwapOptimizer", "SwapOptimizerReport", "swap_optimizer"]

Tensor = torch.Tensor

_MASTERS = (None, "fp32", "residual")
_TIERS = (None, "host", "file", "device")


@dataclass(frozen=True)
class SwapOptimizerReport:
    """What a :class:`SwapOptimizer` holds and moves; bytes.

    ``window_bytes`` is the most that ``step()`` may have on the device, ``peak_bytes`` the most that the last one had.
    ``kept_bytes`` stays on the device: state that was not to move or that the class made outside of the plan.
    """

    segments: int
    buckets: int
    bucket_bytes: int
    window_bytes: int
    moving_bytes: int
    kept_bytes: int
    peak_bytes: int
    loaded_bytes: int
    stored_bytes: int
    steps: int
    ahead_bytes: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        mib = 1 << 20
        lines = [
            f"{self.moving_bytes / mib:.1f} MiB in {self.segments} segments move, {self.kept_bytes / mib:.1f} MiB stay",
            f"{self.buckets} buckets of {self.bucket_bytes / mib:.1f} MiB",
            f"in the last step {self.peak_bytes / mib:.1f} of {self.window_bytes / mib:.1f} MiB were on the device",
            f"{self.steps} steps, {self.loaded_bytes / mib:.1f} MiB in, {self.stored_bytes / mib:.1f} MiB out",
            *([f"{self.ahead_bytes / mib:.1f} MiB began to come in backward"] if self.ahead_bytes else []),
            *self.notes,
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Settings:
    """What :func:`swap_optimizer` was asked for; its arguments by their names."""

    swap_times: int
    bucket_bytes: int | None
    state: frozenset[str] | None
    master: str | None
    residual_mode: residual.Mode
    tier: str | None
    elementwise: bool | None
    overlap: bool

    def __post_init__(self) -> None:
        for name in ("swap_times", "bucket_bytes"):
            value = getattr(self, name)
            if name == "bucket_bytes" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _wrong(name, "a number of 1 or more", value)
        for name, choices in (("master", _MASTERS), ("residual_mode", get_args(residual.Mode)), ("tier", _TIERS)):
            if getattr(self, name) not in choices:
                raise _wrong(name, f"one of {', '.join(map(repr, choices))}", getattr(self, name))
        if self.overlap and self.tier == "device":
            raise _wrong("overlap", "a tier to which something moves", "overlap=True with tier='device'")


class SwapOptimizer(WrappedOptimizer):
    """See :func:`swap_optimizer`, which makes it."""

    def __init__(self, inner: torch.optim.Optimizer, settings: _Settings) -> None:
        super().__init__(inner)
        self._settings = settings
        self._kind, note = kind_of(inner, elementwise=settings.elementwise, where="swap_optimizer")
        self.notes += [] if note is None else [note]
        self._parameters: list[SteppedParameter] = []
        self._by_id: dict[int, SteppedParameter] = {}
        # A segment knows the parameters of its pieces; where a parameter's pieces lie is known here, so that nothing
        # that holds bytes is part of a cycle.
        self._segments: list[HeldSegment] = []
        self._places: dict[int, list[Place]] = {}
        self._layouts: list[Layout] = []
        self._half: _HalfStep | None = None
        self._around = Surroundings() if settings.overlap else None
        self._watch: Stopwatch | None = None
        self._steps = self._loaded = self._stored = self._peak = 0
        states = dict(inner.state)
        planned = [p for number in range(len(self.param_groups)) for p in self._plan_group(number, states)]
        if not any(parameter.arrays for parameter in planned):
            raise _nothing_moves(settings.state, inner)
        self._lay_out(planned)
        self._import(states)
        inner.state.clear()
        self._take_over()

    # ---- planning ------------------------------------------------------------------------------

    def _plan_group(self, number: int, states: Mapping[Tensor, Any]) -> list[SteppedParameter]:
        """What is to be known of a group's parameters; nothing is kept of it before there is room for all."""
        group = self.param_groups[number]
        names = group.get("param_names") or [f"parameter {i} of group {number}" for i in range(len(group["params"]))]
        planned = []
        for name, parameter in zip(names, group["params"], strict=True):
            masters = choose(parameter.dtype, self._settings.master, self._settings.residual_mode)
            self._check_parameter(parameter, name)
            spec = self._spec(number, parameter, masters.stepped or parameter.dtype, states.get(parameter))
            moving = frozenset(spec.arrays) if self._settings.state is None else self._settings.state
            cut = self._kind is Kind.ELEMENTWISE
            planned.append(
                SteppedParameter(parameter, number, name, spec=spec, moving=moving, masters=masters, cut=cut)
            )
        return planned

    def _check_parameter(self, parameter: Tensor, name: str) -> None:
        if self._settings.master == "residual" and parameter.dtype is torch.float16:
            raise UnsupportedError(
                explain(
                    "a residual of 16 bits completes bfloat16 alone",
                    expected="bfloat16 parameters",
                    got="float16",
                    where=name,
                    remedy="Use master='fp32', or bfloat16 parameters.",
                )
            )
        if is_sharded(parameter) and self._kind is Kind.WHOLE_TENSOR:
            raise UnsupportedError(
                explain(
                    "an optimizer of whole tensors cannot step a part of one",
                    expected="parameters that are not sharded, or an elementwise optimizer",
                    got="a DTensor",
                    where=name,
                    remedy="Leave this optimizer as it is, or say elementwise=True if it is.",
                )
            )

    def _spec(self, group: int, parameter: Tensor, dtype: torch.dtype, state: Any) -> StateSpec:
        if state:
            return spec_from_state(state, parameter.shape, self._kind)
        local = local_part(parameter)
        return spec_of(self._inner, group, local.shape, dtype=dtype, where=local.device, kind=self._kind)

    def _lay_out(self, parameters: Sequence[SteppedParameter]) -> None:
        """Give the pieces of ``parameters`` segments of their own, after those that are there."""
        by_device: dict[torch.device, list[SteppedParameter]] = {}
        for parameter in parameters:
            by_device.setdefault(local_part(parameter.parameter).device, []).append(parameter)
        found: list[tuple[torch.device, list[SteppedParameter], Layout]] = []
        for where, here in by_device.items():
            demands = [p.demand(i) for i, p in enumerate(here)]
            layout = plan(
                demands,
                swap_times=self._settings.swap_times,
                bucket_bytes=self._settings.bucket_bytes,
                moves=self._settings.tier != "device",
            )
            self._demand_room(where, layout)
            found.append((where, here, layout))
        for where, here, layout in found:
            for segment in layout.segments:
                owners = [here[piece.parameter] for piece in segment.pieces]
                name = f"optimizer segment {len(self._segments)}"
                held = HeldSegment(segment, owners, where, name, tier=self._settings.tier)
                self._segments.append(held)
                for i, piece in held.numbered():
                    self._places.setdefault(id(here[piece.parameter]), []).append((held, i))
            self._layouts.append(layout)
        self._parameters += parameters
        self._by_id.update({id(parameter.parameter): parameter for parameter in parameters})
        if self._around is not None:
            self._around.arrivals.watch(parameter.parameter for parameter in parameters)

    def _demand_room(self, where: torch.device, layout: Layout) -> None:
        accelerator = device.is_accelerator(where)
        tier = self._settings.tier
        if tier == "host" and not accelerator:
            raise UnsupportedError(
                explain(
                    "host memory is where these parameters are",
                    expected="tier='file' on a machine without an accelerator",
                    got=f"tier='host' for {where}",
                    where="swap_optimizer",
                    remedy="Leave tier out.",
                )
            )
        if tier == "device":
            return
        sizes = [s.nbytes for s in layout.segments]
        on_host = accelerator and tier != "file"
        taken = sum(device.pinned_footprint(size_class(n), where) for n in sizes) if on_host else sum(sizes)
        demand_room(
            where if on_host else torch.device("cpu"),
            taken,
            SwapManager().settings,
            problem="the lower tier has no room for the optimizer's state",
            formula=f"{layout.nbytes} bytes of state in {len(sizes)} segments, as the lower tier rounds them up,",
            name="swap_optimizer",
            remedy="Or move less of it (state=...), or use master='residual'. Nothing was moved.",
        )

    def _added(self) -> None:
        self._lay_out(self._plan_group(len(self.param_groups) - 1, {}))

    # ---- one step ------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """See ``torch.optim.Optimizer.zero_grad``; what was loaded ahead for these gradients leaves again."""
        if self._around is not None:
            self._around.take_back()
        super().zero_grad(set_to_none=set_to_none)

    def _update(self) -> None:
        self._settle()
        grads: dict[int, Tensor] = {}
        for parameter in self._parameters:
            grad = parameter.gradient()
            if grad is not None:
                grads[id(parameter)] = grad
        done = self._half.done(self._parameters) if self._half is not None else set()
        self._half = None
        due = [s for s in self._segments if id(s) not in done and any(id(owner) in grads for owner in s.owners)]
        if self._around is not None:
            self._around.take_back(due)
            due.sort(key=lambda segment: not segment.is_arriving)  # they have their place in the window already
        worker, scratch = Worker(self._inner, self._passed()), Scratch()
        loaded = sum(s.nbytes for s in due if not s.is_resident and not s.is_empty)

        def update(segment: HeldSegment) -> None:
            with contextlib.nullcontext() if self._watch is None else self._watch.lap(segment):
                update_segment(segment, worker, grads, scratch)
            done.add(id(segment))

        try:
            self._peak, behind = walk(due, self._window, update, lingers=self._around is not None)
        except BaseException:
            self._half = _HalfStep(done, self._parameters)
            raise
        if self._watch is not None:
            self._watch.end()
        worker.carry_back()
        if self._around is not None:
            self._around.stepped(due, self._window, behind)
        self._steps += 1
        self._loaded += loaded
        self._stored += sum(s.nbytes for s in due if not s.is_resident)
        self._raise_failures(due)

    def timed_step(self) -> StepTimes:
        """One ``step()``, and where its time went: for each bucket the link's, the update's, and what was exposed.

        Cost: a probe of the link (under a second), and the host waits for the step.
        """
        where = list(dict.fromkeys(segment.device for segment in self._segments))
        rates = {one: tier_rates(one, self._settings.tier) for one in where}
        watch = self._watch = Stopwatch(where)
        try:
            self.step()
        finally:
            self._watch = None
        return watch.times(max(layout.bucket_bytes for layout in self._layouts), rates.__getitem__)

    def _settle(self) -> None:
        if self._around is not None:
            self._around.settle()

    @property
    def _window(self) -> int:
        return max((layout.window_bytes for layout in self._layouts), default=0)

    def _raise_failures(self, stepped: Sequence[HeldSegment]) -> None:
        failed = [segment for segment in stepped if segment.failure is not None]
        if not failed:
            return
        cause = failed[0].failure
        for segment in failed:
            segment.failure = None
        raise TierError(
            explain(
                "the step was made, but its state found no room on the lower tier",
                expected=f"room for {sum(s.nbytes for s in failed)} bytes",
                got=str(cause),
                where=", ".join(s.name for s in failed),
                remedy="This state stays on the device and every later step tries again: make room and go on with "
                "zero_grad(); do not call step() twice for these gradients.",
            )
        ) from cause

    # ---- state ---------------------------------------------------------------------------------

    def _with_state(self) -> list[Tensor]:
        # As in torch, a class that keeps nothing for a parameter has no entry for it.
        return [
            p.parameter
            for p in self._parameters
            if any(s.states[i] or (s.states[i] is not None and p.masters.arrays) for s, i in self._places[id(p)])
        ]

    def _export(self, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        self._settle()
        planned = [self._by_id[id(parameter)] for parameter in parameters]
        if self._half is not None or any(
            segment.states[i] is None for p in planned for segment, i in self._places[id(p)]
        ):
            raise StateError(
                explain(
                    "the last step ended with an error half way",
                    expected="a step that was made",
                    got="some of its pieces stepped",
                    where="state_dict",
                    remedy="Call step() again with the same gradients: it goes on where it stopped.",
                )
            )
        return export_states([(one, self._places[id(one)]) for one in planned])

    def _import(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._settle()
        import_states(self._segments, states, self.param_groups)
        self._half = None

    def _accepts(self, parameter: Tensor, name: str, value: Any) -> str | None:
        return self._by_id[id(parameter)].accepts(name, value)

    def _keywords(self) -> dict[str, Any]:
        return {"settings": self._settings}

    def unwrap(self) -> torch.optim.Optimizer:
        """The plain optimizer, with all state on the device again. Masters are lost: it steps the parameters.

        From then on this one refuses every use. Cost: the bytes of the state on the device.
        """
        inner = self._inner
        for parameter, state in self._export(self._with_state()):
            where = local_part(parameter).device
            on_device = counts_on_device(self.param_groups[self._by_id[id(parameter)].group])
            inner.state[parameter] = {
                name: value.to(where) if isinstance(value, Tensor) and (value.dim() or on_device) else value
                for name, value in state.items()
                if name != MASTER
            }
        if self._around is not None:
            self._around.arrivals.stop()
        for segment in self._segments:
            segment.forget()
        return self._let_go()

    def report(self) -> SwapOptimizerReport:
        """What is held and moved, in bytes; costs no synchronisation."""
        return SwapOptimizerReport(
            segments=len(self._segments),
            buckets=sum(layout.buckets for layout in self._layouts),
            bucket_bytes=max(layout.bucket_bytes for layout in self._layouts),
            window_bytes=self._window,
            moving_bytes=sum(s.nbytes for s in self._segments if not s.is_resident),
            kept_bytes=kept_bytes(self._segments) + sum(s.nbytes for s in self._segments if s.is_resident),
            peak_bytes=self._peak,
            loaded_bytes=self._loaded,
            stored_bytes=self._stored,
            steps=self._steps,
            ahead_bytes=0 if self._around is None else self._around.ahead_bytes,
            notes=(*self.notes, *(() if self._around is None else self._around.notes)),
        )


class _HalfStep:
    """A step that ended with an error: which segments have made it, and with which gradients."""

    def __init__(self, segments: set[int], parameters: Sequence[SteppedParameter]) -> None:
        self._segments = segments
        grads = [p.parameter.grad for p in parameters]
        self._grads = [None if grad is None else (weakref.ref(grad), grad._version) for grad in grads]

    def done(self, parameters: Sequence[SteppedParameter]) -> set[int]:
        """These segments, if the gradients are still the same ones; else none: another step begins."""
        for parameter, known in zip(parameters, self._grads, strict=False):
            grad = parameter.parameter.grad
            if known is None and grad is None:
                continue
            if known is None or grad is None or known[0]() is not grad or known[1] != grad._version:
                return set()
        return set(self._segments)


def swap_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    swap_times: int = 16,
    bucket_bytes: int | None = None,
    state: Iterable[str] | None = None,
    master: str | None = None,
    residual_mode: residual.Mode = "exact",
    tier: str | None = None,
    elementwise: bool | None = None,
    overlap: bool = False,
) -> SwapOptimizer:
    """Keep an optimizer's state on the lower tier outside of ``step()`` (O1-O3).

    Effect: returns an optimizer over the same parameters and the same ``param_groups``, for schedulers, clipping,
    scalers, checkpoints. Outside of ``step()`` its state lies in pinned host memory (on a machine without an
    accelerator, in a file). ``step()`` walks it in segments: one is updated, the next come in, the last go out.
    Parameters, masters and state have the bits of the plain optimizer. ``optimizer`` itself refuses further use.

    Cost: each byte that moves crosses the link once in each direction a step. On the device during a step: at most two
    buckets, where a bucket is the bytes that move divided by ``swap_times``, and what the class itself allocates for
    one segment (at most 64 MiB of state, or one tensor of a class that cannot be cut).

    Hazard: editing a parameter that has a master makes the master anew from it: for the edited elements, or, where more
    than half of a piece (up to 64 MiB of state) was edited and with ``master="residual"``, for the whole piece.

    Args:
        optimizer: an instance of any ``torch.optim`` optimizer, before or after its first step. Its state moves over.
        swap_times: buckets a step. Larger: smaller buckets, a lower peak, less overlap.
        bucket_bytes: the bytes of a bucket instead.
        state: which of the state's arrays move, by name (``("exp_avg", "exp_avg_sq")``); None: all.
        master: ``"fp32"``: parameters of 16 bits are stepped through a float32 master that moves with the state;
            ``"residual"``: bfloat16 ones through two bytes that complete them. None: they are stepped themselves.
        residual_mode: ``"exact"``, ``"saturate"`` or ``"half_away"``, see :mod:`lowtide.optim.residual`.
        tier: ``"file"``: in a file, under an accelerator through pinned host memory that a bucket or two needs;
            ``"host"`` insists on host memory; ``"device"``: nothing moves, for a residual alone. None: the tier below
            the parameters' device.
        elementwise: whether the class treats each element by itself; needed for classes that torch does not bring.
        overlap: whether the first loads begin in the second half of backward, and the last stores end in the next
            forward. Costs up to two buckets there beside what else is on the device.

    Raises:
        ConfigError: an argument has a wrong value, or nothing would move.
        UnsupportedError: the class cannot be taken apart (LBFGS, sparse gradients, ``differentiable=True``, parameters
            that depend on each other), or ``tier="host"`` without an accelerator.
        CapacityError: the lower tier has no room; nothing was moved.
        StateError: what was given is no plain optimizer.

    >>> import torch, lowtide
    >>> layer = torch.nn.Linear(64, 64)
    >>> optimizer = lowtide.swap_optimizer(torch.optim.AdamW(layer.parameters()), swap_times=4)
    >>> layer(torch.ones(2, 64)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.report().moving_bytes
    33280
    """
    moving = None if state is None else frozenset(state)
    settings = _Settings(swap_times, bucket_bytes, moving, master, residual_mode, tier, elementwise, overlap)
    return SwapOptimizer(optimizer, settings)


def _wrong(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(
        explain(
            f"{name} has no such value", expected=expected, got=repr(got), where="swap_optimizer", remedy="Correct it."
        )
    )


def _nothing_moves(names: frozenset[str] | None, inner: torch.optim.Optimizer) -> ConfigError:
    wanted = "state" if names is None else f"state called {', '.join(sorted(names))}"
    return ConfigError(
        explain(
            "nothing would move",
            expected=f"an optimizer with {wanted}, or parameters of 16 bits with master='fp32' or 'residual'",
            got=f"{type(inner).__name__}, which keeps none",
            where="swap_optimizer",
            remedy="Use the optimizer as it is.",
        )
    )
