"""Small models, the reference with separate float32 masters, and comparisons in every bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": torch.optim.Adamax,
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, momentum_decay=0.01),
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Two matrices of which the first fills several segments, biases, and a parameter that is not contiguous."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(301, 257), nn.Tanh(), nn.Linear(257, 63), nn.Tanh(), nn.Linear(63, 5))
    made[2].weight = nn.Parameter(made[2].weight.detach().t().contiguous().t())
    return made.to(dtype)


def backward(
    model: nn.Module, step: int, factor: float = 1.0, scale: Callable[[Tensor], Tensor] = lambda loss: loss
) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    parameter = next(model.parameters())
    data = torch.randn(7, 301, generator=draw).to(parameter.device, parameter.dtype)
    loss: Tensor = model(data).float().square().mean() * factor
    scale(loss).backward()
    return loss.detach()


class SeparateMasters:
    """The plain loop: float32 masters beside parameters of 16 bits, any optimizer over the masters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.pairs: list[tuple[nn.Parameter, Tensor]] = []
        for group in optimizer.param_groups:
            masters = [p.detach().to(torch.float32).clone(memory_format=torch.preserve_format) for p in group["params"]]
            self.pairs += list(zip(group["params"], masters, strict=True))
            group["params"] = masters
        self.param_groups = optimizer.param_groups

    @property
    def masters(self) -> list[Tensor]:
        return [master for _, master in self.pairs]

    def zero_grad(self) -> None:
        for parameter, master in self.pairs:
            parameter.grad = master.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        self.optimizer.step()
        for parameter, master in self.pairs:
            if parameter.grad is not None:
                parameter.copy_(master)


def bits(value: Tensor) -> Tensor:
    """The elements of a tensor as integers, in host memory."""
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    return flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def assert_same_bits(expected: Any, got: Any, where: str = "") -> None:
    """Equal keys, shapes, types and bits, through dictionaries and lists; devices may differ."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), where
        assert (expected.shape, expected.dtype) == (got.shape, got.dtype), where
        assert torch.equal(bits(expected), bits(got)), where
    elif isinstance(expected, dict):
        assert list(expected) == list(got), where
        for key, value in expected.items():
            assert_same_bits(value, got[key], f"{where}[{key}]")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got), where
        for number, value in enumerate(expected):
            assert_same_bits(value, got[number], f"{where}[{number}]")
    else:
        assert expected == got, where


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def through_file(state: Any) -> Any:
    box = io.BytesIO()
    torch.save(state, box)
    box.seek(0)
    return torch.load(box, weights_only=True, map_location="cpu")


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
