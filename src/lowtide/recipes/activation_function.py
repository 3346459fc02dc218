"""Recompute of activation functions (F2): what an MLP widens is computed again, not kept.

Holds the policy and the search for the modules that it governs. Law: matrix
products are never run again; what is freed is what the second projection would
have kept of the activation function's output (and, of a gate, the gate's factor).

[Note: where the consumer must be]
    A region can spare its output only if whoever saves it runs inside of the
    same outermost region. So the module that becomes a region must hold both
    projections. Where the second one lies outside (BERT's ``intermediate`` and
    ``output``, OPT's ``fc1`` and ``fc2`` in the layer itself), the whole layer
    becomes a region that keeps everything, and the activation one inside of it.

[Note: adapters]
    Pointwise operators inside of a projection (the sum of a LoRA adapter) are
    not the activation's. Computing that sum again would keep both of its terms
    instead, so a projection that has modules of its own keeps its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from lowtide.errors import WrapError, explain
from lowtide.policy import CheckpointPolicy, OperatorPolicy
from lowtide.recipes.find import ATTENTION, FULLY_CONNECTED, Found, find_in, join, names_in, outermost

__all__ = ["ActivationPolicy", "Holder", "find_holders", "frees_nothing", "is_activation", "keep_everything"]

# Pointwise by nature, but without torch's tag.
_UNTAGGED: Final = frozenset({"aten::glu", "aten::hardswish", "aten::_prelu_kernel", "aten::log_sigmoid_forward"})
# Their backward reads the result itself: computing it again would keep the input instead, and spare nothing.
_READ_BY_BACKWARD: Final = frozenset({"aten::relu", "aten::relu_"})
_ACTIVATION_FILES: Final = ("torch.nn.modules.activation", "transformers.activations")
_NO_ACTIVATIONS: Final = (nn.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d)


@dataclass(frozen=True)
class ActivationPolicy:
    """Pointwise operators are computed again, all other results are kept.

    ``torch.Tag.pointwise`` says which they are: silu, gelu, the product of a gate, and what a hand-written
    activation is made of. The result of relu is kept, since its own backward reads it.

    >>> policy = ActivationPolicy()
    >>> policy(None, torch.ops.aten.silu.default).name, policy(None, torch.ops.aten.mm.default).name
    ('PREFER_RECOMPUTE', 'PREFER_SAVE')
    """

    def __call__(self, _ctx: object, op: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        """The answer for one operator, whatever its arguments."""
        name = op._schema.name
        if name in _READ_BY_BACKWARD or not (torch.Tag.pointwise in op.tags or name in _UNTAGGED):
            return CheckpointPolicy.PREFER_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def keep_everything() -> OperatorPolicy:
    """The policy of a region that is there for the regions inside of it: it keeps what plain autograd would.

    >>> keep_everything()(None, torch.ops.aten.silu.default).name
    'PREFER_SAVE'
    """
    save = CheckpointPolicy.PREFER_SAVE
    return OperatorPolicy((), save, otherwise=save, report_unused=False)


@dataclass(frozen=True)
class Holder:
    """A module whose pointwise operators are an activation function.

    ``projections`` lie inside of it and keep their results; ``consumed_outside``: the layer must be a region too.
    """

    found: Found
    projections: tuple[Found, ...]
    consumed_outside: bool
    activations: tuple[nn.Module, ...]


def is_activation(module: nn.Module) -> bool:
    """Whether a module is an activation function of torch or of transformers.

    >>> is_activation(nn.SiLU()), is_activation(nn.Softmax(-1))
    (True, False)
    """
    if isinstance(module, _NO_ACTIVATIONS):
        return False
    return any(kind.__module__ in _ACTIVATION_FILES for kind in type(module).__mro__)


def frees_nothing(holder: Holder) -> bool:
    """Whether only ReLU is there: what the projection reads is what ReLU's backward reads, and is kept once anyway."""
    return bool(holder.activations) and all(isinstance(one, nn.ReLU) for one in holder.activations)


def find_holders(layer: Found, patterns: Sequence[str] = ()) -> list[Holder]:
    """The modules of a layer that hold an activation function outside of attention.

    Without patterns: those with an activation module as a child; where there is none, those that are called
    like an MLP (activation functions that are called as functions).

    Raises:
        WrapError: the layer holds none; the message says what was looked for and what exists.

    >>> layer = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))})
    >>> [holder.found.name for holder in find_holders(Found("layers.0", layer))]
    ['mlp']
    """
    if patterns:
        found = find_in(layer.module, patterns)
        looked_for = names_in(patterns)
    else:
        found = _with_activation_child(layer.module) or [
            one for one in find_in(layer.module, FULLY_CONNECTED) if len(_arms(one.module)) > 1
        ]
        looked_for = f"a module with an activation function as its child, or one called {names_in(FULLY_CONNECTED)}"
    if not found:
        raise WrapError(
            explain(
                "no activation function was found in a layer",
                expected=looked_for,
                got=names_in(name for name, _ in layer.module.named_modules() if name) or "no sub-modules",
                where=layer.name,
                remedy="Name the module that holds both projections: activation_modules='mlp'.",
            )
        )
    return [_holder(one) for one in found]


def _with_activation_child(layer: nn.Module) -> list[Found]:
    attention = {id(m) for one in find_in(layer, ATTENTION) for m in one.module.modules()}
    found: list[Found] = []
    for name, module in layer.named_modules():
        # A convolution beside it is a mixer's (Mamba): its pointwise operators are a scan, no activation function.
        if id(module) in attention or any(isinstance(child, nn.Conv1d) for child in module.children()):
            continue
        acts = [Found(join(name, key), child) for key, child in module.named_children() if is_activation(child)]
        if not acts:
            continue
        # The layer itself holds more than its activation; a list of modules has no forward of its own.
        alone = module is layer or isinstance(module, (nn.ModuleList, nn.ModuleDict))
        found.extend(acts if alone else [Found(name, module)])
    return outermost(found)


def _arms(module: nn.Module) -> list[Found]:
    """The children with matrices: projections. Matrices of the module's own (stacked experts) count as well."""
    own = [Found("", module) for p in module.parameters(recurse=False) if p.dim() > 1]
    children = [
        Found(name, child)
        for name, child in module.named_children()
        if not is_activation(child) and any(p.dim() > 1 for p in child.parameters())
    ]
    return own + children


def _holder(found: Found) -> Holder:
    arms = _arms(found.module)
    acts = [found.module] if is_activation(found.module) else [c for c in found.module.children() if is_activation(c)]
    inner = tuple(
        Found(join(found.name, arm.name), arm.module)
        for arm in arms
        if arm.name and any(True for _ in arm.module.children())
    )
    return Holder(found, inner, consumed_outside=len(arms) < 2, activations=tuple(acts))  # noqa: PLR2004 - up and down
