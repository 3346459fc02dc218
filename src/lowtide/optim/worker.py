"""One update of some tensors by an optimizer of the user's, without touching the optimizer's own parameters.

A *worker* is an object of the optimizer's very class with its attributes, its
groups' hyperparameters, and other tensors: pieces of parameters, or masters.
Law: what the class computes is what the user's optimizer would have computed
for these tensors; hooks do not run here. All updates of a step start from the
attributes and groups as they were when it began, whatever anybody does to them
meanwhile, and what ``step`` changes of them is carried back once all have run.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

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

    def __init__(
        self, optimizer: torch.optim.Optimizer, passed: Mapping[str, Any] | None = None, *, late: bool = False
    ) -> None:
        """``passed``: attributes that a gradient scaler has left on the wrapper, for this step alone.

        ``late``: schedulers may write into the groups' tensors before the updates are made.
        """
        self._optimizer = optimizer
        self._passed = dict(passed or {})
        self._step = unhooked_step(type(optimizer))
        self._attributes = {key: value for key, value in vars(optimizer).items() if key not in _OWN}
        self._groups = [_values_of(group, copies=late) for group in optimizer.param_groups]
        self._versions = [_versions_of(group) for group in self._groups]
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
            group = {**self._groups[number], "params": [share.target for share in groups[number]]}
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

    def carry_back(self) -> bool:
        """Give the optimizer what its class changed of its attributes and groups, as one ``step`` would have.

        Returns whether anything in a group was changed.
        """
        mine = {key: value for key, value in self._left.items() if key not in self._passed}
        vars(self._optimizer).update(_changed(self._attributes, mine))
        found = False
        for number, group in self._left_groups.items():
            target, before = self._optimizer.param_groups[number], self._groups[number]
            change = _changed(before, group)
            written = [k for k, v in self._versions[number].items() if k not in change and before[k]._version != v]
            for key in written:
                if target[key] is not before[key]:
                    target[key].copy_(before[key])
            target.update(change)
            found = found or bool(change) or bool(written)
        return found


def _values_of(group: Mapping[str, Any], *, copies: bool) -> dict[str, Any]:
    return {key: tree_map(_copied, value) if copies else value for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _versions_of(group: Mapping[str, Any]) -> dict[str, int]:
    tensors = {key: value for key, value in group.items() if isinstance(value, Tensor)}
    # One made for inference has no version, and cannot be written to outside of that.
    return {key: value._version for key, value in tensors.items() if not value.is_inference()}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    missing = object()
    return {key: value for key, value in after.items() if before.get(key, missing) is not value}
