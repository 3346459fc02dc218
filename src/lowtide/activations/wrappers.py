"""The verbs: ``checkpoint_wrapper``, ``swap_wrapper``, ``unwrap`` and ``auto``.

Law: the same wrap twice is harmless, another one on the same object raises;
everything can be undone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from lowtide.activations.call_mode import lower_to_checkpoint
from lowtide.activations.inplace import attach, attached, detach, detach_if_idle
from lowtide.activations.region import Region
from lowtide.errors import PolicyError, WrapError, explain
from lowtide.policy import PolicyFn, TensorPolicyFn, save_matmuls_and_attention, swap_matmuls_and_attention

__all__ = ["Auto", "auto", "checkpoint_wrapper", "regions_of", "show_in_report", "swap_wrapper", "unwrap"]

F = TypeVar("F", bound=Callable[..., Any])

# Functions have no place in a module tree: this is how the report finds them.
_wrapped_functions: weakref.WeakSet[Region] = weakref.WeakSet()


def show_in_report(region: Region) -> None:
    """Let the report list a region that no module carries, as long as it lives."""
    _wrapped_functions.add(region)


def checkpoint_wrapper(
    module_or_fn: F,
    policy_fn: PolicyFn | None = None,
    swap_inputs: bool = False,  # noqa: FBT001, FBT002 - the sources' signature
    *,
    recompute: str = "auto",
    certify: int = 0,
    name: str | None = None,
) -> F:
    """Make a module or function recompute, in backward, what autograd would have kept of its forward (U2).

    A module is wrapped in place and returned; a function comes back wrapped.
    Costs about the wrapped forward once more in backward, less for every output
    the policy keeps; holds the inputs until backward. Hazard: with
    ``recompute="call"`` Python runs twice.

    Args:
        module_or_fn: what to wrap.
        policy_fn: ``policy_fn(ctx, op, *args, **kwargs) -> CheckpointPolicy``, asked for every
            operator output; without it everything is recomputed.
        swap_inputs: also move the tensors that the region keeps for its recompute (U5).
        recompute: ``"replay"`` records operators and replays the minimal closure; ``"call"`` runs the
            module again through ``torch.utils.checkpoint``; ``"auto"`` (default) replays, and changes to
            ``"call"`` where opaque operators would keep more than a tenth of the bytes.
        certify: compare a checksum of every saved tensor in the first ``certify`` calls of each input shape.
        name: for messages and the report; default is the class or function name.

    Raises:
        WrapError: it is wrapped differently already, or ``recompute`` is unknown.

    >>> import torch, lowtide
    >>> layer = lowtide.checkpoint_wrapper(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()))
    >>> layer(torch.ones(2, 4)).sum().backward()
    """
    name = name or _name_of(module_or_fn)
    _check_options(name, policy_fn, recompute, certify)
    region = Region(
        name,
        "checkpoint",
        policy_fn,
        swap_inputs=swap_inputs,
        recompute=recompute,
        certify=certify,
    )
    region.look_for_hazards(module_or_fn)
    wrapped: F = _wrap(module_or_fn, region)
    return wrapped


def _check_options(name: str, policy_fn: PolicyFn | None, recompute: str, certify: int) -> None:
    if recompute not in {"auto", "replay", "call"}:
        raise WrapError(
            explain(
                "an unknown way to recompute",
                expected="'auto', 'replay' or 'call'",
                got=repr(recompute),
                where=name,
                remedy="Leave it out for 'auto'.",
            )
        )
    if recompute == "call" and certify:
        raise WrapError(
            explain(
                "certify compares replayed values, and recompute='call' replays none",
                expected="recompute='auto' or 'replay'",
                got="'call'",
                where=name,
                remedy="Leave certify out; torch.utils.checkpoint has a determinism check of its own.",
            )
        )
    if policy_fn is save_matmuls_and_attention or policy_fn is swap_matmuls_and_attention:
        raise PolicyError(
            explain(
                "a ready-made policy was named, not made",
                expected="the policy that the function returns",
                got=f"the function {getattr(policy_fn, '__name__', policy_fn)}",
                where=name,
                remedy="Write it with parentheses: save_matmuls_and_attention().",
            )
        )


def swap_wrapper(
    module_or_fn: F, policy_fn: TensorPolicyFn | None = None, *, certify: int = 0, name: str | None = None
) -> F:
    """Make a module or function move what autograd keeps of its forward to the lower tier (U4).

    Needs a schedule: :func:`auto`, a chain, or group calls; without one nothing
    moves (U7). ``policy_fn(tensor)`` is asked for each tensor that autograd is
    about to save and answers ``MUST_SAVE`` or ``MUST_SWAP``. Costs link
    bandwidth, and host memory or file space for the bytes until backward.

    >>> import torch, lowtide
    >>> layer = lowtide.swap_wrapper(torch.nn.Linear(4, 4))
    >>> isinstance(layer, torch.nn.Linear)
    True
    """
    wrapped: F = _wrap(module_or_fn, Region(name or _name_of(module_or_fn), "swap", policy_fn, certify=certify))
    return wrapped


def _name_of(module_or_fn: Any) -> str:
    if isinstance(module_or_fn, torch.nn.Module):
        return type(module_or_fn).__name__
    return getattr(module_or_fn, "__qualname__", type(module_or_fn).__name__)


def _wrap(module_or_fn: Any, region: Region) -> Any:
    known = _region_of(module_or_fn)
    if known is not None:
        if known.settings() == region.settings():
            return module_or_fn
        raise WrapError(
            explain(
                "it is wrapped already, and differently",
                expected=f"{region.kind} with {region.settings()[1:]}",
                got=f"{known.kind} with {known.settings()[1:]}",
                where=region.name,
                remedy="Call lowtide.unwrap on it first, or wrap a sub-module.",
            )
        )
    if isinstance(module_or_fn, torch.nn.Module):
        attach(module_or_fn).region = region
        return module_or_fn
    if not callable(module_or_fn):
        raise WrapError(
            explain(
                "only modules and functions can be wrapped",
                expected="a torch.nn.Module or a callable",
                got=type(module_or_fn).__name__,
                where=region.name,
                remedy="Wrap the elements of a container one by one.",
            )
        )

    run = torch.compiler.disable(region.run)

    @functools.wraps(module_or_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return run(module_or_fn, args, kwargs)
        if not torch.is_grad_enabled():
            return module_or_fn(*args, **kwargs)
        return lower_to_checkpoint(region, module_or_fn, args, kwargs)

    wrapped._lowtide_region = region  # type: ignore[attr-defined]
    show_in_report(region)
    return wrapped


def _region_of(module_or_fn: Any) -> Region | None:
    if isinstance(module_or_fn, torch.nn.Module):
        found = attached(module_or_fn)
        return None if found is None else found.region
    return getattr(module_or_fn, "_lowtide_region", None)


def unwrap(module_or_fn: F) -> F:
    """Undo a wrap: the module as it was, or the original function. Harmless where nothing is wrapped.

    Of a module it also undoes its place in a chain and its learned order.

    Graphs that are alive keep their tapes and run backward as before.

    >>> import torch, lowtide
    >>> layer = lowtide.checkpoint_wrapper(torch.nn.Linear(4, 4))
    >>> "forward" in lowtide.unwrap(layer).__dict__
    False
    """
    if isinstance(module_or_fn, torch.nn.Module):
        detach(module_or_fn)
        return module_or_fn
    if _region_of(module_or_fn) is None:
        return module_or_fn
    original: F = module_or_fn.__wrapped__  # type: ignore[attr-defined]
    return original


class Auto:
    """The learned order of one model; ``undo`` switches it off."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: torch.nn.Module | None = model
        attach(model).learns += 1

    def undo(self) -> None:
        """Switch the learned order off. Repeating it is harmless."""
        model, self._model = self._model, None
        if model is None:
            return
        found = attached(model)
        if found is not None and found.learns:
            found.learns -= 1
            detach_if_idle(model)


def auto(model: torch.nn.Module) -> Auto:
    """Let wrapped regions inside of ``model`` move their bytes in the order in which they run.

    The order is learned anew in every forward, per micro-batch: no layer is
    named, layers may be skipped, repeated or reordered. Region ``k`` leaves when
    region ``k + 1`` begins and is released when that one ends; backward loads one
    region ahead; the last one stays. Costs nothing outside of wrapped regions.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(*[lowtide.swap_wrapper(torch.nn.Linear(4, 4)) for _ in range(3)])
    >>> switch = lowtide.auto(model)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> switch.undo()
    """
    for name, module in model.named_modules():
        region = _region_of(module)
        if region is not None and name:
            region.rename(name)
    return Auto(model)


def regions_of(model: torch.nn.Module) -> Iterator[tuple[str, Region]]:
    """The wrapped modules of a model by fully qualified name, then every wrapped function that was called."""
    for name, module in model.named_modules():
        region = _region_of(module)
        if region is not None:
            yield name or type(module).__name__, region
    for region in sorted(_wrapped_functions, key=lambda r: r.name):
        if region.row.calls:
            yield region.name, region
