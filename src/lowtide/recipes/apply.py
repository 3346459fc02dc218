"""``lowtide.apply``: one call that gives every layer of a model what a configuration asks for.

Law: everything is decided before anything is wrapped; an error leaves the model
as it was; ``undo`` takes off exactly what was put on, and what the user wrapped
is never touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import nn

from lowtide.activations.inplace import attached, detach_if_idle
from lowtide.activations.links import Place
from lowtide.activations.region import Region
from lowtide.activations.wrappers import auto, checkpoint_wrapper, swap_wrapper
from lowtide.errors import ConfigError, WrapError, explain
from lowtide.optim.cpu import CpuOptimizer
from lowtide.optim.swap import SwapOptimizer
from lowtide.policy import PolicyFn
from lowtide.recipes.activation_function import ActivationPolicy, keep_everything
from lowtide.recipes.config import MemoryConfig
from lowtide.recipes.find import join, names_in
from lowtide.recipes.optimizer import check_optimizer, wrap_optimizer
from lowtide.recipes.plan import LayerPlan, Role, Wrap, make_plan
from lowtide.residency.manager import SwapManager

__all__ = ["Applied", "AppliedRow", "apply"]

_POLICIES: Final[dict[Role, Callable[[], PolicyFn]]] = {Role.ACTIVATION: ActivationPolicy, Role.KEEP: keep_everything}


@dataclass(frozen=True)
class AppliedRow:
    """What one layer got.

    Args:
        layer: its qualified name.
        answers: in words, one for each kind of region, such as ``"swap: self_attn"``; empty if it keeps everything.
        regions: qualified names of the modules that became regions.
        notes: what does not do all that was asked for, and why.
    """

    layer: str
    answers: tuple[str, ...]
    regions: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Applied:
    """What :func:`apply` did: ``rows``, ``str(applied)`` as a table, ``optimizer``, and ``undo()``.

    ``optimizer`` is the one to train with: the wrapped one, the given one where nothing was asked for it, or None.
    Holds the model's modules weakly.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(2)))
    >>> applied = apply(model, MemoryConfig(full_recompute_num_layers=1))
    >>> [row.answers for row in applied.rows]
    [('recompute the layer',), ()]
    >>> applied.undo()
    """

    def __init__(self, config: MemoryConfig) -> None:
        self.config = config
        self.rows: tuple[AppliedRow, ...] = ()
        self.optimizer: torch.optim.Optimizer | None = None
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Put everything back as it was. Repeating it is harmless; graphs that are alive run backward as before."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        names = [row.layer for row in self.rows]
        width = max(map(len, names), default=0)
        lines = [f"lowtide.apply: {len(self.rows)} layers"]
        for row in self.rows:
            text = "; ".join(row.answers) or "keeps everything"
            notes = f"  ({'; '.join(row.notes)})" if row.notes else ""
            lines.append(f"  {row.layer:<{width}}  {text}{notes}")
        if isinstance(self.optimizer, (SwapOptimizer, CpuOptimizer)):
            lines += [
                f"{type(self.optimizer).__name__}:",
                *(f"  {line}" for line in str(self.optimizer.report()).split("\n")),
            ]
        return "\n".join(lines)


def apply(model: nn.Module, config: MemoryConfig, optimizer: torch.optim.Optimizer | None = None) -> Applied:
    """Give the layers of a model, and its optimizer, what a configuration asks for; say what each got.

    Effect: modules are wrapped in place, and chained where something moves. An optimizer is not changed in place: from
    then on use ``applied.optimizer``. Cost: that of the regions it makes, and of the wrapped optimizer.
    Hazard: the model must not be wrapped in these layers already. It is atomic: an error leaves the model as it was.

    Args:
        model: the whole model, or the part of it that this pipeline stage (or chunk) holds.
        config: what to do.
        optimizer: the optimizer of the model's parameters; needed for ``swap_optimizer``, ``reuse_fp32_param`` and
            ``optimizer_offload``.

    Raises:
        ConfigError: the configuration does not fit itself, the model or the optimizer.
        CapacityError: the lower tier has no room for the optimizer's state.
        WrapError: a name was found nowhere, or something in these layers is wrapped already.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(2)))
    >>> applied = apply(model, MemoryConfig(recompute_activation_function=True, layer_modules="*"))
    >>> print(applied)
    lowtide.apply: 2 layers
      0  recompute the activation function: 1
      1  recompute the activation function: 1
    >>> applied.undo()
    """
    if not isinstance(model, nn.Module) or not isinstance(config, MemoryConfig):
        raise ConfigError(
            explain(
                "apply takes a model and a configuration",
                expected="a torch.nn.Module and a lowtide.MemoryConfig",
                got=f"{type(model).__name__} and {type(config).__name__}",
                where="lowtide.apply",
                remedy="Build one with MemoryConfig(...), from_dict, from_yaml or from_args.",
            )
        )
    config.validate()
    check_optimizer(config, optimizer)
    plans = make_plan(model, config) if config.treats_layers else []
    if any(plan.wraps for plan in plans) or config.swaps:
        _refuse_what_is_wrapped(model, plans)
    chained = _chain_of(plans, config)
    applied = Applied(config)
    try:
        for plan in plans:
            for wrap in plan.wraps:
                _wrap(wrap, plan.place, config, applied._undo)
        if config.swap_layer_input:
            _swap_layer_inputs(plans, config, applied._undo)
        _schedule(model, chained, config, applied._undo)
        applied.optimizer = wrap_optimizer(model, config, optimizer, applied._undo)
    except BaseException:
        applied.undo()
        raise
    applied.rows = tuple(_row(plan, config) for plan in plans)
    return applied


# ---- checks ----------------------------------------------------------------------------------------


def _refuse_what_is_wrapped(model: nn.Module, plans: Iterable[LayerPlan]) -> None:
    """Whatever is a region in one of the layers, or around them, was put there by somebody else."""
    inside = {id(module) for plan in plans for module in plan.layer.module.modules()}
    layers = {id(plan.layer.module) for plan in plans}
    wrapped: list[str] = []
    for name, module in model.named_modules():
        found = attached(module)
        if found is None or (found.region is None and not found.is_unit and found.recipe is None):
            continue
        if id(module) in inside or any(id(one) in layers for one in module.modules()):
            wrapped.append(name or type(module).__name__)
    if wrapped:
        raise WrapError(
            explain(
                "something in these layers is wrapped or chained already",
                expected="layers without regions",
                got=names_in(wrapped),
                where="lowtide.apply",
                remedy="Undo it first: Applied.undo() or lowtide.unwrap(module).",
            )
        )
    others = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", None) is True]
    if others:
        raise WrapError(
            explain(
                "the model recomputes its layers by itself",
                expected="gradient checkpointing switched off",
                got=f"gradient_checkpointing is True in {names_in(name or 'the model' for name in others)}",
                where="lowtide.apply",
                remedy="Call model.gradient_checkpointing_disable() first (newer: activation_checkpointing_disable).",
            )
        )


def _chain_of(plans: list[LayerPlan], config: MemoryConfig) -> list[nn.Module]:
    """The layers to chain; none where something else says when bytes move."""
    if not config.swaps or config.swap_schedule != "chain":
        return []
    # Behind the first layer of a chunk nothing is kept that could move.
    links = [plan for plan in plans if _keeps_input(plan.place)]
    if len(links) == 1:
        raise ConfigError(
            explain(
                "a chain of one layer moves nothing: its last layer always stays",
                expected="two layers or more" if len(plans) == 1 else "two chunks of layers or more",
                got=f"one, {names_in(plan.layer.name for plan in plans)}",
                where="swap_schedule='chain'",
                remedy="Use swap_schedule='none' and drive groups by hand, or do not swap.",
            )
        )
    # swap_layer_inputs chains the layers itself.
    return [] if config.swap_layer_input else [plan.layer.module for plan in links]


# ---- acts ------------------------------------------------------------------------------------------


def _wrap(wrap: Wrap, place: Place | None, config: MemoryConfig, undo: list[Callable[[], None]]) -> None:
    if wrap.role is Role.SWAP:
        swap_wrapper(wrap.module, name=wrap.name)
    elif wrap.role in {Role.WHOLE_LAYER, Role.FULLY_CONNECTED}:
        whole = wrap.role is Role.WHOLE_LAYER
        moves = config.swap_inputs and whole and _keeps_input(place)
        checkpoint_wrapper(wrap.module, None, moves, name=wrap.name)
    else:
        # Norms recompute whole, but never by running Python again: that would leave the layer's region.
        policy = _POLICIES[wrap.role]() if wrap.role in _POLICIES else None
        checkpoint_wrapper(wrap.module, policy, recompute="replay", name=wrap.name)
    found = attached(wrap.module)
    assert found is not None
    assert found.region is not None
    if wrap.role is Role.WHOLE_LAYER:
        found.region.place = place
    undo.append(_taker_off(wrap.module, found.region))


def _keeps_input(place: Place | None) -> bool:
    """Whether a layer that recomputes whole is the first of its chunk."""
    return place is None or place.index == 0


def _taker_off(module: nn.Module, region: Region) -> Callable[[], None]:
    reference = weakref.ref(module)

    def take_off() -> None:
        module = reference()
        found = None if module is None else attached(module)
        # Somebody may have unwrapped it meanwhile, or put another region in its place, which is theirs.
        if module is not None and found is not None and found.region is region:
            found.region = None
            detach_if_idle(module)

    return take_off


def _schedule(model: nn.Module, chained: list[nn.Module], config: MemoryConfig, undo: list[Callable[[], None]]) -> None:
    if config.swaps and config.swap_schedule == "auto":
        undo.append(auto(model).undo)
    for first, second in pairwise(chained):
        SwapManager().set_forward_prefetch_layer(first, second)
        undo.append(_unlinker(first, second))


def _unlinker(first: nn.Module, second: nn.Module) -> Callable[[], None]:
    references = [weakref.ref(first), weakref.ref(second)]
    link = SwapManager().link_from(first)

    def unlink() -> None:
        layers = [layer for layer in (reference() for reference in references) if layer is not None]
        if layers and layers[0] is references[0]():
            SwapManager().unlink(layers[0], link)
        for layer in layers:
            found = attached(layer)
            if found is not None and found.is_unit and not SwapManager().is_chained(layer):
                found.is_unit = False
                detach_if_idle(layer)

    return unlink


def _swap_layer_inputs(plans: list[LayerPlan], config: MemoryConfig, undo: list[Callable[[], None]]) -> None:
    from lowtide.recipes.layer_inputs import swap_layer_inputs  # noqa: PLC0415 - only where it is asked for

    layers = [plan.layer.module for plan in plans]
    undo.append(swap_layer_inputs(layers, prefetch=config.swap_layer_input_prefetch).undo)


# ---- words -----------------------------------------------------------------------------------------


def _row(plan: LayerPlan, config: MemoryConfig) -> AppliedRow:
    answers: list[str] = []
    for role in Role:
        wraps = plan.with_role(role)
        if not wraps or role is Role.KEEP:
            continue
        if role is Role.WHOLE_LAYER:
            first = _keeps_input(plan.place)
            moves = ", its inputs move" if config.swap_inputs and first else ""
            answers.append(role.value + moves + ("" if first else " and its input"))
        else:
            prefix = len(join(plan.layer.name, ""))
            answers.append(f"{role.value}: {', '.join(wrap.name[prefix:].lstrip('.') for wrap in wraps)}")
    if config.swap_layer_input:
        answers.append("swap the layer's input")
    return AppliedRow(plan.layer.name, tuple(answers), tuple(wrap.name for wrap in plan.wraps), tuple(plan.notes))
