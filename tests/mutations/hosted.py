"""Programs about an optimizer that steps on the host."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from .kit import Kit
from .stepped import swapped_gpt

__all__ = ["HOSTED"]


def stepped_on_the_host(kit: Kit) -> None:
    """Gradients leave in backward, three of them a step and few at a time, and are added up and clipped on the host."""
    model = swapped_gpt(kit)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if not kit.plain:
        import lowtide
        from lowtide.optim import beside, gradients

        gradients.IN_FLIGHT_BYTES = 20_000
        beside.ThreadPoolExecutor = _Later  # type: ignore[assignment, misc]
        optimizer = lowtide.cpu_optimizer(optimizer, grad_offload=True)
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            for batch in kit.batches(2):
                model(batch).mean().backward()
            optimizer.zero_grad()  # two that are not stepped
        for batch in kit.batches(3):
            model(batch).square().mean().backward()
            kit.mark()
        with torch.no_grad():
            kit.note(model(batch))  # reads the parameters until the step writes them
        if step:
            own = step == 1 and not kit.plain
            (_clipped(optimizer) if own else torch.nn.utils.clip_grad_norm_)(model.parameters(), 0.5)
        optimizer.step()
        kit.note(*model.parameters())
        kit.mark()


class _Later:
    """A thread that comes to nothing until it is waited for: the latest that there can be, and always the same."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        return types.SimpleNamespace(result=functools.partial(work, *args))


def _clipped(optimizer: Any) -> Callable[..., Any]:
    return lambda _, norm: optimizer.clip_grad_norm_(norm)


def stepped_on_the_host_late(kit: Kit) -> None:
    """Gradients leave in the step; parameters are read until then, and edited and saved right after it."""
    model = swapped_gpt(kit)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if not kit.plain:
        import lowtide

        optimizer = lowtide.cpu_optimizer(optimizer)
    (batch,) = kit.batches(1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with torch.no_grad():
            kit.note(model(batch))
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        kit.note(*model.parameters())
        kit.mark()
        optimizer.state_dict()


class _WhenWaited:
    """The thread of a step that goes on, which steps nothing until somebody waits, and then all."""

    pending: list[Callable[[], None]] = []  # noqa: RUF012 - one for the program

    def __init__(self, _: str) -> None:
        pass

    def submit(self, work: Callable[[], None]) -> None:
        """Leave it for later."""
        self.pending.append(work)


def _opening(plain: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any) -> Any:
        while _WhenWaited.pending:
            with torch.no_grad(), torch.device("cpu"):
                _WhenWaited.pending.pop()()
        return plain(*args)

    return method


def stepped_beside_the_loop(kit: Kit) -> None:
    """A step goes on while the loop does: read by a forward, in evaluation, by a checkpoint, and zeroed behind."""
    model = swapped_gpt(kit)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if not kit.plain:
        import lowtide
        from lowtide.optim import beside, late

        late.Beside = _WhenWaited  # type: ignore[assignment, misc]
        for name in ("want", "join"):
            setattr(late._LateStep, name, _opening(getattr(late._LateStep, name)))
        beside.ThreadPoolExecutor = _Later  # type: ignore[assignment, misc]
        optimizer = lowtide.cpu_optimizer(optimizer, grad_offload=True, overlap=True)
    for step in range(6):
        for batch in kit.batches(3):
            model(batch).square().mean().backward()
            kit.mark()
        with torch.no_grad():
            kit.note(model(batch))  # reads the parameters until the step writes them
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 3)
        if step == 4:
            kit.note(*model.parameters())
        if step == 1:
            with torch.no_grad():
                kit.note(model(batch))
        if step == 2:
            optimizer.state_dict()
            kit.note(*model.parameters())
        kit.mark()
    kit.note(*model.parameters())


HOSTED: dict[str, Callable[[Kit], None]] = {
    "on the host": stepped_on_the_host,
    "on the host, late": stepped_on_the_host_late,
    "on the host, beside": stepped_beside_the_loop,
}
