"""Layer inputs on an accelerator: peak bytes as a formula, no race, the link hidden behind compute (L1, L8)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.recipes.layer_inputs_kit import INPUT_BYTES, TOKENS, WIDTH, Stack
from torch import nn

import lowtide.sim
from lowtide import SwapManager, checkpoint_wrapper
from lowtide.recipes.layer_inputs import LayerInputs, swap_layer_inputs

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def simulator() -> Iterator[lowtide.sim.Simulator]:
    found = lowtide.sim.active()
    assert found is not None
    found.reset()
    yield found
    assert not found.races()


def _model(count: int) -> Stack:
    torch.manual_seed(0)
    model = Stack(count).to("sim")
    for layer in model.layers:
        checkpoint_wrapper(layer, recompute="replay")
    return model


def _peaks(model: nn.Module, sim: lowtide.sim.Simulator) -> tuple[float, float]:
    """Most bytes in use in forward and in backward beyond those in use before, in inputs; gradients exist already."""
    x = torch.randn(TOKENS, WIDTH, device="sim")
    model(x).square().mean().backward()
    sim.synchronize()
    sim.reset_peaks()
    before = sim.memory().active
    loss = model(x).square().mean()
    sim.synchronize()
    forward = sim.memory().peak_active - before
    sim.reset_peaks()
    loss.backward()
    del loss
    sim.synchronize()
    return forward / INPUT_BYTES, (sim.memory().peak_active - before) / INPUT_BYTES


def test_the_peak_grows_by_an_input_a_layer_without_it_and_not_at_all_with_it(simulator: lowtide.sim.Simulator) -> None:
    plain = {count: _peaks(_model(count), simulator) for count in (5, 9)}
    moved = {}
    for count in (5, 9):
        model = _model(count)
        switch = swap_layer_inputs(list(model.layers))
        moved[count] = _peaks(model, simulator)
        switch.undo()
    assert [round(a - b, 2) for a, b in zip(plain[9], plain[5], strict=True)] == [4, 4]
    assert moved[9] == moved[5]
    # Two inputs are there while a layer runs: in forward its own and one that leaves, in backward its own and one that
    # comes.
    assert [round(a - b, 2) for a, b in zip(plain[9], moved[9], strict=True)] == [9 - 2, 9 - 2]


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_each_layer_ahead_costs_one_input_more_in_backward(prefetch: int) -> None:
    model = _model(9)
    switch = swap_layer_inputs(list(model.layers), prefetch=prefetch)
    assert _resident(model, switch) == 1 + prefetch


def _resident(model: Stack, switch: LayerInputs) -> int:
    """Most inputs on the device while the backward of a layer begins, but for the last two layers."""
    found: list[int] = []
    x = model.first(torch.randn(TOKENS, WIDTH, device="sim"))
    for index, layer in enumerate(model.layers):
        x = layer(x)
        if 3 < index < len(model.layers) - 1:

            def look(_: torch.Tensor) -> None:
                stats = [one.stat for manager in switch.managers for one in manager.batch_stack]
                found.append(sum(stat != "host" for stat in stats))

            x.register_hook(look)
    x.sum().backward()
    return max(found)


def test_nothing_waits_for_the_link_where_a_layer_computes_longer_than_its_input_travels(
    simulator: lowtide.sim.Simulator,
) -> None:
    class Slow(nn.Module):
        """Enough products that a layer takes longer than its input needs on the tiny device's link."""

        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self.many:
                x = one(x)
            return x

    def seconds(*, swap: bool) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(*[Slow() for _ in range(6)]).to("sim")
        for layer in model:
            checkpoint_wrapper(layer, recompute="replay")
        switch = swap_layer_inputs(list(model)) if swap else None
        x = torch.randn(TOKENS, WIDTH, device="sim") * 1.0
        for _ in range(2):
            simulator.synchronize()
            simulator.reset()
            model(x * 1.0).sum().backward()
        taken = simulator.synchronize()
        if switch is not None:
            assert SwapManager().traffic.out_bytes == 2 * 5 * INPUT_BYTES
            switch.undo()
        return taken

    assert seconds(swap=True) <= 1.005 * seconds(swap=False)
