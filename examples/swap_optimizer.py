"""An optimizer whose state lives on the lower tier, over bfloat16 parameters with a residual; compare the bits.

The plain loop keeps separate float32 masters and casts them to the parameters after each step.
Run: python examples/swap_optimizer.py
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import lowtide

WIDTH, STEPS = 256, 5


def step_data(step: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()


def plain(model: nn.Module) -> list[torch.Tensor]:
    """Float32 masters beside the parameters; returns the masters."""
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    for step in range(STEPS):
        model.zero_grad()
        model(step_data(step)).float().square().mean().backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return masters


def swapped(model: nn.Module) -> lowtide.SwapOptimizer:
    """The same training; no master, and no state between steps, is in memory."""
    optimizer = lowtide.swap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), master="residual")
    for step in range(STEPS):
        optimizer.zero_grad()
        model(step_data(step)).float().square().mean().backward()
        optimizer.step()
    return optimizer


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).bfloat16()
    twin = copy.deepcopy(model)
    masters = plain(model)
    optimizer = swapped(twin)
    state = optimizer.state_dict()["state"]
    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    equal = equal and all(torch.equal(master, state[k]["master_param"]) for k, master in enumerate(masters))
    print(f"parameters and masters bit-equal: {equal}")
    print(optimizer.report())


if __name__ == "__main__":
    main()
