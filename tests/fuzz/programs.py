"""Random programs, and the model around one that trains it for one step.

Law: a program is a function of its seed alone. What a step returns (loss,
every gradient that was asked for, the generator's state) is all that a wrapped
run is compared by.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.device import default_generator

from .functions import Functions
from .operators import KINDS, Env, N

__all__ = ["ENDINGS", "Net", "Program", "program_of", "train"]

Wrap = Callable[[Any], Any]

# How a step uses its graph. Each is reached by one seed in len(ENDINGS).
ENDINGS = ("once", "twice", "part, then all", "two parts", "double backward", "once")


@dataclass(frozen=True)
class Program:
    """A list of operator kinds, the operands each picks, and the way backward is run."""

    seed: int
    kinds: tuple[str, ...]
    picks: tuple[tuple[float, float], ...]
    ending: str

    def __str__(self) -> str:
        return f"seed {self.seed} ({self.ending}): {' '.join(self.kinds)}"


def program_of(seed: int, *, kinds: tuple[str, ...] = tuple(KINDS)) -> Program:
    """Draw the program of a seed: 4 to 16 operators over the values made so far."""
    draw = random.Random(seed)
    chosen = tuple(draw.choice(kinds) for _ in range(draw.randint(4, 16)))
    picks = tuple((draw.random(), draw.random()) for _ in chosen)
    return Program(seed, chosen, picks, ENDINGS[seed % len(ENDINGS)])


class Body(nn.Module):
    """The region under test: runs the program on an input and a weight that both need gradients."""

    def __init__(self, program: Program, functions: Functions, inner: Wrap) -> None:
        super().__init__()
        self.program, self.functions, self.inner = program, functions, inner
        self.weight = nn.Parameter(torch.zeros(N, N))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = [x * 1.0, (x @ self.weight).tanh()]
        for kind, (p, q) in zip(self.program.kinds, self.program.picks, strict=True):
            a, b = values[int(p * len(values))], values[int(q * len(values))]
            values.append(KINDS[kind](a, b, Env(p, q, self.weight, self.functions, self.inner)))
        return values[-1], values[-2].sum(), values[len(values) // 2]


class Tail(nn.Module):
    """A second region, so that the first is not the last of the order and may leave the device."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a.pow(2).mean() + b * 0.1 + c.tanh().sum()


class Net(nn.Module):
    """Body and tail; ``wrap`` is applied to both, ``inner`` to the callables that a program nests."""

    def __init__(self, program: Program, functions: Functions, inner: Wrap) -> None:
        super().__init__()
        self.body, self.tail = Body(program, functions, inner), Tail()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = self.body(x)
        return self.tail(a, b, c), b, c


def train(net: Net) -> list[Tensor | None]:
    """Run one step with the program's seed and its ending; return all that can be observed."""
    program = net.body.program
    torch.manual_seed(program.seed)
    weight = net.body.weight
    x = torch.randn(N, N, requires_grad=True)
    with torch.no_grad():
        weight.normal_()
    weight.grad = None
    loss, b, c = net(x)
    seen: list[Tensor | None] = [loss.detach().clone()]
    if program.ending == "double backward":
        (gx, gw) = torch.autograd.grad(loss, (x, weight), create_graph=True, allow_unused=True)
        parts = [g.pow(2).sum() for g in (gx, gw) if g is not None and g.requires_grad]
        seen += [None if g is None else g.detach().clone() for g in (gx, gw)]
        (torch.stack(parts).sum() if parts else loss).backward()
    elif program.ending == "two parts" and b.requires_grad and c.requires_grad:
        seen += torch.autograd.grad(c.sum(), weight, retain_graph=True, allow_unused=True)
        seen += torch.autograd.grad(b, x, allow_unused=True)
    else:
        if program.ending == "part, then all":
            seen += torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)
        if program.ending == "twice":
            loss.backward(retain_graph=True)
        loss.backward()
    generator = default_generator(x.device)  # of an accelerator, where the campaign runs on one
    return [*seen, x.grad, weight.grad, torch.get_rng_state(), generator.get_state()]
