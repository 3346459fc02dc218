"""Two micro-batches in flight, each swapped as a group that the loop drives by hand, as a pipeline schedule would.

Run: python examples/micro_batches.py
"""

from __future__ import annotations

import torch
from torch import nn

import lowtide

LAYERS, WIDTH, TOKENS, GROUPS = 3, 128, 512, ("micro-batch 0", "micro-batch 1")


def build() -> nn.Module:
    """A stack of MLPs from a fixed seed."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def batches() -> list[torch.Tensor]:
    """The input of each micro-batch."""
    torch.manual_seed(1)
    return [torch.randn(TOKENS, WIDTH) for _ in GROUPS]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """The gradients that the parameters hold."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def plain() -> list[torch.Tensor]:
    """Both forwards, then both backwards, unwrapped."""
    model = build()
    losses = [model(x).square().mean() for x in batches()]
    for loss in losses:
        loss.backward()
    return gradients(model)


def grouped() -> list[torch.Tensor]:
    """The same, and each micro-batch leaves after its forward and returns before its backward."""
    manager = lowtide.SwapManager()
    model = build()
    for layer in model:
        lowtide.swap_wrapper(layer)
    losses = []
    for group, x in zip(GROUPS, batches(), strict=True):
        manager.set_current_group_name(group)  # what runs forward from here on belongs to the group
        losses.append(model(x).square().mean())
        manager.set_current_group_name(None)
        manager.launch_offload(group)
    for group in GROUPS:
        manager.wait_offload(group)  # the device bytes are dropped here
    print(f"on the lower tier after both forwards: {manager.lower_bytes() / 2**20:.2f} MiB")
    for group, loss in zip(GROUPS, losses, strict=True):
        manager.launch_load(group)
        manager.wait_load(group)
        loss.backward()
    print(f"on the lower tier after both backwards: {manager.lower_bytes() / 2**20:.2f} MiB")
    return gradients(model)


def main() -> None:
    """Train both ways and compare bit by bit."""
    torch.set_num_threads(1)
    equal = all(torch.equal(a, b) for a, b in zip(plain(), grouped(), strict=True))
    print(f"gradients bit-equal: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
