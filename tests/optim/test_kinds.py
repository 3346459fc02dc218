"""Which optimizers are cut, stepped tensor by tensor, or refused; found out by trial where nobody knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import UnsupportedError

from .kit import assert_same_bits, backward, net, weights


class Lion(torch.optim.Optimizer):
    """A class that torch does not bring: elementwise, with a count of its own in each group."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("exp_avg", torch.zeros_like(p))
                p.sub_((state["exp_avg"] * 0.9 + p.grad * 0.1).sign(), alpha=group["lr"] / group["steps"])
                state["exp_avg"] = state["exp_avg"] * 0.99 + p.grad * 0.01  # another tensor in every step


class Normed(Lion):
    """Each tensor by its own norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("buffer", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(self.state[p]["buffer"] / self.state[p]["buffer"].norm(), alpha=group["lr"])


class Coupled(Lion):
    """All tensors by one norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            total = torch.stack([p.grad.norm() for p in group["params"] if p.grad is not None]).norm()
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("buffer", torch.zeros_like(p)).add_(p.grad / total)
                    p.sub_(self.state[p]["buffer"], alpha=group["lr"])


@pytest.mark.values
@pytest.mark.parametrize(("kind", "elementwise"), [(Lion, True), (Lion, None), (Normed, None)])
def test_a_class_of_ones_own_gives_its_plain_bits(kind: Any, elementwise: bool | None) -> None:  # noqa: FBT001
    runs = []
    for wraps in (False, True):
        model = net()
        inner = kind(model.parameters())
        optimizer = lowtide.swap_optimizer(inner, swap_times=4, elementwise=elementwise) if wraps else inner
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        runs.append((weights(model), optimizer.state_dict(), inner.calls))
    assert_same_bits(*runs)


def test_a_class_that_is_not_known_is_stepped_whole_and_reported() -> None:
    optimizer = lowtide.swap_optimizer(Lion(net().parameters()))
    assert "is not known" in optimizer.report().notes[0]
    assert not lowtide.swap_optimizer(Lion(net().parameters()), elementwise=True).report().notes


@pytest.mark.values
def test_what_was_declared_is_tried() -> None:
    with pytest.raises(UnsupportedError, match="comes out with other bits"):
        lowtide.swap_optimizer(Normed(net().parameters()), elementwise=True)
    with pytest.raises(UnsupportedError, match="depend on each other"):
        lowtide.swap_optimizer(Coupled(net().parameters()))


def test_the_trial_touches_neither_parameters_nor_the_optimizer() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    inner = Lion(model.parameters())
    lowtide.swap_optimizer(inner)
    assert_same_bits(before, weights(model))
    assert inner.calls == 0
    assert [group["steps"] for group in inner.param_groups] == [0]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.values
def test_muon_is_stepped_tensor_by_tensor() -> None:
    runs = []
    for wraps in (False, True):
        torch.manual_seed(0)
        matrices = [nn.Parameter(torch.randn(20, 30)), nn.Parameter(torch.randn(30, 20))]
        inner = torch.optim.Muon(matrices, lr=0.01)
        optimizer = lowtide.swap_optimizer(inner, swap_times=4) if wraps else inner
        for step in range(3):
            for number, p in enumerate(matrices):
                p.grad = torch.full_like(p, 0.1 * (step + number)) + p.detach().sin()
            optimizer.step()
        runs.append(([p.detach() for p in matrices], optimizer.state_dict()["state"]))
    assert_same_bits(*runs)
