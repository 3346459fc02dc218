"""A region: one wrapped module or function, and what one call of it does.

Law: a region that raises leaves no mode, hook, tape or held tensor behind; with
gradients off it is a plain call; a region inside of another shares its tape
(one tape, a stack of answers), unless the outer one only swaps and so records
nothing.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lowtide import device
from lowtide.activations import call_mode
from lowtide.activations.answers import Answers, CheckpointFrame, SwapFrame
from lowtide.activations.function_node import install
from lowtide.activations.links import Place, count_missed, main_input, plain_parts, tensors_of
from lowtide.activations.recorder import Recorder
from lowtide.activations.replay import unpack
from lowtide.activations.stow import account, stow
from lowtide.activations.tape import Tape
from lowtide.errors import LowtideWarning, UnsupportedError, explain
from lowtide.policy import PolicyFn, TensorPolicyFn
from lowtide.report.counters import RegionRow
from lowtide.residency.eligibility import NO_SCHEDULE
from lowtide.residency.manager import SwapManager, Visit, ask_for_open_visit

__all__ = ["Region", "notify_on_backward", "open_tape", "stow_open_tapes"]


class _Local(threading.local):
    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.open: list[tuple[Tape, RegionRow]] = []


_local = _Local()
install(lambda: _local.tape)


def open_tape() -> Tape | None:
    """The tape of the region that is open on this thread, or None."""
    tape = _local.tape
    return None if tape is None or tape.closed else tape


def _open_visit() -> Visit | None:
    # Its tape is closed already when what it keeps is handed to the residency.
    tape = _local.tape
    return None if tape is None else tape.visit


ask_for_open_visit(_open_visit)

# More than this share of opaque bytes makes recompute="auto" choose the call mode.
_OPAQUE_SHARE = 0.1


def notify_on_backward(out: Any, callback: Callable[[], None]) -> None:
    """Call back once when backward first reaches any of the outputs."""
    leaves = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn is not None]
    if leaves:
        register_multi_grad_hook(leaves, lambda _grad: callback(), mode="any")


def stow_open_tapes() -> None:
    """A chained layer ends inside of open regions: what they saved in it belongs to it."""
    for tape, row in _local.open:
        if not tape.recording:
            _file(tape, row, None, stow(tape, row, None))


def _file(tape: Tape, row: RegionRow, visit: Visit | None, storage: Any) -> None:
    if storage is None:
        return
    storage.count_in(row)
    tape.swapped.append(storage)
    filed = SwapManager().file_under(storage, visit)
    if filed is not None:
        tape.reach(filed)
        for tensor in storage.tensors:
            tensor.visit = tensor.visit or filed


class Region:
    """The settings of one wrap, and the counters of its calls."""

    def __init__(
        self,
        name: str,
        kind: str,
        policy: PolicyFn | TensorPolicyFn | None,
        *,
        swap_inputs: bool = False,
        recompute: str = "auto",
        certify: int = 0,
    ) -> None:
        self.name = name
        self.kind = kind
        self.policy = policy
        self.swap_inputs = swap_inputs
        self.recompute = recompute
        self.certify = certify
        self.row = RegionRow(name, kind)
        self.counts_calls = True  # False where another region's row is used
        self.place: Place | None = None  # in a chunk of layers of which only the first one's input is kept
        self.hazards: list[str] = []  # what running the module's Python twice would change
        self._certified: dict[Any, int] = {}
        self._runs_again = recompute == "call"
        selective = kind == "checkpoint" and policy is not None
        self.graph_contexts = call_mode.graph_contexts(policy, name) if selective and policy is not None else None

    def settings(self) -> tuple[Any, ...]:
        """What makes two wraps the same."""
        return (self.kind, self.policy, self.swap_inputs, self.recompute, self.certify)

    def fresh(self) -> Region:
        """The same wrap with counters of its own, for a copy of the module."""
        made = Region.__new__(Region)
        made.__setstate__(self.__getstate__())
        return made

    def look_for_hazards(self, module: Any) -> None:
        """Call mode re-runs Python: look for what that would change, and say so where it is asked for."""
        self.hazards = call_mode.state_that_moves_twice(module)
        if self.hazards and self.recompute == "call":
            warnings.warn(
                f"{self.name} is wrapped with recompute='call', which runs its Python twice, and it contains "
                f"{', '.join(self.hazards)}: training will differ. Use recompute='replay'.",
                LowtideWarning,
                stacklevel=4,
            )

    def rename(self, name: str) -> None:
        """Use the fully qualified name once it is known."""
        self.name = self.row.name = name

    def __getstate__(self) -> dict[str, Any]:
        keys = ("name", "kind", "policy", "swap_inputs", "recompute", "certify", "hazards", "place")
        return {key: getattr(self, key) for key in keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        hazards, place = state.pop("hazards"), state.pop("place")
        self.__init__(**state)  # type: ignore[misc]
        self.hazards, self.place = hazards, place

    def _frame(self) -> CheckpointFrame | SwapFrame:
        if self.kind == "swap":
            return SwapFrame(self.name, self.policy)
        return CheckpointFrame(self.name, self.policy, swap_inputs=self.swap_inputs)

    # ---- one call -----------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``fn`` as this region. Not to be traced: a compiler comes through :func:`lower_to_checkpoint`."""
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if call_mode.is_running_again():
            return fn(*args, **kwargs)
        if self._runs_again:
            if self.place is not None:
                self.row.note("it runs again as a whole (recompute='call'), so it keeps its own input.")
            return call_mode.run_again(self, fn, args, kwargs)
        tape = _local.tape
        if tape is not None and not tape.closed and (tape.recording or self.kind == "swap"):
            self.row.calls += 1
            self.row.note("it runs inside of another region, which counts its bytes.")
            tape.answers.push(self._frame())
            try:
                return fn(*args, **kwargs)
            finally:
                tape.answers.pop()
        return self._run_outermost(tape, fn, args, kwargs)

    def run_with_swapped_inputs(self, checkpointed: Callable[..., Any], tensors: list[Any]) -> Any:
        """In call mode, what ``torch.utils.checkpoint`` keeps of its inputs is moved by a swap-only region."""
        inputs = Region(self.name, "swap", None)
        inputs.row = self.row
        inputs.counts_calls = False
        return inputs.run(checkpointed, tensors, {})

    def _run_outermost(self, outer: Tape | None, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        manager = SwapManager()
        tape = self._new_tape(outer, args, kwargs)
        owner = getattr(fn, "__self__", None)
        tape.module = weakref.ref(owner) if isinstance(owner, torch.nn.Module) else None
        tape.place = self.place if tape.recording else None
        # Behind the first layer of a chunk nothing is there to move, as a rule: no turn for it in the learned order.
        inner = self.place is not None and self.place.index > 0
        if inner and tape.recording:
            tape.main = main_input((args, kwargs))
        tape.visit = manager.begin_visit() if manager.learns_here and not inner else None
        if tape.visit is not None or manager.is_scheduled:
            _refuse_capture(self.name)
        _local.tape = tape
        _local.open.append((tape, self.row))
        if self.counts_calls:
            self.row.start_call()
        try:
            with saved_tensors_hooks(tape.pack, unpack):
                if tape.recording:
                    with Recorder(tape):
                        out = fn(*args, **kwargs)
                else:
                    out = fn(*args, **kwargs)
            self._finish(tape, out)
        except BaseException:
            tape.abandon()
            raise
        finally:
            _local.tape = outer
            _local.open.pop()
        return out

    def _new_tape(self, outer: Tape | None, args: Any, kwargs: Any) -> Tape:
        answers = Answers(outer.answers.swap if outer is not None else None)
        answers.push(self._frame())
        tape = Tape(self.name, answers, recording=self.kind == "checkpoint", certify=self._certifies(args, kwargs))
        if self.kind == "swap":
            tape.spill = self._spill
            tape.spill_bytes = SwapManager().in_flight_bytes
        return tape

    def _finish(self, tape: Tape, out: Any) -> None:
        manager = SwapManager()
        # A tape of which autograd holds nothing is gone in a moment, and what it offers with it.
        if tape.place is not None and tape.place.offers and any(value.live > 0 for value in tape.packed):
            tape.offer(part for tensor in tensors_of(out) for part in plain_parts(tensor))
        needed, dead = tape.close()
        storage = stow(tape, self.row, needed)
        if storage is not None and tape.visit is None and manager.learns_here:
            tape.visit = manager.begin_visit()
        visit = tape.visit  # the last one, where the region has spilled
        _file(tape, self.row, visit, storage)
        account(self.row, needed, dead)
        if tape.place is not None:
            missed, tape.missed = tape.missed, []
            count_missed(missed, self.row, linked=bool(tape.linked))
        if visit is not None:
            manager.end_visit(visit)
            if visit.nbytes:
                notify_on_backward(out, visit.reached)
        if NO_SCHEDULE in self.row.refused:
            manager.warn_of_no_schedule()
        if self.row.opaque_bytes and self.recompute == "auto" and self.kind == "checkpoint":
            self._choose_mode(tape)

    def _spill(self, tape: Tape) -> None:
        """More waits to leave than may be in flight: do not wait for the region's end."""
        manager = SwapManager()
        visit = tape.visit
        if visit is None and not manager.is_scheduled:
            return
        _file(tape, self.row, visit, stow(tape, self.row, None))
        if visit is not None:
            manager.end_visit(visit)
            tape.visit = manager.begin_visit()

    def _choose_mode(self, tape: Tape) -> None:
        row = self.row
        limit = max(_OPAQUE_SHARE * row.packed_bytes, SwapManager().settings.min_bytes)
        if row.opaque_bytes <= limit:
            return
        what = f"{row.opaque_bytes} of {row.packed_bytes} bytes were kept because their producers are opaque"
        hazards = self.hazards or ([tape.moves_state] if tape.moves_state is not None else [])
        if hazards or self.certify:
            why = "certify asks for a replay" if self.certify else f"it contains {', '.join(hazards)}"
            row.note(f"{what}; running the module again (recompute='call') is not chosen by itself because {why}.")
            return
        self._runs_again = True
        row.note(
            f"{what}; from the next call on the module is run again instead (recompute='call'). Pass "
            "recompute='replay' to keep them, or declare pure autograd.Functions with lowtide.pure."
        )

    def _certifies(self, args: Any, kwargs: Any) -> bool:
        if not self.certify:
            return False
        shapes = tuple(
            (tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else None for t in tree_leaves((args, kwargs))
        )
        done = self._certified.get(shapes, 0)
        self._certified[shapes] = done + 1
        return done < self.certify


def _refuse_capture(name: str) -> None:
    where = device.training_device()
    if device.capturing(where):
        raise UnsupportedError(
            explain(
                "a region that swaps cannot be captured into a device graph",
                expected="eager execution",
                got="a stream that is being captured",
                where=name,
                remedy="Capture without swapping, or leave the wrapped layers out of the capture.",
            )
        )
