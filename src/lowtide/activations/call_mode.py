"""``recompute="call"``: run the module again through ``torch.utils.checkpoint``, with our own context pair.

For regions whose inside the tape cannot see (compiled layers, opaque kernels).
SAVE, SWAP and RECOMPUTE still mean what they say (U18). Hazard: Python is run
again, so training is the same only as far as ``torch.utils.checkpoint``'s is:
BatchNorm statistics move twice and host randomness is drawn twice.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

from lowtide import _torch, device
from lowtide.activations.answers import CheckpointFrame
from lowtide.activations.operators import Kind, operator_of
from lowtide.activations.recorder import take_generator
from lowtide.errors import ReplayError, UnsupportedError, explain
from lowtide.policy import CheckpointPolicy, Fate, PolicyFn, SelectiveCheckpointContext, as_policy, fate_of
from lowtide.report.counters import RegionRow
from lowtide.residency.eligibility import NO_SCHEDULE, why_not_move
from lowtide.residency.group import Storage
from lowtide.residency.manager import SwapManager, Visit
from lowtide.residency.swap_tensor import SwapTensor
from lowtide.storage import PLAIN_TYPES, is_parameter, layout_of, rebuild

if TYPE_CHECKING:
    from typing_extensions import Self

    from lowtide.activations.region import Region

__all__ = [
    "create_selective_checkpoint_contexts",
    "graph_contexts",
    "is_running_again",
    "lower_to_checkpoint",
    "run_again",
    "state_that_moves_twice",
]

Tensor = torch.Tensor


class _Cached:
    """One operator's outputs that need not be computed again."""

    __slots__ = ("after", "answer", "is_sequence", "items", "kind")

    def __init__(self, out: Any, answer: CheckpointPolicy) -> None:
        self.answer = answer
        self.is_sequence = type(out) in (tuple, list)
        self.kind = type(out)
        # Of a random operator: the generator and its state after the draw, which the re-run must reach too.
        self.after: tuple[torch.Generator, Tensor] | None = None
        self.items: list[Any] = [_Kept(o) if isinstance(o, Tensor) else o for o in (out if self.is_sequence else [out])]

    def get(self, where: str) -> Any:
        values = [item.get(where) if isinstance(item, _Kept) else item for item in self.items]
        return self.kind(values) if self.is_sequence else values[0]


class _Kept:
    """One output: resident, or a swap tensor."""

    __slots__ = ("key", "layout", "swap", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # The very tensor until the region ends: an alias made inside the handler has a version counter of its own.
        self.tensor: Tensor | None = tensor
        self.key = _torch.storage_key(tensor)
        self.layout = layout_of(tensor)
        self.version = tensor._version
        self.swap: SwapTensor | None = None

    def settle(self) -> bool:
        """Give up the history that the tensor has by now; False if something has written to it."""
        assert self.tensor is not None
        unchanged = self.tensor._version == self.version
        self.tensor = self.tensor.detach()
        return unchanged

    def get(self, where: str) -> Tensor:
        if self.swap is not None:
            # Outputs of one operator may share a storage, hence a copy: each has a layout of its own.
            return rebuild(self.swap.bring_back(where), self.layout).detach()
        assert self.tensor is not None
        return self.tensor.detach()

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if _exiting():
            return  # the process ends: what we would call may be gone
        if self.swap is not None:
            self.swap.release()


class _Memory:
    """What the forward context remembers for the recompute context."""

    def __init__(self) -> None:
        self.cached: dict[tuple[Any, int], _Cached] = {}
        self.storages: list[Storage] = []
        self.visit: Visit | None = None


class _ForwardContext(_torch.DispatchMode):
    """Runs every operator and keeps or swaps what the policy names."""

    def __init__(self, frame: CheckpointFrame, memory: _Memory, row: RegionRow | None) -> None:
        super().__init__()
        self._frame = frame
        self._row = row or RegionRow(frame.name, "checkpoint")
        self._memory = memory
        self._calls: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> Self:
        manager = SwapManager()
        self._memory.visit = manager.begin_visit() if manager.learns_here else None
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None:
            self._hand_over()
        else:
            self._memory.cached.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operator = operator_of(func)
        if operator.kind is Kind.PASS:
            return out
        index = self._calls[func]
        self._calls[func] += 1
        if operator.writes:
            self._drop_overwritten(operator.written(args, kwargs))
            return out
        answer = self._frame.for_operator(operator, args, kwargs)
        if answer is not None and fate_of(answer) is not Fate.RECOMPUTE:
            cached = self._memory.cached[func, index] = _Cached(out, answer)
            if operator.draws(args, kwargs) and kwargs.get("generator") is None:
                cached.after = take_generator(args, kwargs)
        return out

    def _drop_overwritten(self, targets: list[Tensor]) -> None:
        """A cached result is overwritten: it is computed again instead, never used as it is now."""
        keys = {_torch.storage_key(t) for t in targets}
        for name, cached in list(self._memory.cached.items()):
            if any(isinstance(item, _Kept) and item.key in keys for item in cached.items):
                del self._memory.cached[name]

    def _hand_over(self) -> None:
        """The region has ended: what is kept loses its history, what is to be swapped goes to the residency."""
        memory, manager = self._memory, SwapManager()
        storage = Storage(self._frame.name)
        storage.count_in(self._row)
        for name, cached in list(memory.cached.items()):
            kept = [item for item in cached.items if isinstance(item, _Kept)]
            unchanged = [item.settle() for item in kept]
            if not all(unchanged):
                del memory.cached[name]
                continue
            for item in kept:
                self._stow(item, cached.answer, storage)
        if storage.tensors:
            memory.storages.append(storage)
            filed = manager.file_under(storage, memory.visit)
            for tensor in storage.tensors:
                tensor.visit = tensor.visit or filed
        if memory.visit is not None:
            manager.end_visit(memory.visit)
        if NO_SCHEDULE in self._row.refused:
            manager.warn_of_no_schedule()

    def _stow(self, item: _Kept, answer: CheckpointPolicy, storage: Storage) -> None:
        assert item.tensor is not None
        nbytes = item.tensor.untyped_storage().nbytes()
        if fate_of(answer) is Fate.SWAP:
            refusal = why_not_move(item.tensor, nbytes, SwapManager())
            if refusal is None:
                item.swap = SwapManager().adopt(item.tensor, self._frame.name)
                item.swap.must |= answer is CheckpointPolicy.MUST_SWAP
                item.tensor = None
                storage.swap(item.swap)
                self._row.kept_bytes += nbytes  # until its copy is launched
                return
            self._row.refuse(refusal[0], nbytes, refusal[1])
        self._row.kept_bytes += nbytes


class _RecomputeContext(_torch.DispatchMode):
    """Gives back what was kept or swapped without running the operator; runs the rest."""

    def __init__(self, name: str, memory: _Memory) -> None:
        super().__init__()
        self._name = name
        self._memory = memory
        self._calls: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> Self:
        self._calls.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if not _torch.autograd_keeps_graph():
            # The recompute may stop early: what it did not come to is not needed.
            self._memory.cached.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator_of(func).kind is Kind.PASS:
            return func(*args, **(kwargs or {}))
        index = self._calls[func]
        self._calls[func] += 1
        cached = self._memory.cached.get((func, index))
        if cached is None:
            return func(*args, **(kwargs or {}))
        for item in cached.items:
            if isinstance(item, _Kept) and item.tensor is not None and item.tensor._version != item.version:
                raise ReplayError(
                    explain(
                        f"the kept output of {func} was modified in place",
                        expected=f"version {item.version}",
                        got=f"version {item.tensor._version}",
                        where=self._name,
                        remedy="Do not keep that operator's output.",
                    )
                )
        if cached.after is not None:
            cached.after[0].set_state(cached.after[1])
        out = cached.get(self._name)
        if not _torch.autograd_keeps_graph():
            del self._memory.cached[func, index]
        return out


def create_selective_checkpoint_contexts(
    policy_fn: PolicyFn,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The pair (forward context, recompute context) for ``context_fn`` of ``torch.utils.checkpoint`` (U18).

    SAVE and SWAP outputs are given back in backward without running the operator
    again, RECOMPUTE runs it. ``policy_fn(ctx, op, *args, **kwargs)`` is asked once
    per call, in forward; its answers are reused by (operator, invocation). Costs
    the kept bytes until backward; swapped ones need a schedule.

    >>> import functools, torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from lowtide.policy import save_ops
    >>> contexts = functools.partial(create_selective_checkpoint_contexts, save_ops("aten.mm"))
    >>> x = torch.randn(2, 2, requires_grad=True)
    >>> y = checkpoint(lambda t: (t @ t).sin(), x, use_reentrant=False, context_fn=contexts)
    >>> y.sum().backward()
    """
    name = getattr(policy_fn, "__name__", type(policy_fn).__name__)
    return _contexts(CheckpointFrame(name, policy_fn, swap_inputs=False))


def _contexts(frame: CheckpointFrame, row: RegionRow | None = None) -> tuple[_ForwardContext, _RecomputeContext]:
    memory = _Memory()
    return _ForwardContext(frame, memory, row), _RecomputeContext(frame.name, memory)


class _Local(threading.local):
    depth = 0


_local = _Local()


def is_running_again() -> bool:
    """Whether a region in call mode runs on this thread: regions inside of it are plain calls."""
    return _local.depth > 0


def run_again(region: Region, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One call of a region in call mode."""
    leaves, spec = tree_flatten((args, kwargs))
    # Only positional tensors reach outer hooks: hand over every tensor as one.
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    default_device = torch.get_default_device()

    def call(*tensors: Any) -> Any:
        filled = list(rest)
        for i, tensor in zip(where, tensors, strict=True):
            filled[i] = tensor
        again_args, again_kwargs = tree_unflatten(filled, spec)
        _local.depth += 1
        try:
            with device.with_default_device(default_device):
                return fn(*again_args, **again_kwargs)
        finally:
            _local.depth -= 1

    options: dict[str, Any] = {"use_reentrant": False}
    if region.policy is not None:
        frame = CheckpointFrame(region.name, region.policy, swap_inputs=region.swap_inputs)
        options["context_fn"] = functools.partial(_contexts, frame, region.row)
    checkpointed = functools.partial(checkpoint, call, **options)
    tensors = [leaves[i] for i in where]
    region.row.start_call()
    if not region.swap_inputs:
        unique = {_torch.storage_key(t): t for t in tensors if not is_parameter(t) and type(t) in PLAIN_TYPES}
        region.row.kept_bytes += sum(t.untyped_storage().nbytes() for t in unique.values())
    return region.run_with_swapped_inputs(checkpointed, tensors) if region.swap_inputs else checkpointed(*tensors)


def state_that_moves_twice(module: Any) -> list[str]:
    """What a second run of a module's Python would visibly change: running statistics, host randomness."""
    if not isinstance(module, torch.nn.Module):
        return []
    found: list[str] = []
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm) and child.track_running_stats:
            found.append(f"BatchNorm statistics ({name or type(child).__name__})")
        code = getattr(type(child).forward, "__code__", None)
        scope = getattr(type(child).forward, "__globals__", {})
        names = code.co_names if code is not None else ()
        for used in names:
            origin = getattr(scope.get(used), "__name__", "")
            if origin in {"random", "numpy.random"} or (origin == "numpy" and "random" in names):
                found.append(f"host randomness ({name or type(child).__name__} uses {used})")
    return found


def _refuse_swap_in_graph(where: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "a compiled graph cannot swap",
            expected="save or recompute under torch.compile",
            got="a swap",
            where=where,
            remedy="Compile the layer first and wrap the compiled layer (recompute='call'), or do not swap it.",
        )
    )


def graph_contexts(policy: PolicyFn, name: str) -> Callable[[], Any]:
    """``context_fn`` for a compiled graph: torch's own selective contexts with our policy translated.

    Made when the region is made: the compiler takes it only as a constant from outside of the graph.
    """

    def translated(ctx: Any, op: Any, *op_args: Any, **op_kwargs: Any) -> TorchPolicy:
        ours = SelectiveCheckpointContext(is_recompute=bool(ctx.is_recompute))
        answer = as_policy(policy(ours, op, *op_args, **op_kwargs), name)
        if fate_of(answer) is Fate.SWAP:
            raise _refuse_swap_in_graph(name)
        return TorchPolicy(answer.value)

    return functools.partial(torch_contexts, translated)


def lower_to_checkpoint(region: Region, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Under ``torch.compile``: the same wish in the words that the compiler understands."""
    if region.kind == "swap" or region.swap_inputs:
        raise _refuse_swap_in_graph(region.name)
    if region.place is not None:
        raise UnsupportedError(
            explain(
                "a compiled graph keeps the input of every layer, and of a chunk the first one alone is to be kept",
                expected="chunks of one layer under torch.compile",
                got=f"a chunk of {region.place.count} layers",
                where=region.name,
                remedy="Use full_recompute_num_layers=1 with recompute_method='uniform', or do not compile.",
            )
        )
    if region.graph_contexts is None:
        return checkpoint(fn, *args, use_reentrant=False, **kwargs)
    return checkpoint(fn, *args, use_reentrant=False, context_fn=region.graph_contexts, **kwargs)
