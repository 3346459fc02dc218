"""What the workloads share: a small model, its training loop, and a notebook of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Kit", "Tapped", "expect", "made", "train"]


class _Nobody:
    """Stands for the manager in a run without lowtide: takes every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Kit:
    """One run of one workload, plain or with lowtide."""

    def __init__(self, sim: Any, *, plain: bool) -> None:
        self.plain = plain
        self._sim = sim
        self._before = sim.memory().allocated
        self.peaks: list[int] = []
        self.exact = True
        self.device = torch.device("sim")
        self.seen: list[tuple[Tensor, Tensor]] = []

    def manager(self) -> Any:
        """The swap manager."""
        if self.plain:
            return _Nobody()
        import lowtide

        return lowtide.SwapManager()

    def configure(self, **settings: Any) -> None:
        """Settings of the swap manager."""
        self.manager().configure(**settings)

    def gpt(self, layers: int = 4) -> Any:
        """A small GPT with dropout, the same in every run."""
        from lowtide.demo.model import GPT, Shape

        torch.manual_seed(1)
        return GPT(Shape(layers=layers, heads=2, width=32, context=32, vocabulary=16)).to(self.device)

    def batches(self, count: int, rows: int = 4) -> list[Tensor]:
        """Tokens, the same in every run."""
        generator = torch.Generator().manual_seed(2)
        return [torch.randint(0, 16, (rows, 32), generator=generator).to(self.device) for _ in range(count)]

    def note(self, *tensors: Tensor | None) -> None:
        """Remember what tensors hold now: the sum of their bits and that of their values, which is NaN if one is.

        Two scalars on the device: copies would outweigh what the workload itself needs, and hide its peak.
        """
        for tensor in tensors:
            if tensor is not None:
                plain = tensor.detach().contiguous()
                self.seen.append((plain.view(torch.int32).sum(), plain.sum()))

    def mark(self) -> None:
        """A phase ends: write down its peak and what is held now. Reads counters only, and orders nothing."""
        if not self.exact:
            return
        memory = self._sim.memory()
        self.peaks += [memory.peak_active - self._before, memory.active - self._before]
        self._sim.reset_peaks()

    def note_gradients(self, model: nn.Module) -> None:
        """Remember all gradients, and drop them. A phase ends."""
        for parameter in model.parameters():
            self.note(parameter.grad)
            parameter.grad = None
        self.mark()

    def check(self, holds: object, what: str) -> None:
        """A statement about host integers and states, which orders nothing."""
        if not self.plain and not holds:
            raise AssertionError(f"not so: {what}")

    def warm_up(self, model: nn.Module) -> None:
        """One step whose result nobody looks at."""
        model(*self.batches(1)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None


def made(kit: Kit, seed: int, count: int = 5000) -> Tensor:
    """A tensor that the device makes: what is copied from the host would make the host wait, and hide races."""
    return torch.arange(count, dtype=torch.float32, device=kit.device).mul_(0.37).add_(seed).sin_()


def expect(kind: type[BaseException], call: Callable[[], Any]) -> None:
    """The call raises this."""
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")


class Tapped(nn.Module):
    """The layers of a model; gives back what each of them made."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.token = model.token
        self.layers = model.layers

    def forward(self, tokens: Tensor, stop: int | None = None) -> list[Tensor]:
        """The result of every layer, or of the first ones only."""
        x = self.token(tokens)
        made = []
        for layer in self.layers[:stop]:
            x = layer(x)
            made.append(x.sin())
        return made


def train(kit: Kit, model: nn.Module, *, interleaved: bool = False, steps: int = 2, rows: int = 4) -> None:
    """Two micro-batches a step: each forward then its backward, or both forwards first."""
    batches = kit.batches(2, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        losses: list[Tensor] = []
        for batch in batches:
            losses.append(model(batch).square().mean())
            kit.note(losses[-1])
            if not interleaved:
                losses.pop().backward()
        for number in range(len(losses)):
            losses[number].backward()
            kit.mark()
        del losses
        kit.note(*(parameter.grad for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
