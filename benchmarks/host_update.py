"""How far apart two kernels of the same update come out: ``python benchmarks/host_update.py``.

A step on the host has other bits than one on a device because its kernel rounds elsewhere. This compares AdamW's
kernels over the same float32 masters and gradients: torch's fused one on the host with its single operators there, and
with both on the accelerator if there is one. Differences are in units of the last place of float32, and in bfloat16
parameters that differ at all.
"""

from __future__ import annotations

import argparse
import sys

import torch

ELEMENTS = 1 << 20
STEPS = (1, 10, 100)


def masters_after(where: torch.device, *, fused: bool) -> list[torch.Tensor]:
    """The masters after so many steps, in host memory."""
    draw = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter((torch.randn(ELEMENTS, generator=draw) * 0.02).to(where))
    optimizer = torch.optim.AdamW([master], lr=1e-3, fused=fused, foreach=False if not fused else None)
    found = []
    for step in range(1, max(STEPS) + 1):
        master.grad = (torch.randn(ELEMENTS, generator=draw) * 1e-3).to(where)
        optimizer.step()
        if step in STEPS:
            found.append(master.detach().cpu().clone())
    return found


def ordered(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, one apart where those are."""
    bits = values.view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def main() -> None:
    """Measure, and print a table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    host = torch.device("cpu")
    others = {"the host's single operators": (host, False)}
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        others |= {f"{device.type}, fused": (device, True), f"{device.type}, single operators": (device, False)}
    base = masters_after(host, fused=True)
    lines = [
        "| the host's fused AdamW and | steps | masters that differ | units: median, largest | bfloat16s that do |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (where, fused) in others.items():
        for steps, one, other in zip(STEPS, base, masters_after(where, fused=fused), strict=True):
            apart = (ordered(one) - ordered(other)).abs()
            differs = apart[apart > 0].double()
            middle, most = (int(differs.median()), int(differs.max())) if differs.numel() else (0, 0)
            casts = (one.bfloat16() != other.bfloat16()).double().mean()
            share = differs.numel() / ELEMENTS
            lines.append(f"| {name} | {steps} | {share:.2%} | {middle}, {most} | {float(casts):.4%} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
