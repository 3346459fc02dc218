"""What only a device shows of the engine: threads of backward that are not forward's, and its own generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.sim


class Shuffle(torch.autograd.Function):
    """Makes tensors in its forward on whatever device is the default."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        ctx.save_for_backward(order)
        return x[order] * torch.arange(1.0, len(x) + 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (order,) = ctx.saved_tensors
        scaled = grad * torch.arange(1.0, len(grad) + 1, device=grad.device)
        return torch.empty_like(scaled).index_copy(0, order, scaled)


class Makes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.randn(len(x))).exp()


lowtide.pure(Shuffle)


@pytest.mark.parametrize("way", ["replay", "call"])
@pytest.mark.parametrize("scope", ["set_default_device", "with"])
def test_what_runs_again_has_the_default_device_of_forward(way: str, scope: str) -> None:
    """Backward runs on a thread of its own, which knows nothing of the default device of the thread of forward."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Makes()(Shuffle.apply(x).sin())

    def results(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        x = torch.linspace(0, 1, 6, device="sim").requires_grad_()
        if scope == "with":
            with torch.device("sim"):
                loss = model(x).sum()
        else:
            torch.set_default_device("sim")
            try:
                loss = model(x).sum()
            finally:
                torch.set_default_device(None)
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad, torch.sim.get_rng_state(), torch.get_rng_state()]  # type: ignore[attr-defined]

    want = results(Model())
    got = results(lowtide.checkpoint_wrapper(Model(), recompute=way))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
