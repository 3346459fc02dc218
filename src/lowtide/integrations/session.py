"""One training run under a memory configuration: applied when it begins, told once, undone when it ends.

Law: a run that begins twice, or ends twice, leaves the model as one would; what
another mechanism already does to the same layers is refused, never stacked.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lowtide.activations.wrappers import regions_of
from lowtide.errors import ConfigError, UnsupportedError, WrapError, explain
from lowtide.recipes.apply import Applied, apply
from lowtide.recipes.config import MemoryConfig
from lowtide.recipes.optimizer import refuse_optimizer_fields
from lowtide.report.summary import build
from lowtide.residency.manager import SwapManager

__all__ = ["Session", "TrainingCallback", "as_config", "base_class", "joined", "refuse_other_checkpointing"]


def as_config(config: MemoryConfig | Mapping[str, Any] | None, fields: Mapping[str, Any], where: str) -> MemoryConfig:
    """The configuration that was given in one of three forms: ready, as a mapping, or as keywords. Validated."""
    if (config is None) == (not fields):
        raise ConfigError(
            explain(
                "one configuration is needed",
                expected="a MemoryConfig, a mapping of its fields, or its fields as keywords",
                got="nothing" if config is None else f"{type(config).__name__} and {', '.join(fields)} as keywords",
                where=where,
                remedy="Write it once, for example swap_attention=True.",
            )
        )
    if isinstance(config, MemoryConfig):
        return config.validate()
    return MemoryConfig.from_dict(fields if config is None else config)


_OPTIMIZER = (
    "Wrap an optimizer of your own, lowtide.swap_optimizer(...) or lowtide.reuse_fp32_param(...), and give it to the "
    "trainer: Trainer(optimizers=(optimizer, None)), or return it from configure_optimizers()."
)


class Session:
    """What a trainer's callback holds: the configuration, and what is applied now.

    ``tell`` gets one text, after the first step: which layer got what, and the
    bytes of every region. None says nothing.

    >>> layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)))
    >>> session = Session(MemoryConfig(recompute_method="uniform"), tell=None)
    >>> session.begin(layers)
    >>> session.applied is not None
    True
    >>> session.end()
    """

    def __init__(self, config: MemoryConfig, tell: Callable[[str], object] | None) -> None:
        self.config = config
        self.tell = tell
        self.applied: Applied | None = None
        self._told = False

    def begin(self, model: torch.nn.Module) -> None:
        """Apply the configuration; what an earlier run left behind (it raised) is undone first."""
        self.end()
        self.applied = apply(model, self.config)

    def step_ended(self, model: torch.nn.Module, *, tells: bool) -> None:
        """Say once what happens to whose bytes; ``tells`` is False in all ranks but one."""
        if self._told or self.tell is None or self.applied is None:
            return
        self._told = True
        if tells:
            report = build(regions_of(model), SwapManager().notes())
            self.tell(f"{self.applied}\n{report}")

    def end(self) -> None:
        """Put the model back as it was. Repeating it is harmless."""
        applied, self.applied = self.applied, None
        if applied is not None:
            applied.undo()


def refuse_other_checkpointing(asked: str | None, where: str) -> None:
    """Two mechanisms that recompute or move the same activations are not stacked."""
    if asked is not None:
        raise WrapError(
            explain(
                "the trainer's own checkpointing is on, too",
                expected="one mechanism for the activations",
                got=asked,
                where=where,
                remedy="Switch it off in the trainer's arguments (some trainers switch it on by default), or leave "
                "lowtide's callback out.",
            )
        )


def base_class(path: str, package: str) -> type:
    """A class of an optional package, by module and name, or an error that says what to install."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise UnsupportedError(
            explain(
                f"{package} is not installed",
                expected=path,
                got=str(error),
                where="lowtide.integrations",
                remedy=f"Install it: pip install {package}.",
            )
        ) from error
    assert isinstance(found, type)
    return found


_joined: dict[tuple[type, type], type] = {}


def joined(mine: type, base: type) -> type:
    """A class that is both ``mine`` and the trainer's ``base``, which is not known before it is needed."""
    if issubclass(mine, base):
        return mine
    if (mine, base) not in _joined:
        _joined[mine, base] = type(mine.__name__, (mine, base), {"__module__": mine.__module__})
    return _joined[mine, base]


class TrainingCallback:
    """What the callbacks for all trainers are made of: a configuration, one run under it, and a copy for a process."""

    def __init__(
        self,
        config: MemoryConfig | Mapping[str, Any] | None = None,
        *,
        report: Callable[[str], object] | None = print,
        **fields: Any,
    ) -> None:
        self.config = as_config(config, fields, "LowtideCallback")
        refuse_optimizer_fields(self.config, "LowtideCallback", _OPTIMIZER)
        self._session = Session(self.config, report)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has the configuration; what is applied belongs to this process's model."""
        kind = next(one for one in type(self).__mro__ if one not in _joined.values())
        return partial(kind, self.config, report=self._session.tell), ()

    @property
    def applied(self) -> Applied | None:
        """What is applied now: a table of layers as text, or None outside of a training."""
        return self._session.applied

    def undo(self) -> None:
        """Put the model back as it was; needed only after a training that raised. Repeating it is harmless."""
        self._session.end()
