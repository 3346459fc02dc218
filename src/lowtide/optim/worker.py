"""One update of some tensors by an optimizer of the user's, without touching the optimizer's own parameters.

A *worker* is an object of the optimizer's very class with its attributes, its
groups' hyperparameters, and other tensors: pieces of parameters, or masters.
Law: what the class computes is what the user's optimizer would have computed
for these tensors; hooks do not run here, and what ``step`` changes in the
attributes or in a group is carried back once all workers of a step have run,
so that each of them starts from the same values.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide._torch import OPTIMIZER_HOOKS, unhooked_step

__all__ = ["Share", "Worker"]

Tensor = torch.Tensor

# What belongs to one object and not to what it computes.
_OWN = frozenset({"param_groups", "state", "step", *OPTIMIZER_HOOKS})


@dataclass
class Share:
    """What is updated for one parameter: a tensor to step, its gradient, and its state, which ``step`` changes."""

    group: int
    target: Tensor
    grad: Tensor
    state: dict[str, Any] = field(default_factory=dict)


class Worker:
    """Steps shares of an optimizer's parameters, all of one step from the same hyperparameters.

    >>> plain = torch.optim.SGD([torch.zeros(4)], lr=0.5)
    >>> share = Share(0, torch.ones(2), torch.ones(2))
    >>> Worker(plain).update([share])
    >>> share.target
    tensor([0.5000, 0.5000])
    """

    def __init__(self, optimizer: torch.optim.Optimizer, passed: Mapping[str, Any] | None = None) -> None:
        """``passed``: attributes that a gradient scaler has left on the wrapper, for this step alone."""
        self._optimizer = optimizer
        self._passed = dict(passed or {})
        self._step = unhooked_step(type(optimizer))
        self._attributes = {key: value for key, value in vars(optimizer).items() if key not in _OWN}
        # What the last worker has left, without its tensors: they belong to whoever gave them.
        self._left: dict[str, Any] = {}
        self._left_groups: dict[int, dict[str, Any]] = {}

    def update(self, shares: Sequence[Share]) -> None:
        """Step the targets in place; each share's ``state`` is what the class has made of it."""
        groups: dict[int, list[Share]] = {}
        for share in shares:
            groups.setdefault(share.group, []).append(share)
        worker = object.__new__(type(self._optimizer))
        vars(worker).update(self._attributes, **self._passed)
        for name in OPTIMIZER_HOOKS:
            setattr(worker, name, OrderedDict())
        worker.state = defaultdict(dict)
        worker.param_groups = []
        for number in sorted(groups):
            for share in groups[number]:
                share.target.grad = share.grad
                if share.state:
                    worker.state[share.target] = share.state
            group = {k: v for k, v in self._optimizer.param_groups[number].items() if k != "params"}
            group["params"] = [share.target for share in groups[number]]
            worker.param_groups.append(group)
            self._left_groups[number] = group
        try:
            with torch.no_grad():
                self._step(worker)
        finally:
            for share in shares:
                share.target.grad = None
        for share in shares:
            share.state = dict(worker.state.get(share.target, {}))
        self._left = {name: value for name, value in vars(worker).items() if name not in _OWN}
        for group in worker.param_groups:
            del group["params"]

    def carry_back(self) -> None:
        """Give the optimizer what its class changed of its attributes and groups, as one ``step`` would have."""
        vars(self._optimizer).update({key: value for key, value in self._left.items() if key not in self._passed})
        for number, group in self._left_groups.items():
            self._optimizer.param_groups[number].update(group)
