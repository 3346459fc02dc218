"""``CheckpointWithoutOutput``: run a function, use its output, free the output, make it again before it is read (F1).

The explicit form of what a region does by itself, for code that wants to say
when: the function is a region whose outputs are among what its tape can make
again. Law: an output is emptied only if the tape can make it, and only where
autograd itself holds what its consumers saved; whatever is not emptied is
counted with its reason. What a call keeps belongs to its graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from lowtide import _torch, device
from lowtide.activations.links import tensors_of
from lowtide.activations.region import Region
from lowtide.activations.replay import give_back
from lowtide.activations.tape import Tape
from lowtide.activations.values import Handle
from lowtide.activations.wrappers import show_in_report
from lowtide.errors import StateError, UnsupportedError, explain
from lowtide.storage import PLAIN_TYPES, Emptied

__all__ = ["CheckpointWithoutOutput"]

Tensor = torch.Tensor

_HOOKED = "another pair of saved-tensor hooks holds what the consumers of a discarded output saved"
_WRITTEN = "an output of the function was written to after it had been made"
_NOT_MADE = "an output of the function shares its storage with an input, or the tape cannot make it again"


class _Session:
    """One call: which outputs the tape can make again, and which of them are empty now."""

    def __init__(self, name: str) -> None:
        self.name = name
        # (without history, which would be a cycle; its version; how it is made)
        self.outputs: list[tuple[Tensor, int, Handle]] = []
        self.emptied: list[tuple[Emptied, Handle]] = []
        self.discarded = False
        self.tracked = False  # its outputs have a graph, which owns this session

    def keep(self, tape: Tape, region: Region, out: Any) -> None:
        """The function has run: remember how each of its outputs is made."""
        seen: set[int] = set()
        for tensor in tensors_of(out):
            if tensor.grad_fn is not None:
                self.tracked = True
                tensor.grad_fn.register_prehook(self._before_own_backward)
            if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
                continue
            key = _torch.storage_key(tensor)
            handle = tape.pack(tensor)
            if handle.value.held is not None or handle.value.swap is not None:
                if not handle.value.parameter:
                    region.row.refuse(_NOT_MADE, tensor.untyped_storage().nbytes(), "Nothing to do: it stays.")
            elif key not in seen:
                seen.add(key)
                self.outputs.append((tensor.detach(), tensor._version, handle))

    def discard(self, region: Region) -> None:
        """Free the bytes of every output."""
        self.discarded = True
        outputs, self.outputs = self.outputs, []
        if _torch.current_saved_tensor_hooks() is not None:
            for tensor, _, _ in outputs:
                nbytes = tensor.untyped_storage().nbytes()
                region.row.refuse(_HOOKED, nbytes, "Nothing to do: what those hooks do with it holds.")
            return
        restore = weakref.WeakMethod(self.restore)

        def refill() -> None:
            alive = restore()
            if alive is not None:
                alive()

        for tensor, version, handle in outputs:
            if tensor._version != version:
                nbytes = tensor.untyped_storage().nbytes()
                region.row.refuse(_WRITTEN, nbytes, "Do it inside the function, or not in place.")
            else:
                # Its consumers may have run on another stream than the one that made it.
                device.note_reader(tensor)
                self.emptied.append((Emptied(tensor, refill), handle))

    def restore(self) -> None:
        """Make everything that is empty again, in place. Repeating it is harmless."""
        while self.emptied:
            emptied, handle = self.emptied[-1]
            give_back(handle, emptied)
            self.emptied.pop()

    def _before_own_backward(self, _grads: Any) -> None:
        """Backward of the function begins, so that of every consumer of its output is over."""
        if self.emptied:
            raise StateError(
                explain(
                    "a discarded output was not made again before backward read it",
                    expected="recompute as a hook of a tensor that is computed from every consumer of the output",
                    got="no call of recompute",
                    where=self.name,
                    remedy="Call discard_output_and_register_recompute(tensor) in place of discard_output().",
                )
            )


class _WithoutOutput(Region):
    """A region that remembers how its outputs are made, unless it runs inside of another, which knows by itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "checkpoint", None, recompute="replay")
        self._session: _Session | None = None

    def run_for(self, session: _Session, function: Callable[..., Any], inputs: Any) -> Any:
        self._session = session
        try:
            return self.run(function, inputs, {})
        finally:
            self._session = None  # it belongs to the graph, not to the settings

    def _finish(self, tape: Tape, out: Any) -> None:
        assert self._session is not None
        self._session.keep(tape, self, out)
        super()._finish(tape, out)


class CheckpointWithoutOutput:
    """Run a function without keeping its intermediates *and* its output (F1).

    ``checkpoint`` runs it, ``discard_output`` frees the output's memory after
    its consumers have run, and ``recompute``, as a hook of a tensor computed
    from them, makes the output again in the same storage just before backward
    reads it: every view that a consumer saved is right again, and on torch 2.13
    and newer there is never a second copy.

    Costs the function once more in backward, and its inputs until then. The
    random state is always restored. Hazard: between ``discard_output`` and
    ``recompute`` nobody may read the output. lowtide's own regions notice and
    make it again; any other reader finds an empty storage, which some operators
    refuse and some crash the process on. So the hook tensor must be computed
    from every consumer. Make one object for each
    call: used again, it speaks of the latest call only. It holds nothing of a
    call whose graph is gone.

    Inside a wrapped module, or under any other saved-tensor hooks, nothing is
    emptied by hand: there the region itself drops the output and makes it again.

    >>> import torch
    >>> from lowtide import CheckpointWithoutOutput
    >>> x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    >>> checkpoint = CheckpointWithoutOutput()
    >>> hidden = checkpoint.checkpoint(torch.nn.functional.gelu, False, x)
    >>> out = hidden @ w
    >>> checkpoint.discard_output_and_register_recompute(out)
    >>> hidden.untyped_storage().nbytes()
    0
    >>> out.sum().backward()
    """

    def __init__(self) -> None:
        self._session: Callable[[], _Session | None] | None = None
        self._region: _WithoutOutput | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What a call keeps belongs to its graph: a copy begins anew.
        return {"_session": None, "_region": None}

    def checkpoint(
        self,
        function: Callable[..., Any],
        distribute_saved_activations: bool,  # noqa: FBT001 - the sources' signature
        *inputs: Any,
    ) -> Any:
        """Call ``function(*inputs)``; returns its output.

        Args:
            function: any callable; tensors it closes over are kept like inputs.
            distribute_saved_activations: must be ``False``.
            inputs: its arguments, tensors or not.

        Raises:
            UnsupportedError: ``distribute_saved_activations`` is true.
        """
        name = getattr(function, "__qualname__", type(function).__name__)
        if distribute_saved_activations:
            raise UnsupportedError(
                explain(
                    "saved activations are not distributed over ranks",
                    expected="distribute_saved_activations=False",
                    got=repr(distribute_saved_activations),
                    where=f"CheckpointWithoutOutput of {name}",
                    remedy="Pass False.",
                )
            )
        self._session = None
        if not torch.is_grad_enabled():
            self._session = _nothing_to_keep
            return function(*inputs)
        if self._region is None or self._region.name != name:
            self._region = _WithoutOutput(name)
            show_in_report(self._region)
        session = _Session(name)
        out = self._region.run_for(session, function, inputs)
        self._session = weakref.ref(session) if session.tracked else lambda: session
        return out

    def discard_output(self) -> None:
        """Free the memory of the output; tensors and views of it stay, empty. Call it after the consumers have run.

        What cannot be made again stays and is counted. Without gradients there is nothing to do.

        Raises:
            StateError: nothing was run, or it was discarded before.
        """
        session = self._current("discard_output")
        if session is None:
            return
        if session.discarded:
            raise self._misuse("discard_output was called twice", "one call for each checkpoint", "Remove one of them.")
        assert self._region is not None
        session.discard(self._region)

    def recompute(self, _grad: Tensor | None = None) -> None:
        """Make the discarded output again, in place. Meant as ``tensor.register_hook(checkpoint.recompute)``.

        Harmless when it is there already.

        Raises:
            StateError: nothing was run, or the output was never discarded.
        """
        session = self._current("recompute")
        if session is None:
            return
        if not session.discarded:
            raise self._misuse(
                "recompute was called for an output that is there",
                "discard_output() first",
                "Call discard_output() after the output was used.",
            )
        session.restore()

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """:meth:`discard_output`, and :meth:`recompute` when backward reaches ``hook_tensor``.

        Args:
            hook_tensor: computed from every consumer of the output, so that its gradient comes before they read it.

        Raises:
            StateError: as ``discard_output``, or ``hook_tensor`` has no gradient.
        """
        session = self._current("discard_output_and_register_recompute")
        if session is None:
            return
        if not hook_tensor.requires_grad:
            raise self._misuse(
                "the tensor whose gradient should bring the output back has none",
                "a tensor that requires grad and is computed from the consumers of the output",
                "Pass the module's output; where no gradient is wanted, run under torch.no_grad().",
                got=f"a {tuple(hook_tensor.shape)} tensor without gradient",
            )
        self.discard_output()
        hook_tensor.register_hook(lambda _grad: session.restore())

    def _current(self, call: str) -> _Session | None:
        """The session of the last call, or None where nothing was kept (evaluation) or its graph is gone."""
        if self._session is None:
            raise self._misuse(f"{call} without a checkpoint", "checkpoint(function, False, *inputs) first", "Call it.")
        return self._session()

    def _misuse(self, problem: str, expected: str, remedy: str, *, got: str = "this call") -> StateError:
        where = "CheckpointWithoutOutput" + (f" of {self._region.name}" if self._region is not None else "")
        return StateError(explain(problem, expected=expected, got=got, where=where, remedy=remedy))


def _nothing_to_keep() -> None:
    return None
