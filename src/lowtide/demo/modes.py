"""The memory modes that the demonstration compares. This is all that a training script has to add.

Holds one function a mode. Each takes an ordinary model and changes, in place,
what its layers keep for backward; model, optimizer and training loop stay as
they are. Must never look inside the engine: public names only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lowtide
from lowtide.demo.model import GPT

__all__ = ["MODES", "Mode"]


@dataclass(frozen=True, slots=True)
class Mode:
    """A name for tables, a sentence for readers, and the function that puts a model into this mode."""

    name: str
    meaning: str
    apply: Callable[[GPT], object]


def plain(model: GPT) -> None:
    """Leave the model as it is: autograd keeps what it wants."""


def recompute(model: GPT) -> None:
    """Keep each layer's input, compute the rest again."""
    for layer in model.layers:
        lowtide.checkpoint_wrapper(layer)


def keep(model: GPT) -> None:
    """Keep what is dear to compute (matrix products and attention), compute the rest again."""
    for layer in model.layers:
        lowtide.checkpoint_wrapper(layer, lowtide.save_matmuls_and_attention())


def swap(model: GPT) -> None:
    """Send what is dear to compute to the lower tier, the layers' inputs too, and compute the rest again."""
    for layer in model.layers:
        lowtide.checkpoint_wrapper(layer, lowtide.swap_matmuls_and_attention(), swap_inputs=True)
    lowtide.auto(model)


def swap_all(model: GPT) -> None:
    """Send everything that a layer keeps to the lower tier; compute nothing again."""
    for layer in model.layers:
        lowtide.swap_wrapper(layer)
    lowtide.auto(model)


MODES: tuple[Mode, ...] = (
    Mode("plain", "Without lowtide: everything stays in memory.", plain),
    Mode("recompute", "Layers keep their input and compute the rest again.", recompute),
    Mode("keep", "Matrix products and attention are kept, the rest is computed again.", keep),
    Mode("swap", "Matrix products, attention and inputs go to the lower tier, the rest is computed again.", swap),
    Mode("swap all", "Everything that layers keep goes to the lower tier.", swap_all),
)
