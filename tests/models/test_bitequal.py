"""Every model of the zoo trains alike, bit by bit, whatever happens to its activations.

Law: loss, each gradient and the state of the generator after each step, and
parameters and buffers after the last one, equal those of the unwrapped model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import SwapManager, checkpoint_wrapper, swap_wrapper
from lowtide.policy import save_matmuls_and_attention, swap_matmuls_and_attention

from .zoo import ZOO, Specimen

STEPS = 3
MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "recompute": checkpoint_wrapper,
    "recompute-certified": lambda m: checkpoint_wrapper(m, certify=STEPS),
    "keep": lambda m: checkpoint_wrapper(m, save_matmuls_and_attention()),
    "swap-ops": lambda m: checkpoint_wrapper(m, swap_matmuls_and_attention(), swap_inputs=True),
    "swap": swap_wrapper,
    "swap-certified": lambda m: swap_wrapper(m, certify=STEPS),
}


def regions_of(model: nn.Module, specimen: Specimen) -> list[nn.Module]:
    """The instances of the region classes, in the order of the module tree."""
    return [m for m in model.modules() if type(m).__name__ in specimen.regions]


def train(model: nn.Module, specimen: Specimen) -> list[Any]:
    """Train a few steps; return everything that must not depend on where activations live."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    seen: list[Any] = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = specimen.step(model, number)
        assert torch.isfinite(loss)
        loss.backward()
        seen.append(("loss", number, loss.detach().clone()))
        seen += [(name, number, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()]
        seen.append(("generator", number, torch.get_rng_state()))
        optimizer.step()
    seen += [(name, "after", value.detach().clone()) for name, value in model.state_dict().items()]
    return seen


def assert_same(want: list[Any], got: list[Any]) -> None:
    """Compare two records of training bit by bit and name what differs first."""
    assert [w[:2] for w in want] == [g[:2] for g in got]
    for (name, step, w), (_, _, g) in zip(want, got, strict=True):
        if w is None or g is None:
            assert w is g, f"{name} in step {step}: a gradient is missing on one side"
        else:
            assert torch.equal(w, g), f"{name} in step {step}: other bits"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_training_is_the_same(name: str, mode: str) -> None:
    specimen = ZOO[name]
    if specimen.needs:
        pytest.importorskip(specimen.needs)
    torch.manual_seed(0)
    plain = specimen.build().train()
    other = copy.deepcopy(plain)
    SwapManager().configure(min_bytes=0)
    regions = regions_of(other, specimen)
    assert regions, f"no region found in {name}"
    for region in regions:
        assert MODES[mode](region) is region
    handle = lowtide.auto(other) if "swap" in mode else None
    want, got = train(plain, specimen), train(other, specimen)
    assert_same(want, got)
    if handle is not None:
        if len(regions) > 1:
            assert SwapManager().traffic.out_bytes > 0, "nothing was swapped"
        handle.undo()
    assert SwapManager().lower_bytes() == 0


@pytest.mark.parametrize("name", ZOO)
def test_plain_equals_plain(name: str) -> None:
    specimen = ZOO[name]
    if specimen.needs:
        pytest.importorskip(specimen.needs)
    torch.manual_seed(0)
    plain = specimen.build().train()
    other = copy.deepcopy(plain)
    assert_same(train(plain, specimen), train(other, specimen))
