"""Find the layers of a model, and sub-modules of a layer, by structure or by name.

Pure: it looks at names and classes, and changes nothing. Law: what is not found
raises, and says which names were looked for and which exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lowtide.errors import WrapError, explain

__all__ = [
    "ATTENTION",
    "FULLY_CONNECTED",
    "INPUT_NORM",
    "POST_ATTENTION_NORM",
    "Found",
    "as_patterns",
    "find_in",
    "find_layers",
    "has_norm_class",
    "join",
    "matches",
    "names_in",
    "outermost",
]

# The names that Megatron's, Hugging Face's and torch's models give to the same part of a layer.
ATTENTION = ("self_attn", "self_attention", "SelfAttention", "attn", "attention")
FULLY_CONNECTED = ("mlp", "feed_forward", "feedforward", "ffn", "ff", "DenseReluDense", "experts")
INPUT_NORM = (
    "input_norm",
    "input_layernorm",
    "ln_1",
    "ln1",
    "norm1",
    "layernorm_before",
    "self_attn_layer_norm",
    "attention_norm",
    "layer.0.layer_norm",
)
POST_ATTENTION_NORM = (
    "post_attention_norm",
    "post_attention_layernorm",
    "pre_mlp_layernorm",
    "ln_2",
    "ln2",
    "norm2",
    "layernorm_after",
    "final_layer_norm",
    "ffn_norm",
    "layer.1.layer_norm",
    "layer.2.layer_norm",
)

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_NORM = re.compile(r"(LayerNorm|RMSNorm)$")
# So many names are listed in a message; a model of 80 layers has thousands.
_LISTED = 16


@dataclass(frozen=True, eq=False)
class Found:
    """A module and its name, from the model or from the layer that was searched."""

    name: str
    module: nn.Module


def join(*parts: str) -> str:
    """One qualified name out of parts, of which some may be empty.

    >>> join("", "layers.0", "mlp")
    'layers.0.mlp'
    """
    return ".".join(part for part in parts if part)


def as_patterns(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Patterns as a tuple; a string may hold several, with commas between.

    >>> as_patterns("input_norm, self_attention")
    ('input_norm', 'self_attention')
    """
    if given is None:
        return ()
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(part.strip() for part in parts if part.strip())


def matches(name: str, pattern: str, *, anywhere: bool = False) -> bool:
    """Whether a qualified name matches a pattern, part by part: ``*`` stands for one part or a piece of it.

    With ``anywhere`` the pattern may describe the end of the name alone.

    >>> matches("model.layers.3", "model.layers.*"), matches("model.layers.3.mlp", "model.layers.*")
    (True, False)
    >>> matches("layer.1.DenseReluDense", "Dense*", anywhere=True)
    True
    """
    parts, wanted = name.split("."), pattern.split(".")
    if len(parts) < len(wanted) or (len(parts) > len(wanted) and not anywhere):
        return False
    return all(fnmatchcase(part, want) for part, want in zip(parts[-len(wanted) :], wanted, strict=True))


def has_norm_class(module: nn.Module) -> bool:
    """Whether this is a LayerNorm or RMSNorm, torch's own or one that is called so."""
    return bool(_NORM.search(type(module).__name__))


def names_in(names: Iterable[str]) -> str:
    """Names for a message, not all of them where they are many."""
    known = list(dict.fromkeys(names))
    shown = ", ".join(known[:_LISTED]) or "nothing"
    return shown if len(known) <= _LISTED else f"{shown}, and {len(known) - _LISTED} more"


def outermost(found: Iterable[Found]) -> list[Found]:
    """Those that do not lie inside of another one, each module once."""
    kept: list[Found] = []
    inside: set[int] = set()
    for one in found:
        if id(one.module) in inside:
            continue
        kept.append(one)
        inside.update(id(module) for module in one.module.modules())
    return kept


# ---- layers ----------------------------------------------------------------------------------------


def find_layers(model: nn.Module, patterns: str | Sequence[str] | None = None) -> list[Found]:
    """The repeated layers of a model, in the order in which it lists them.

    Without patterns: the elements of every ``ModuleList`` or ``Sequential`` of one class whose elements hold an
    attention module (an encoder's and a decoder's alike; lists of one only if there is no longer one); where
    nothing is called attention, those of the longest such list. Costs one walk over the module tree.

    Args:
        model: the whole model, or the part of it that this pipeline stage holds.
        patterns: qualified names with ``*`` for one part, such as ``"model.layers.*"``, with commas between.

    Raises:
        WrapError: nothing is found, or one match lies inside of another; the message says what exists.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)))
    >>> [layer.name for layer in find_layers(model)]
    ['0', '1', '2']
    """
    wanted = as_patterns(patterns)
    found = _by_pattern(model, wanted) if wanted else _by_structure(model)
    _check_apart(found)
    return found


def _by_pattern(model: nn.Module, wanted: tuple[str, ...]) -> list[Found]:
    named = [Found(name, module) for name, module in model.named_modules() if name]
    missing = [pattern for pattern in wanted if not any(matches(one.name, pattern) for one in named)]
    if missing:
        raise WrapError(
            explain(
                "no layer has such a name",
                expected=f"modules called {names_in(missing)}",
                got=f"lists of layers called {names_in(_described(model))}",
                where=type(model).__name__,
                remedy="Give the name of the list and '.*', such as 'model.layers.*'.",
            )
        )
    return [one for one in named if any(matches(one.name, pattern) for pattern in wanted)]


def _by_structure(model: nn.Module) -> list[Found]:
    lists = list(_lists_of_one_class(model))
    attending = [one for one in lists if any(_holds_attention(element) for element in _elements(one))]
    # A list of stages that hold lists of layers is not the list of layers; a list of experts holds no attention.
    innermost = [one for one in attending if not any(_lies_inside(other, one) for other in attending)]
    repeated = [one for one in innermost if len(_elements(one)) > 1] or innermost
    if not repeated:
        outer = [one for one in lists if not any(_lies_inside(one, other) for other in lists)]
        repeated = sorted(outer, key=lambda one: -len(_elements(one)))[:1]
    if not repeated:
        raise WrapError(
            explain(
                "no repeated layers were found",
                expected="a ModuleList or Sequential whose elements are layers of one class",
                got=f"lists called {names_in(_described(model))}",
                where=type(model).__name__,
                remedy="Name the layers by a pattern: layer_modules='model.layers.*'.",
            )
        )
    layers = [Found(join(one.name, key), element) for one in repeated for key, element in one.module.named_children()]
    return _each_once(layers)


def _lists_of_one_class(model: nn.Module) -> Iterator[Found]:
    for name, module in model.named_modules():
        elements = list(module.children())
        if not isinstance(module, _CONTAINERS) or len({type(element) for element in elements}) != 1:
            continue
        if all(
            any(True for _ in element.children()) and any(True for _ in element.parameters()) for element in elements
        ):
            yield Found(name, module)


def _elements(found: Found) -> list[nn.Module]:
    return list(found.module.children())


def _holds_attention(element: nn.Module) -> bool:
    def attends(name: str, module: nn.Module) -> bool:
        if not name or has_norm_class(module):
            return False
        return name.rsplit(".", maxsplit=1)[-1] in ATTENTION or "attention" in type(module).__name__.lower()

    return any(attends(name, module) for name, module in element.named_modules())


def _lies_inside(one: Found, other: Found) -> bool:
    return one is not other and (not other.name or one.name.startswith(other.name + "."))


def _each_once(layers: list[Found]) -> list[Found]:
    seen: dict[int, Found] = {}
    for layer in layers:
        seen.setdefault(id(layer.module), layer)
    return list(seen.values())


def _described(model: nn.Module) -> list[str]:
    return [
        f"{name or '(the model)'} ({len(list(module.children()))} x {type(next(module.children())).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, _CONTAINERS) and len({type(element) for element in module.children()}) == 1
    ]


def _check_apart(layers: list[Found]) -> None:
    apart = {id(layer.module) for layer in outermost(layers)}
    inside = [layer.name for layer in layers if id(layer.module) not in apart]
    if inside:
        raise WrapError(
            explain(
                "a layer lies inside of another one",
                expected="layers that follow each other",
                got=names_in(inside),
                where="layer_modules",
                remedy="Make the pattern narrower: '*' stands for one part of a name.",
            )
        )


# ---- parts of a layer ------------------------------------------------------------------------------


def find_in(layer: nn.Module, patterns: Sequence[str]) -> list[Found]:
    """The outermost sub-modules of a layer whose name, or the end of it, matches one of the patterns.

    >>> layer = nn.ModuleDict({"self_attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 4)})
    >>> [found.name for found in find_in(layer, ATTENTION)]
    ['self_attn']
    """
    named = (Found(name, module) for name, module in layer.named_modules() if name)
    return outermost(one for one in named if any(matches(one.name, p, anywhere=True) for p in patterns))
