"""From a configuration and a model to the list of wraps: decides everything, changes nothing.

Law: no layer gets two kinds of recompute, no sub-module two answers; what
cannot be met raises here, before anything is wrapped.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from lowtide.activations.links import Chunk, Place
from lowtide.errors import ConfigError, LowtideWarning, explain
from lowtide.recipes.activation_function import find_holders, frees_nothing
from lowtide.recipes.attention import find_fully_connected, find_norms, find_swapped
from lowtide.recipes.config import MemoryConfig
from lowtide.recipes.find import Found, as_patterns, find_layers, join, names_in

__all__ = ["LayerPlan", "Role", "Wrap", "make_plan"]


class Role(enum.Enum):
    """What a wrapped module is there for."""

    WHOLE_LAYER = "recompute the layer"
    FULLY_CONNECTED = "recompute the fully connected part"
    ACTIVATION = "recompute the activation function"
    NORM = "recompute the norm"
    SWAP = "swap"
    KEEP = "keep"  # a region for the sake of those inside, or a projection inside of one


@dataclass(frozen=True, eq=False)
class Wrap:
    """One module that becomes a region."""

    name: str
    module: nn.Module
    role: Role


@dataclass(eq=False)
class LayerPlan:
    """What one layer gets."""

    layer: Found
    place: Place | None = None  # in a chunk of several layers
    wraps: list[Wrap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Found, role: Role) -> None:
        """One more region, unless this module is one of the same role already."""
        name = self.layer.name if found.module is self.layer.module else join(self.layer.name, found.name)
        for known in self.wraps:
            if known.module is not found.module:
                continue
            if known.role is role:
                return
            raise _two_answers(name, known.role, role)
        self.wraps.append(Wrap(name, found.module, role))

    def with_role(self, role: Role) -> list[Wrap]:
        """The regions of one kind."""
        return [wrap for wrap in self.wraps if wrap.role is role]


def _two_answers(name: str, first: Role, second: Role) -> ConfigError:
    return ConfigError(
        explain(
            "a module was given two answers",
            expected="one of them",
            got=f"'{first.value}' and '{second.value}'",
            where=name,
            remedy="Change the counts, so that each layer gets one kind, or the patterns.",
        )
    )


def make_plan(model: nn.Module, config: MemoryConfig) -> list[LayerPlan]:
    """Decide which layer gets what.

    Raises:
        ConfigError: the configuration does not fit this model.
        WrapError: a name or pattern was found nowhere.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(2)))
    >>> plans = make_plan(model, MemoryConfig(full_recompute_num_layers=1))
    >>> [[wrap.role.value for wrap in plan.wraps] for plan in plans]
    [['recompute the layer'], []]
    """
    config.validate()
    plans = [LayerPlan(layer) for layer in find_layers(model, config.layer_modules)]
    numbers = _Numbers(config, len(plans))
    numbers.check()
    for index, plan in enumerate(plans):
        if numbers.whole(index):
            plan.add(plan.layer, Role.WHOLE_LAYER)
    if config.chunk_layers > 1:
        _plan_chunks(plans, config.chunk_layers)
    _plan_parts(plans, config, numbers)
    for plan in plans:
        _check_nesting(plan)
    return plans


def _plan_chunks(plans: Sequence[LayerPlan], size: int) -> None:
    """Give each layer its place in a chunk; an encoder's layers and a decoder's share none."""
    lists: dict[str, list[LayerPlan]] = {}
    for plan in plans:
        lists.setdefault(plan.layer.name.rpartition(".")[0], []).append(plan)
    longest = max(map(len, lists.values()))
    if size > longest:
        raise ConfigError(
            explain(
                "a chunk of more layers than there are",
                expected=f"at most {longest} (layers of the longest list in this model or pipeline stage)",
                got=str(size),
                where="full_recompute_num_layers with recompute_method='uniform'",
                remedy=f"Use {longest} to keep one input for all of them.",
            )
        )
    for layers in lists.values():
        for first in range(0, len(layers), size):
            members, chunk = layers[first : first + size], Chunk()
            for index, plan in enumerate(members):
                plan.place = Place(chunk, index, len(members))


class _Numbers:
    """Which layer counts among the first so many, over all chunks of this pipeline rank (F3)."""

    def __init__(self, config: MemoryConfig, layers: int) -> None:
        self.config = config
        self.layers = layers
        self.in_all = layers * config.virtual_pipeline_chunks
        self.full = self.in_all if config.full_layers is None else config.full_layers

    def place(self, index: int) -> int:
        """The place of a layer of this chunk among those of all chunks: first layers of every chunk come first."""
        return index * self.config.virtual_pipeline_chunks + self.config.virtual_pipeline_rank

    def whole(self, index: int) -> bool:
        return self.place(index) < self.full

    def after_whole(self, index: int, count: int | None) -> bool:
        """Whether a layer is one of the ``count`` after those that recompute whole."""
        beyond = self.place(index) - self.full
        return beyond >= 0 and (count is None or beyond < count)

    def check(self) -> None:
        config = self.config
        counts = {"full_recompute_num_layers": config.full_layers, "swap_attention": config.fully_connected_layers}
        for name, count in counts.items():
            self._check_room(name, count or 0)
        for name, wanted, count in (
            ("recompute_activation_function", config.recompute_activation_function, self._activation_count()),
            ("recompute_norm", config.recompute_norm, config.recompute_norm_num_layers),
        ):
            if not wanted:
                continue
            self._check_room(f"{name}_num_layers", self.full + (count or 0), f"{self.full} of them whole")
            self._check_sum(name, count)

    def _activation_count(self) -> int | None:
        return self.config.recompute_activation_function_num_layers

    def _check_room(self, name: str, count: int, of_which: str = "") -> None:
        if count > self.in_all:
            field_name = "swap_attention_recompute_num_layers" if name == "swap_attention" else name
            raise ConfigError(
                explain(
                    "more layers are asked for than there are",
                    expected=f"at most {self.in_all} (layers of this pipeline stage)",
                    got=f"{count}{', ' * bool(of_which)}{of_which}",
                    where=field_name,
                    remedy="Counts are those of one pipeline stage: at most num_layers / pipeline_stages.",
                )
            )

    def _check_sum(self, name: str, count: int | None) -> None:
        if count is None or not self.full or self.config.pipeline_stages > 1 or self.full + count == self.in_all:
            return
        warnings.warn(
            f"{self.full} layers recompute whole and {count} get {name}, of {self.in_all}: without pipeline stages the "
            f"two counts should sum to the number of layers; {self.in_all - self.full - count} layers get neither. "
            f"Leave {name}_num_layers out to take all the others.",
            LowtideWarning,
            stacklevel=5,
        )


def _plan_parts(plans: Sequence[LayerPlan], config: MemoryConfig, numbers: _Numbers) -> None:
    for index, plan in enumerate(plans):
        if config.recompute_activation_function and numbers.after_whole(index, numbers._activation_count()):
            _plan_activation(plan, as_patterns(config.activation_modules))
        if config.recompute_norm and numbers.after_whole(index, config.recompute_norm_num_layers):
            _plan_norms(plan, as_patterns(config.norm_modules))
        if numbers.place(index) < config.fully_connected_layers:
            if numbers.whole(index):
                raise _two_answers(plan.layer.name, Role.WHOLE_LAYER, Role.FULLY_CONNECTED)
            for found in find_fully_connected(plan.layer, as_patterns(config.fully_connected_modules)):
                plan.add(found, Role.FULLY_CONNECTED)
    if config.swap_attention:
        _plan_swap([plan for plan in plans if not plan.with_role(Role.WHOLE_LAYER)], config)
    _say_what_frees_nothing(plans)


def _plan_activation(plan: LayerPlan, patterns: Sequence[str]) -> None:
    for holder in find_holders(plan.layer, patterns):
        if holder.consumed_outside:
            plan.add(plan.layer, Role.KEEP)
        plan.add(holder.found, Role.ACTIVATION)
        for projection in holder.projections:
            plan.add(projection, Role.KEEP)
        if frees_nothing(holder):
            plan.notes.append(f"{holder.found.name}: ReLU")


def _plan_norms(plan: LayerPlan, patterns: Sequence[str]) -> None:
    # What a norm gives is saved by the projections behind it: they must run inside of the same region.
    plan.add(plan.layer, Role.KEEP)
    for found in find_norms(plan.layer, patterns):
        plan.add(found, Role.NORM)


def _plan_swap(plans: Sequence[LayerPlan], config: MemoryConfig) -> None:
    patterns = as_patterns(config.swap_modules)
    if not plans:
        raise ConfigError(
            explain(
                "swap_attention has no layer left",
                expected="layers that do not recompute whole",
                got="none",
                where="swap_attention",
                remedy="Lower full_recompute_num_layers, or leave swap_attention out.",
            )
        )
    for plan, found in zip(plans, find_swapped([plan.layer for plan in plans], patterns), strict=True):
        for one in found:
            plan.add(one, Role.SWAP)
        if not found:
            plan.notes.append("no sub-module of these names to swap")
        elif plan.with_role(Role.NORM):
            plan.notes.append("what a swapped module saves of a norm moves, and is not computed again")


def _say_what_frees_nothing(plans: Sequence[LayerPlan]) -> None:
    relus = [f"{plan.layer.name}.{note}" for plan in plans for note in plan.notes if note.endswith(": ReLU")]
    if relus:
        warnings.warn(
            f"recompute_activation_function frees nothing where ReLU alone stands before a projection "
            f"({names_in(relus)}): ReLU's backward reads its output, which is kept once for both. "
            "A dropout behind it is computed again. Leave these layers out with the layer counts or the patterns.",
            LowtideWarning,
            stacklevel=5,
        )


def _check_nesting(plan: LayerPlan) -> None:
    """Regions may lie inside of one that keeps, not inside of one that recomputes or swaps."""
    inside: Callable[[Wrap, Wrap], bool] = lambda one, other: (  # noqa: E731 - read where it is used
        one is not other and any(module is one.module for module in other.module.modules())
    )
    for outer in plan.wraps:
        for inner in plan.wraps:
            if outer.role is Role.KEEP or inner.role is Role.KEEP or not inside(inner, outer):
                continue
            raise _two_answers(inner.name, outer.role, inner.role)
