"""The in-place wrap: an instance attribute ``forward`` that knows its module only weakly.

Law (off means untouched): parameter names, ``state_dict`` keys, ``isinstance``,
``deepcopy`` and ``pickle`` behave as before; a wrapped module dies by reference
counting; what is attached can be detached.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lowtide.activations.call_mode import lower_to_checkpoint
from lowtide.activations.region import Region, notify_on_backward, stow_open_tapes
from lowtide.errors import UnsupportedError, WrapError, explain
from lowtide.residency.manager import SwapManager, Visit, watch_chained_layers

__all__ = ["LayerCall", "WrappedForward", "attach", "attached", "detach", "detach_if_idle"]


class LayerCall(Protocol):
    """What a recipe does around or inside of a layer's region; it knows its layer only weakly."""

    def run(self, fn: Callable[..., Any], region: Region | None, args: Any, kwargs: Any) -> Any:
        """Call ``fn`` as ``region``, which is the layer's own if it has one."""


class WrappedForward:
    """Stands in for ``module.forward``: region, chain boundary and learned order of one module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        # Somebody else's patch on the instance stays in force below ours.
        self.original: Callable[..., Any] | None = module.__dict__.get("forward")
        self.region: Region | None = None
        self.is_unit = False
        self.learns = 0
        self.recipe: LayerCall | None = None

    @property
    def module(self) -> torch.nn.Module:
        """The module, which is alive while its forward is called."""
        module = self._module()
        if module is None:
            raise WrapError(
                explain(
                    "the forward of a module that is gone was called",
                    expected="a live module",
                    got="None",
                    where="lowtide",
                    remedy="Keep the module alive as long as its forward is used.",
                )
            )
        return module

    def inner(self) -> Callable[..., Any]:
        """The forward below ours, looked up at each call so that later changes to the class are seen."""
        if self.original is not None:
            return self.original
        module = self.module
        if torch.compiler.is_compiling():
            # Neither a descriptor (2.10) nor a bound method made by hand (any) can be traced.
            return functools.partial(type(module).forward, module)
        kind = type(module)
        found: Any = next(one.__dict__["forward"] for one in kind.__mro__ if "forward" in one.__dict__)
        bound: Callable[..., Any] = found.__get__(module, kind) if hasattr(found, "__get__") else found
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward under everything that is attached to it."""
        if not torch.compiler.is_compiling():
            return self._run(args, kwargs)
        region = self.region
        if not torch.is_grad_enabled():
            return self.inner()(*args, **kwargs)
        if self.recipe is not None:
            raise UnsupportedError(
                explain(
                    "a compiled graph cannot swap",
                    expected="save or recompute under torch.compile",
                    got="a layer whose input is to move",
                    where=type(self.module).__name__,
                    remedy="Compile the layers one by one, before naming them, or do not swap their inputs.",
                )
            )
        if region is None:
            return self.inner()(*args, **kwargs)
        return lower_to_checkpoint(region, self.inner(), args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, args: Any, kwargs: Any) -> Any:
        fn = self.inner()
        manager = SwapManager()
        unit = self._begin_unit(manager)
        if self.learns:
            manager.begin_learning(id(self), self.module.buffers())
        try:
            if self.recipe is not None:
                out = self.recipe.run(fn, self.region, args, kwargs)
            else:
                out = fn(*args, **kwargs) if self.region is None else self.region.run(fn, args, kwargs)
            if unit is not None:
                stow_open_tapes()
        finally:
            if self.learns:
                manager.end_learning()
            if unit is not None:
                manager.units.pop()
        if unit is not None:
            manager.end_visit(unit, self.module)
            if unit.storages:
                notify_on_backward(out, unit.reached)
        return out

    def _begin_unit(self, manager: SwapManager) -> Visit | None:
        if not self.is_unit or not torch.is_grad_enabled() or not manager.is_chained(self.module):
            return None
        unit = manager.begin_visit()
        manager.units.append(unit)
        return unit

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner())

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.inner()

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedForward:
        # copy.deepcopy has already made the copy of the module when it comes to its attributes.
        module = memo.get(id(self.module), self.module)
        made = WrappedForward.__new__(WrappedForward)
        made._module = weakref.ref(module)
        made.original = self.original
        made.region = None if self.region is None else self.region.fresh()
        if made.region is not None:
            # Of a copied model the layers form chunks of their own.
            made.region.place = copy.deepcopy(made.region.place, memo)
        made.is_unit = False
        made.learns = self.learns
        made.recipe = None  # likewise: a list of layers was named, and this one is none of them
        memo[id(self)] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_module"] = self.module
        state["is_unit"] = False  # a chain names objects of this process
        state["recipe"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._module = weakref.ref(state["_module"])


def attached(module: torch.nn.Module) -> WrappedForward | None:
    """What is attached to a module, or None."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, WrappedForward) else None


def attach(module: torch.nn.Module) -> WrappedForward:
    """The in-place wrap of a module, made if need be."""
    found = attached(module)
    if found is None:
        found = WrappedForward(module)
        module.__dict__["forward"] = found
    return found


def detach(module: torch.nn.Module) -> None:
    """Take everything off: the region, the place in a chain, the learned order, what a recipe added."""
    found = attached(module)
    if found is None:
        return
    SwapManager().unchain(module)
    found.region = None
    found.is_unit = False
    found.learns = 0
    found.recipe = None
    detach_if_idle(module)


def detach_if_idle(module: torch.nn.Module) -> None:
    """Take the wrap off once nothing uses it."""
    found = attached(module)
    if found is None or found.region is not None or found.is_unit or found.learns or found.recipe is not None:
        return
    if found.original is not None:
        module.__dict__["forward"] = found.original
    else:
        del module.__dict__["forward"]


def _watch_unit(layer: torch.nn.Module) -> None:
    attach(layer).is_unit = True


watch_chained_layers(_watch_unit)
