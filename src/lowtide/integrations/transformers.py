"""Hugging Face transformers: a callback for ``Trainer`` (and TRL's trainers), and a call for loops of one's own.

Law: with the callback a run's bits are those of the run without it; the
trainer's own gradient checkpointing must be off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowtide.integrations.session import (
    TrainingCallback,
    as_config,
    base_class,
    joined,
    refuse_other_checkpointing,
)
from lowtide.recipes.apply import Applied, apply
from lowtide.recipes.config import MemoryConfig

__all__ = ["LowtideCallback", "memory_enable"]

# What a trainer's arguments may ask for that does the same work; the first is transformers 5, the last is TRL.
_OTHERS = ("activation_checkpointing", "gradient_checkpointing", "activation_offloading")


def _other_checkpointing(arguments: Any) -> str | None:
    return next((f"{name}=True" for name in _OTHERS if getattr(arguments, name, None) is True), None)


class LowtideCallback(TrainingCallback):
    """A ``TrainerCallback`` that applies a memory configuration while ``Trainer.train`` runs.

    Effect: ``lowtide.apply`` when training begins, undone when it ends; bits stay
    the same. Cost: that of the regions. Hazard: a training that raises leaves the
    model wrapped until :meth:`undo` is called or training begins again.

    Args:
        config: a ``MemoryConfig``, or a mapping of its fields.
        report: gets the table of layers and the bytes of every region once, after the first step, on the main
            process; None says nothing.
        fields: the fields of the configuration as keywords, instead of ``config``.

    Raises:
        ConfigError: no configuration, two of them, or one that cannot be met.
        WrapError: the trainer's own gradient checkpointing or offloading is on, when the trainer is built or begins.
        UnsupportedError: transformers is not installed.

    >>> callback = LowtideCallback(recompute_activation_function=True)
    >>> callback.config.recompute_activation_function
    True
    >>> from transformers import TrainerCallback
    >>> isinstance(callback, TrainerCallback)
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> LowtideCallback:  # noqa: PYI034 - Self is not in Python 3.10
        """An instance that is a ``TrainerCallback``, too."""
        base = base_class("transformers.TrainerCallback", "transformers")
        made: LowtideCallback = object.__new__(joined(cls, base))
        return made

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer is built: refuse what it would do besides."""
        refuse_other_checkpointing(_other_checkpointing(args), "TrainingArguments")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply the configuration to the model that trains."""
        refuse_other_checkpointing(_other_checkpointing(args), "TrainingArguments")
        self._session.begin(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the first step: the report."""
        self._session.step_ended(kwargs["model"], tells=bool(state.is_world_process_zero))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the model back as it was."""
        self._session.end()


def memory_enable(
    model: torch.nn.Module, memory_kwargs: MemoryConfig | Mapping[str, Any] | None = None, **fields: Any
) -> Applied:
    """Apply a memory configuration to a model, as ``gradient_checkpointing_enable(kwargs)`` applies its own.

    For loops without a ``Trainer``, and for configuration files that hold the
    fields of a ``MemoryConfig`` as a mapping.

    Args:
        model: the model; its own gradient checkpointing must be off.
        memory_kwargs: a ``MemoryConfig``, or a mapping of its fields.
        fields: the fields as keywords instead.

    Raises:
        ConfigError: no configuration, two of them, or one that cannot be met.
        WrapError: the model recomputes by itself already, or something in its layers is wrapped.

    >>> layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)))
    >>> applied = memory_enable(layers, {"recompute_activation_function": True})
    >>> [row.answers for row in applied.rows]
    [('recompute the activation function: 1',), ('recompute the activation function: 1',)]
    >>> applied.undo()
    """
    return apply(model, as_config(memory_kwargs, fields, "memory_enable"))
