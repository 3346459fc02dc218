"""What the case programs share: a plain model with its wrapped twin, and comparison bit by bit.

Law: what comes back must equal the unwrapped twin in every bit, gradient by
gradient, the state of the random generator included. Plain torch only: no
program may know which library wraps its layers.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

DEV = os.environ.get("LOWTIDE_TEST_DEVICE", "cpu")
Wrap = Callable[[nn.Module], nn.Module]
Link = Callable[[nn.Module, nn.Module], None]


class Chain(nn.Module):
    """layers[0], layers[1], ... one after the other; extra arguments go to every layer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


def wrap_list(mods: nn.ModuleList, wrap: Wrap, link: Link | None = None) -> None:
    """Replace every entry of a ModuleList by wrap(entry); then link neighbours."""
    for i in range(len(mods)):
        mods[i] = wrap(mods[i])
    if link is not None:
        for first, second in zip(list(mods), list(mods)[1:], strict=False):
            link(first, second)


def settle(model: nn.Module, wrap: object) -> None:
    """Let a wrap that has something to say about the whole model (a learned order) say it."""
    whole = getattr(wrap, "whole", None)
    if whole is not None:
        whole(model)


def twin(
    build: Callable[[], nn.Module],
    wrap: Wrap,
    link: Link | None = None,
    attr: str = "layers",
    whole: object = None,
) -> tuple[Any, Any]:
    """One model twice with equal weights: (plain, wrapped)."""
    torch.manual_seed(0)
    plain = build().to(DEV)
    other = copy.deepcopy(plain)
    wrap_list(getattr(other, attr), wrap, link)
    settle(other, wrap if whole is None else whole)
    return plain, other


def grads_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def check(want: Any, got: Any, where: str = "result") -> None:
    """Compare tensors, None, numbers, lists and dicts recursively; tensors bit by bit."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: no tensor came back"
        assert got.dtype == want.dtype, f"{where}: want {want.dtype}, got {got.dtype}"
        assert got.shape == want.shape, f"{where}: want shape {want.shape}, got {got.shape}"
        if not torch.equal(want, got):
            far = (want.double() - got.double()).abs().max().item()
            raise AssertionError(f"{where}: {int((want != got).sum())} of {want.numel()} values differ, by up to {far}")
    elif isinstance(want, dict):
        assert set(want) == set(got), f"{where}: keys differ"
        for k in want:
            check(want[k], got[k], f"{where}[{k}]")
    elif isinstance(want, list | tuple):
        assert len(want) == len(got), f"{where}: length differs"
        for i, (w, g) in enumerate(zip(want, got, strict=True)):
            check(w, g, f"{where}[{i}]")
    else:
        assert want == got, f"{where}: want {want!r}, got {got!r}"


def same_result(plain: Any, other: Any, action: Callable[[Any], Any], seed: int = 1) -> list[Any]:
    """Run action(model) on both with equal seeds; compare what it returns, the gradients, the generator."""
    seen = []
    for m in (plain, other):
        torch.manual_seed(seed)
        m.zero_grad(set_to_none=True)
        seen.append({"returned": action(m), "gradients": grads_of(m), "generator": torch.get_rng_state()})
    check(seen[0], seen[1])
    return seen
