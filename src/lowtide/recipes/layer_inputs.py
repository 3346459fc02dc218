"""Swap of layer inputs: of all the inputs of a stack of layers, a constant number lies on the device.

The verb for a list of layers; the decorators, the manager and the tensors
driven by hand have files of their own beside this one and are named here. Law:
training is the same, bit for bit; only the layers' inputs move; all that is
attached can be undone.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Sequence

import torch

from lowtide.activations.inplace import attach, attached, detach_if_idle
from lowtide.errors import LowtideWarning, ScheduleError, WrapError, explain
from lowtide.recipes.layer_inputs_decorators import (
    swap_layer_input_fboverlap_1f1b_wrapper,
    swap_layer_input_fboverlap_backward_wrapper,
    swap_layer_input_fboverlap_forward_wrapper,
    swap_layer_input_forward_wrapper,
    swap_layer_input_init_wrapper,
)
from lowtide.recipes.layer_inputs_manager import LayerGroup, SwapLayerInputManager
from lowtide.recipes.layer_inputs_tensors import SwapTensors, is_valid_for_swap
from lowtide.residency.manager import SwapManager

__all__ = [
    "LayerInputs",
    "SwapLayerInputManager",
    "SwapTensors",
    "is_valid_for_swap",
    "swap_layer_input_fboverlap_1f1b_wrapper",
    "swap_layer_input_fboverlap_backward_wrapper",
    "swap_layer_input_fboverlap_forward_wrapper",
    "swap_layer_input_forward_wrapper",
    "swap_layer_input_init_wrapper",
    "swap_layer_inputs",
]

_numbers = itertools.count()


class LayerInputs:
    """The layers whose inputs move; ``undo`` leaves them as they were."""

    def __init__(self, tag: str, layers: Sequence[torch.nn.Module]) -> None:
        self._tag: str | None = tag
        self._layers = [weakref.ref(layer) for layer in layers]

    @property
    def managers(self) -> LayerGroup:
        """The managers of the layers, in order; none after ``undo``."""
        empty = LayerGroup("undone", {})
        return empty if self._tag is None else SwapLayerInputManager.manager_map.get(self._tag, empty)

    def undo(self) -> None:
        """Undo the swap of these layers' inputs. Repeating it is harmless; graphs that are alive run backward."""
        tag, self._tag = self._tag, None
        if tag is None:
            return
        SwapLayerInputManager.forget(tag)
        for reference in self._layers:
            layer = reference()
            found = None if layer is None else attached(layer)
            if layer is None or found is None:
                continue
            if isinstance(found.recipe, SwapLayerInputManager) and found.recipe.module_tag == tag:
                found.recipe = None
                detach_if_idle(layer)


def swap_layer_inputs(
    layers: Sequence[torch.nn.Module], *, prefetch: int | None = None, micro_batches: int = 1
) -> LayerInputs:
    """Let the input of each layer leave the device until its backward (L1).

    The input is the keyword ``hidden_states`` or the first positional tensor. It
    leaves when its layer ends, is released when the next layer ends, and comes
    back when backward enters the next layer; the last layer's never leaves. A
    layer that is recomputed keeps its input and little else: use both together.
    Of a layer that is not, what autograd saves of the input's storage moves.
    Costs one input's bytes a layer on the link in each direction, and on the
    lower tier until backward. Hazard: who else holds an input keeps it on the
    device; the report counts that as held elsewhere.

    Args:
        layers: in the order in which they run; one that runs twice is named once.
        prefetch: how many layers ahead backward loads; None as ``SwapManager().configure`` says.
        micro_batches: how many are in flight at once, for the check of room on the lower tier.

    Raises:
        WrapError: no layers, something that is no module, or a layer whose input moves already.
        ScheduleError: a layer is named twice or stands in another chain.
        CapacityError: later, at the first layer's first call: the lower tier has no room for the inputs.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(*[lowtide.checkpoint_wrapper(torch.nn.Linear(4, 4)) for _ in range(3)])
    >>> swapped = swap_layer_inputs(list(model))
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> swapped.undo()
    """
    if not hasattr(layers, "__iter__"):
        raise WrapError(
            explain(
                "swap_layer_inputs takes a list of layers",
                expected="modules in the order in which they run",
                got=type(layers).__name__,
                where="swap_layer_inputs",
                remedy="Pass the model's layers, such as list(model.layers).",
            )
        )
    layers = list(layers)
    _check(layers)
    tag = f"swap_layer_inputs {next(_numbers)}"
    managers = [SwapLayerInputManager(layer, tag, name=_name(layer, index)) for index, layer in enumerate(layers)]
    try:
        SwapLayerInputManager.configure(tag, prefetch=prefetch, micro_batches=micro_batches)
    except BaseException:
        SwapLayerInputManager.forget(tag)
        raise
    SwapLayerInputManager.manager_map[tag].transient = True
    for layer, manager in zip(layers, managers, strict=True):
        attach(layer).recipe = manager
    return LayerInputs(tag, layers)


def _name(layer: torch.nn.Module, index: int) -> str:
    found = attached(layer)
    known = None if found is None or found.region is None else found.region.name
    return f"{type(layer).__name__} {index}: input" if known in {None, type(layer).__name__} else f"{known}: input"


def _check(layers: Sequence[torch.nn.Module]) -> None:
    if not layers:
        raise WrapError(
            explain(
                "no layers were named",
                expected="a list of modules in the order in which they run",
                got="an empty list",
                where="swap_layer_inputs",
                remedy="Pass the model's layers, such as list(model.layers).",
            )
        )
    for index, layer in enumerate(layers):
        _check_one(layer, index)
        if any(layer is other for other in layers[:index]):
            raise ScheduleError(
                explain(
                    "a layer is named twice",
                    expected="each layer once, in forward order",
                    got=f"one {type(layer).__name__} at {[i for i, one in enumerate(layers) if one is layer]}",
                    where="swap_layer_inputs",
                    remedy="Name a layer that runs twice once; every call of it is served.",
                )
            )
        for other in SwapManager().neighbours(layer):
            if other is not None:
                raise ScheduleError(
                    explain(
                        "a layer stands in a chain already",
                        expected="layers in no chain",
                        got=f"a {type(layer).__name__} chained to a {type(other).__name__}",
                        where=f"layers[{index}]",
                        remedy="Undo that chain: SwapManager().unchain(layer). This verb makes its own.",
                    )
                )
    if len(layers) == 1:
        warnings.warn(
            "swap_layer_inputs was given one layer, and the last layer's input never leaves: nothing will move.",
            LowtideWarning,
            stacklevel=3,
        )


def _check_one(layer: object, index: int) -> None:
    if not isinstance(layer, torch.nn.Module):
        raise WrapError(
            explain(
                "only a module has an input that can be swapped",
                expected="a torch.nn.Module",
                got=type(layer).__name__,
                where=f"layers[{index}]",
                remedy="Pass the layers themselves; decorate a function instead.",
            )
        )
    found = attached(layer)
    if found is not None and found.recipe is not None:
        raise WrapError(
            explain(
                "the input of a layer moves already",
                expected="layers that no other swap_layer_inputs has named",
                got=f"a {type(layer).__name__} that one has",
                where=f"layers[{index}]",
                remedy="Call undo() on what that call returned, first.",
            )
        )
