"""Swap attention (A1-A3), norms (F4) and fully connected parts: which sub-modules of a layer are meant.

Pure: it looks at names and classes. Law: a name that no layer has raises; the
documents' names are translated, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import nn

from lowtide.errors import WrapError, explain
from lowtide.recipes.find import (
    ATTENTION,
    FULLY_CONNECTED,
    INPUT_NORM,
    POST_ATTENTION_NORM,
    Found,
    find_in,
    has_norm_class,
    names_in,
)

__all__ = ["find_fully_connected", "find_norms", "find_swapped"]

# The sources' names of sub-modules, and what other models call them.
_MEANINGS: Final = {
    "input_norm": INPUT_NORM,
    "self_attention": ATTENTION,
    "post_attention_norm": POST_ATTENTION_NORM,
}


def find_swapped(layers: Sequence[Found], patterns: Sequence[str] = ()) -> list[list[Found]]:
    """For each layer, the sub-modules whose saved tensors move; by default its self-attention alone (A1b).

    A layer may have none of them (a hybrid model's other layers); a name that no layer has is refused.

    Raises:
        WrapError: a name was found in no layer; the message says which exist.

    >>> layer = nn.ModuleDict({"ln_1": nn.LayerNorm(4), "attn": nn.Linear(4, 4)})
    >>> [[found.name for found in one] for one in find_swapped([Found("h.0", layer)], ["input_norm", "self_attention"])]
    [['ln_1', 'attn']]
    """
    asked = tuple(patterns) or ("self_attention",)
    found: list[list[Found]] = [[] for _ in layers]
    for pattern in asked:
        meant = _MEANINGS.get(pattern, (pattern,))
        per_layer = [find_in(layer.module, meant) for layer in layers]
        if not any(per_layer):
            raise _nothing("a sub-module to swap was found in no layer", meant, layers, "swap_modules='self_attn'")
        for known, new in zip(found, per_layer, strict=True):
            known.extend(one for one in new if all(one.module is not other.module for other in known))
    return found


def find_norms(layer: Found, patterns: Sequence[str] = ()) -> list[Found]:
    """The norms of a layer outside of its attention and MLP, or those that the patterns name.

    Raises:
        WrapError: there is none.

    >>> layer = nn.ModuleDict({"ln_1": nn.LayerNorm(4), "ln_2": nn.RMSNorm(4), "mlp": nn.Linear(4, 4)})
    >>> [found.name for found in find_norms(Found("h.0", layer))]
    ['ln_1', 'ln_2']
    """
    if patterns:
        found = find_in(layer.module, patterns)
    else:
        parts = find_in(layer.module, (*ATTENTION, *FULLY_CONNECTED))
        inner = {id(module) for part in parts for module in part.module.modules()}
        found = [
            Found(name, module)
            for name, module in layer.module.named_modules()
            if name and has_norm_class(module) and id(module) not in inner
        ]
    if not found:
        meant = patterns or ("*LayerNorm (a class)", "*RMSNorm (a class)")
        raise _nothing("no norm was found in a layer", meant, [layer], "norm_modules='input_layernorm'")
    return found


def find_fully_connected(layer: Found, patterns: Sequence[str] = ()) -> list[Found]:
    """The fully connected part of a layer (A2).

    Raises:
        WrapError: nothing is called like one.

    >>> layer = nn.ModuleDict({"attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 4)})
    >>> [found.name for found in find_fully_connected(Found("h.0", layer))]
    ['mlp']
    """
    meant = tuple(patterns) or FULLY_CONNECTED
    found = [one for one in find_in(layer.module, meant) if not isinstance(one.module, (nn.ModuleList, nn.ModuleDict))]
    if not found:
        what = "no fully connected part was found in a layer"
        raise _nothing(what, meant, [layer], "fully_connected_modules='mlp'")
    return found


def _nothing(problem: str, meant: Sequence[str], layers: Sequence[Found], example: str) -> WrapError:
    there = [name for layer in layers[:1] for name, _ in layer.module.named_modules() if name]
    return WrapError(
        explain(
            problem,
            expected=names_in(meant),
            got=names_in(there) or "no sub-modules",
            where=layers[0].name if layers else "no layers",
            remedy=f"Name it as the layer does: {example}.",
        )
    )
