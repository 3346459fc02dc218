"""Modules for the workloads at the edges. They know nothing of lowtide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Boxed",
    "Branches",
    "Caller",
    "Even",
    "Forces",
    "Fork",
    "Late",
    "Moody",
    "MoodyGradient",
    "Pairs",
    "Pauses",
    "Read",
    "SideBranch",
    "Tail",
    "Twice",
    "Wide",
    "Writer",
]


class Branches(nn.Module):
    """Three branches save one tensor; what they make goes through a tail."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.functions = nn.ModuleList(Scaled() for _ in range(2))
        self.tail = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        made = [branch(x) for branch in [*self.functions, *self.branches]]
        out: Tensor = self.tail(sum(made[1:], made[0]))
        return out


class Scaled(nn.Module):
    """An autograd.Function reads the input twice in backward; another node reads what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Twice.apply
        out: Tensor = apply(x, self.scale.exp().expand_as(x))
        return out


class Late(nn.Module):
    """Needs most in backward, long after its last product, which autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 1024)
        self.narrow = nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.wide(x) + 1).sigmoid()
        out: Tensor = self.narrow((y + 1).sigmoid())
        return out


class Wide(nn.Module):
    """Wide products that autograd does not save: needs most when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.wides = nn.ModuleList(nn.Linear(64, 1024) for _ in range(4))
        self.narrow = nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wides[0](x) + 1
        for wide in self.wides[1:]:
            y = y + wide(x)
        out: Tensor = self.narrow(y.sigmoid())
        return out


class Read(nn.Module):
    """A hook reads, in backward, what autograd has saved and will read a moment later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.note: Callable[[Tensor], None] | None = None
        self.node: Any = None  # while its graph lives

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (((self.linear(x).exp() + 1).neg() + 2).neg()).sin()
        if y.requires_grad:
            self.node = y.grad_fn
            y.register_hook(self._called)
        return y.cos()

    def _called(self, gradient: Tensor) -> None:
        assert self.note is not None
        self.note(self.node._saved_self)


class Fork(nn.Module):
    """Several results that share values, and no node of autograd that saves one."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        shared = x + 1
        return shared.sin(), (shared + 0.5).exp(), shared.cos().sin(), shared.tanh()


class Tail(nn.Module):
    """A region, and a long tail outside of it that saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.Softplus(), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        for _ in range(20):
            y = -y
        return y


class Pauses(nn.Module):
    """Needs a lot for a moment between its parts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Even() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
            with torch.no_grad():
                x.new_zeros(400_000)
        out: Tensor = self.layers[-1](x)
        return out


class Even(nn.Module):
    """All that it saves has one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).sin()).sin()
        return out


class Moody(nn.Module):
    """Raises in the midst of its forward when asked to; somebody has a part of its graph by then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.raises = False
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).sin()
            if self.raises and number == 2:
                self.kept = x
                raise KeyError("as asked")
        return x


class Writer(nn.Module):
    """Writes in place: to what it made and read before, to what it was given, and to slices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.state: Tensor | None = None
        self.spare: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        read_before = (y + 1).exp()
        y = y.mul_(0.5).relu_()
        mixed = read_before
        state = self.state
        if state is not None:
            old = (state + x).exp()
            state.add_(1)
            _ = state * 2  # needed by nobody
            with torch._C._DisableTorchDispatch():
                state.add_(1)  # seen by nobody
            newer = (state * 0.5 + x).exp()
            state.mul_(0.5)
            mixed = mixed - old + newer - state
        z = self.second(y).mul_(2).sin() + mixed * 0.01
        noise = torch.zeros_like(z).normal_()
        noise[:, :8] = 0
        least, most = (torch.empty(100, device=x.device) for _ in range(2))
        torch.aminmax(noise, dim=1, out=(least, most))  # one operator writes both, and only one is needed
        z = z * most.unsqueeze(1).sigmoid()
        if self.spare is not None:
            _ = self.spare * 2
            with torch._C._DisableTorchDispatch():
                self.spare.add_(1)
            _ = self.spare * 2  # two values of one storage, and no write that is seen after them
        y = torch.nn.functional.dropout(z * noise, 0.1).add_(x)
        return y * y.sigmoid()


class Boxed(nn.Module):
    """Its result may come in a box that nobody can look into."""

    def __init__(self, *, boxes: bool) -> None:
        super().__init__()
        self.boxes = boxes
        self.wide = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)

    def forward(self, x: Any) -> Any:
        x = x.value if isinstance(x, Box) else x
        y = self.narrow(self.wide(x).sin())
        for _ in range(20):
            y = y.sin()
        for _ in range(20):
            y = -y  # saves nothing
        return Box(y) if self.boxes else y


class Box:
    """Not a structure that torch knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Forces(nn.Module):
    """May take the gradient of an energy in its forward, and go on with both."""

    def __init__(self, *, differentiates: bool) -> None:
        super().__init__()
        self.differentiates = differentiates
        self.energy = nn.Sequential(nn.Linear(64, 64), nn.Softplus())

    def forward(self, x: Tensor) -> Tensor:
        energy: Tensor = self.energy(x)
        if not self.differentiates:
            return energy
        (force,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        return energy + 0.1 * force


class SideBranch(nn.Module):
    """Computes something on the side whose graph is dropped before the end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).sin()
        side = (y * 2).exp().sin().exp()
        norm = side.detach().mean()
        del side
        return (y * norm).sin()


class Twice(torch.autograd.Function):
    """Reads its saved tensors twice in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, y = ctx.saved_tensors
        gradient = grad * y
        x, _ = ctx.saved_tensors
        return gradient, grad * x


class Caller(nn.Module):
    """Calls an autograd.Function between other operators; its weights outweigh what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Twice.apply
        for linear in self.linears:
            y = linear(x).sin()
            x = apply(y, y.cos())
        return x.sin()


class Pair(nn.Module):
    """Gives a result, and one on the side that shares the way to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.amid: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for linear in self.linears[:2]:
            x = linear(x).sin().sin()
        if x.requires_grad:
            x.register_hook(self._called)
        side = x.exp().sin()
        return self.linears[2](x).sin().exp().sin(), side.cos()

    def _called(self, gradient: Tensor) -> None:
        if self.amid is not None:
            self.amid()


class Pairs(nn.Module):
    """A row of pairs; all results on the side come in a list."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Pair() for _ in range(count))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        sides = []
        for part in self.parts:
            x, side = part(x)
            sides.append(side)
        return x.sin(), sides


class MoodyGradient(nn.Module):
    """Its backward raises when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.raises = False
        self.calm: Callable[[], None] | None = None  # called where it does not raise

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(self._called)
        return y

    def _called(self, gradient: Tensor) -> None:
        if self.raises:
            raise KeyError("as asked")
        if self.calm is not None:
            self.calm()
