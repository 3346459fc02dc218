"""The five decorators for layers whose class you write yourself (L5-L7); the same as :func:`swap_layer_inputs`.

Law: a layer without a manager runs its original forward. What a decorator marks
or chains it does at the first forward, when all layers of a tag exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lowtide.activations.inplace import attached
from lowtide.errors import UnsupportedError, explain
from lowtide.recipes.layer_inputs_manager import SwapLayerInputManager
from lowtide.recipes.layer_inputs_tensors import marked

__all__ = [
    "swap_layer_input_fboverlap_1f1b_wrapper",
    "swap_layer_input_fboverlap_backward_wrapper",
    "swap_layer_input_fboverlap_forward_wrapper",
    "swap_layer_input_forward_wrapper",
    "swap_layer_input_init_wrapper",
]

F = TypeVar("F", bound=Callable[..., Any])

# Where a forward-backward overlap call has the graph of its backward layer, the layer itself not counted.
_BWD_LAYER_GRAPH = 3


def swap_layer_input_init_wrapper(fn: F) -> F:
    """Decorate a layer's ``__init__``: register the layer for the swap of layer inputs (L5).

    The layer gets an attribute ``swap_manager``. The tag is its attribute
    ``module_tag``, or ``"default"``. A layer that is registered already (a
    subclass and its base are both decorated) is not registered twice, and one
    with ``is_mtp`` true is not registered at all: the layer that it calls is.

    >>> class Layer(torch.nn.Module):
    ...     @swap_layer_input_init_wrapper
    ...     def __init__(self) -> None:
    ...         super().__init__()
    >>> Layer().swap_manager.layer_idx
    0
    """

    @functools.wraps(fn)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        fn(self, *args, **kwargs)
        known = _manager_of(self)
        if getattr(self, "is_mtp", False):
            if known is not None:
                known.unregister()
                del self.swap_manager
        elif known is None:
            self.swap_manager = SwapLayerInputManager(self, getattr(self, "module_tag", "default"))

    return wrapper  # type: ignore[return-value]


def _manager_of(layer: Any) -> SwapLayerInputManager | None:
    found = getattr(layer, "swap_manager", None)
    return found if isinstance(found, SwapLayerInputManager) and found.belongs_to(layer) else None


def _forward(layer: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    manager = _manager_of(layer)
    named = attached(layer) if isinstance(layer, torch.nn.Module) else None
    if manager is None or not torch.is_grad_enabled() or (named is not None and named.recipe is not None):
        return fn(layer, *args, **kwargs)
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            explain(
                "a compiled graph cannot swap",
                expected="save or recompute under torch.compile",
                got="a layer whose input is to move",
                where=type(layer).__name__,
                remedy="Do not compile the decorated forward, or do not decorate it.",
            )
        )
    return _call(manager, functools.partial(fn, layer), args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call(manager: SwapLayerInputManager, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if isinstance(hidden, torch.Tensor) and marked(hidden) is None:
        hidden.swap_this_tensor = True  # type: ignore[attr-defined]
    return manager.call(forward, args, kwargs)


def swap_layer_input_forward_wrapper(fn: F) -> F:
    """Decorate a layer's ``forward``: let its input move (L5).

    ``hidden_states`` is ``kwargs["hidden_states"]`` or the first positional
    tensor; it is marked ``swap_this_tensor = True``, unless it has that mark.

    Raises:
        CapacityError: at the first layer's first call, where the lower tier is too small.

    >>> class Layer(torch.nn.Linear):
    ...     __init__ = swap_layer_input_init_wrapper(torch.nn.Linear.__init__)
    ...     forward = swap_layer_input_forward_wrapper(torch.nn.Linear.forward)
    >>> model = torch.nn.Sequential(*[Layer(4, 4) for _ in range(3)])
    >>> model(torch.ones(2, 4)).sum().backward()
    """

    @functools.wraps(fn)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, fn, args, kwargs)

    return wrapper  # type: ignore[return-value]


def swap_layer_input_fboverlap_forward_wrapper(fn: F) -> F:
    """Decorate ``fn(layer, hidden_states, ...)``, the forward of a schedule that overlaps forward and backward (L7).

    The same as :func:`swap_layer_input_forward_wrapper`, with or without
    recompute. Hazard: what ``fn`` puts into its layer graph stays alive; a graph
    that holds the input keeps it on the device, and the report counts it.

    >>> @swap_layer_input_fboverlap_forward_wrapper
    ... def layer_forward(layer, hidden_states):
    ...     return layer(hidden_states)
    >>> layer_forward(torch.nn.Linear(2, 2), torch.ones(1, 2)).shape  # not registered: the original
    torch.Size([1, 2])
    """

    @functools.wraps(fn)
    def wrapper(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(layer, fn, args, kwargs)

    return wrapper  # type: ignore[return-value]


def swap_layer_input_fboverlap_1f1b_wrapper(fn: F) -> F:
    """Decorate ``fn(fwd_layer, hidden_states, ...)``, which runs one layer's forward and another one's backward (L7).

    The backward layer is that of ``kwargs["bwd_layer_graph"]``, or of ``args[3]``
    (``fwd_layer`` not counted) if that has a ``layer``; without one, it is a
    forward alone. What the layers before the backward layer need comes back
    while the forward layer runs.

    >>> @swap_layer_input_fboverlap_1f1b_wrapper
    ... def both(fwd_layer, hidden_states, bwd_layer_graph=None):
    ...     return fwd_layer(hidden_states)
    >>> both(torch.nn.Linear(2, 2), torch.ones(1, 2), bwd_layer_graph=None).shape
    torch.Size([1, 2])
    """

    @functools.wraps(fn)
    def wrapper(fwd_layer: Any, *args: Any, **kwargs: Any) -> Any:
        graph = kwargs.get("bwd_layer_graph")
        if graph is None and len(args) > _BWD_LAYER_GRAPH:
            graph = args[_BWD_LAYER_GRAPH]
        _enter_backward(graph)
        return _forward(fwd_layer, fn, args, kwargs)

    return wrapper  # type: ignore[return-value]


def swap_layer_input_fboverlap_backward_wrapper(fn: F) -> F:
    """Decorate ``fn(output_grad, layer_graph, ...)``, the backward of such a schedule; the layer is ``args[1].layer``.

    What this layer and those before it need comes back.

    >>> @swap_layer_input_fboverlap_backward_wrapper
    ... def layer_backward(output_grad, layer_graph):
    ...     return output_grad
    >>> layer_backward(1.0, None)
    1.0
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _enter_backward(args[1] if len(args) > 1 else None)
        return fn(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def _enter_backward(graph: Any) -> None:
    manager = _manager_of(getattr(graph, "layer", None))
    if manager is not None:
        manager.enter_backward()
