"""A parameter whose step has not ended: whoever uses its elements waits, and who asks for its shape does not.

Law: every function of torch that a class of tensors can have of its own (``__torch_function__``) waits for such a
parameter first; so does a module that owns one, before its forward, for what passes such functions by. A parameter that
can be known to be read in a third way (through another tensor over its memory, by another process, by compiled code)
does not become one; docs/cpu-optimizer.md names the ways that cannot.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version

from lowtide._torch import (
    CompiledModule,
    any_functorch_transform,
    holds_compiled_code,
    storage_readers,
    without_torch_function,
)

__all__ = ["Arrival", "ArrivingParameter", "GoingOn", "arrived", "end_arrival", "expect", "unwatch", "watch", "why_not"]

Tensor = torch.Tensor

_GETS = ("grad", "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "grad_fn", "retains_grad")
_IS = ("is_cpu", "is_cuda", "is_xpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes")
_CALLS = ("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex", "__len__")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "is_contiguous", "get_device")
# What says nothing of the elements. Loops ask for it between a step and the next forward.
_ABOUT = frozenset(
    [getattr(Tensor, name).__get__ for name in (*_GETS, *_IS)]
    + [getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [getattr(Tensor, name) for name in (*_CALLS, *_HOOKS)]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)


class Arrival(Protocol):
    """What a parameter waits for."""

    def wait(self) -> None:
        """Return when the elements are there, for every stream; raise if they will not come."""


class ArrivingParameter(nn.Parameter):
    """What a parameter is while its step goes on. The object is the same; its class changes, and changes back."""

    _arrival: Arrival

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait, then call ``func`` as if there had been nothing to wait for."""
        options = dict(kwargs or {})
        if func in _ABOUT:
            with without_torch_function():
                return func(*args, **options)
        if [arrived(one) for one in _parameters_in((args, options))]:
            return func(*args, **options)
        # It is hidden in something of somebody's own, and we do not see which it is.
        for step in list(_GOING_ON.values()):
            step.settle()
        with without_torch_function():
            return func(*args, **options)

    # These look at the class before they look at the elements.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See ``torch.nn.Parameter``."""
        return arrived(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """See ``torch.nn.Parameter``."""
        return arrived(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        """See ``torch.nn.Parameter``."""
        return repr(arrived(self))


def _parameters_in(value: Any) -> Iterator[Tensor]:
    if type(value) is ArrivingParameter:
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _parameters_in(one)
    elif isinstance(value, dict):
        yield from _parameters_in(list(value.values()))


def why_not(parameter: Tensor) -> str | None:
    """Why the elements of a parameter could be read unawares, or None."""
    if type(parameter) is not nn.Parameter:
        return f"it is a {type(parameter).__name__}, which has a class of its own"
    if storage_readers(parameter) > 1:
        return "another tensor lies over its memory"
    shared = parameter.device.type == "cpu" and parameter.is_shared()
    if shared or not parameter.untyped_storage().resizable():
        return "its memory is also another process's, or an array's"
    if holds_compiled_code():
        return "torch.compile has compiled something, and compiled code reads without asking"
    return None


# A class and its arrival change together, whichever thread is the first to wait. The collector may run finalizers
# that read parameters anywhere, here too.
_LOCK = threading.RLock()


def expect(parameter: Tensor, arrival: Arrival) -> None:
    """Whoever uses the elements from now on waits for ``arrival``. Its version moves now, as a step's writing does."""
    increment_version(parameter)
    with _LOCK:
        vars(parameter)["_arrival"] = arrival
        _set_class(parameter, ArrivingParameter)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def arrived(parameter: Any) -> Any:
    """The same object; if its step goes on, wait for it, and it is a plain one again."""
    if type(parameter) is ArrivingParameter:
        arrival: Arrival | None = vars(parameter).get("_arrival")
        if arrival is not None:
            arrival.wait()
            end_arrival(parameter, arrival)
    return parameter


def end_arrival(parameter: Any, arrival: Arrival) -> None:
    """Nobody waits for ``arrival`` any more. By now the parameter may be waiting for another one."""
    with _LOCK:
        if vars(parameter).get("_arrival") is arrival:
            del vars(parameter)["_arrival"]
            _set_class(parameter, nn.Parameter)


def _set_class(parameter: Any, cls: type) -> None:
    parameter.__class__ = cls


# ---- modules and forks -----------------------------------------------------------------------------


class GoingOn(Protocol):
    """A step that goes on."""

    @property
    def is_here(self) -> bool:
        """Whether this is the thread in which it goes on."""

    @property
    def has_ended_well(self) -> bool:
        """Whether all its parameters are there."""

    def join(self) -> None:
        """Wait for its end, good or bad."""

    def settle(self) -> None:
        """Wait for its end; raise if that was a bad one."""


_GOING_ON: dict[int, GoingOn] = {}
_HANDLES: list[Any] = []


def watch(step: GoingOn) -> None:
    """Modules wait before their forward while ``step`` goes on, and so does a fork, whose child has no such thread."""
    with _LOCK:
        _GOING_ON[id(step)] = step
        if not _HANDLES:
            _HANDLES.append(nn.modules.module.register_module_forward_pre_hook(_before_forward))


def unwatch(step: GoingOn) -> None:
    """This step has ended."""
    with _LOCK:
        _GOING_ON.pop(id(step), None)
        while _HANDLES and not _GOING_ON:
            _HANDLES.pop().remove()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(module: nn.Module, args: Any) -> None:
    steps = list(_GOING_ON.values())
    if any(step.is_here for step in steps):
        return  # an optimizer's class may have modules of its own
    for step in steps:
        if any_functorch_transform():  # other tensors are in the parameters' places
            step.settle()
        elif step.has_ended_well:
            unwatch(step)
    # Kernels of others may be given a parameter without a call of torch. Scripted modules, compiled ones and captured
    # ones read all that is below them so, and layers that are not in training look at the class of what others own, to
    # choose a faster way.
    training = getattr(module, "training", False)  # a scripted one may have lost it
    below = not training or not torch.is_grad_enabled() or _reads_unasked(module)
    for parameter in module.parameters(recurse=below):
        arrived(parameter)


def _before_fork() -> None:
    for step in list(_GOING_ON.values()):
        step.join()


def _after_fork() -> None:
    global _LOCK  # noqa: PLW0603 - another thread of the parent's may hold it for good
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _reads_unasked(module: nn.Module) -> bool:
    if isinstance(module, (torch.jit.ScriptModule, CompiledModule)):
        return True
    replaced = vars(module).get("forward")
    return str(getattr(replaced, "__module__", "")).startswith("torch.cuda.")
