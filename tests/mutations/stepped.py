"""Programs about an optimizer whose state moves, and about layers that recompute in chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .kit import Kit, expect, train

__all__ = ["STEPPED", "swapped_gpt"]


class Rows(nn.Module):
    """Parameters large enough for several segments each, without a model around them."""

    def __init__(self, kit: Kit, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.arange(90_000, dtype=torch.float32, device=kit.device).mul_(0.37).sin_()
        self.rows = nn.ParameterList(values.add(k).sin().to(dtype) for k in range(3))

    def give_gradients(self, step: int) -> None:
        for number, row in enumerate(self.rows):
            row.grad = row.detach().mul(0.5).add_(0.01 * (step + number))


def _optimizer(kit: Kit, model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    if kit.plain:
        return inner
    import lowtide

    return lowtide.swap_optimizer(inner, swap_times=5, **options)


def _steps(kit: Kit, model: Rows, optimizer: Any, steps: range, *, skips: bool = False) -> None:
    for step in steps:
        model.give_gradients(step)
        if skips and step % 2:
            model.rows[1].grad = None
        optimizer.step()
        kit.note(*(row.float() for row in model.rows))
        model.zero_grad()
        kit.mark()


def swapped_state(kit: Kit) -> None:
    """State moves through a window of two buckets; in every second step one parameter has no gradient."""
    model = Rows(kit, torch.float32)
    _steps(kit, model, _optimizer(kit, model), range(5), skips=True)


def swapped_gpt(kit: Kit) -> nn.Module:
    """A small model whose layers' activations move."""
    model: nn.Module = kit.gpt()
    if not kit.plain:
        import lowtide

        for layer in model.layers:  # type: ignore[union-attr]
            lowtide.swap_wrapper(layer)
        lowtide.auto(model)
    return model


def swapped_beside_activations(kit: Kit) -> None:
    """A model's activations and its optimizer's state go through the same carrier and the same buffers."""
    model = swapped_gpt(kit)
    optimizer = _optimizer(kit, model)
    for batch in kit.batches(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        kit.note(*model.parameters())
        kit.mark()


def overlapping(kit: Kit) -> None:
    """The first loads begin in backward and the last stores end in forward; once gradients are thrown away instead."""
    model = kit.gpt()
    optimizer = _optimizer(kit, model, **({} if kit.plain else {"overlap": True}))
    for step, batch in enumerate(kit.batches(5)):
        model(batch).square().mean().backward()
        kit.mark()
        if step != 3:
            optimizer.step()
        optimizer.zero_grad()
        kit.note(*model.parameters())
        kit.mark()


def saved_and_loaded(kit: Kit) -> None:
    """State is read in host memory as soon as it has been told to leave; it is loaded while copies run, and stepped."""
    model = Rows(kit, torch.float32)
    optimizer = _optimizer(kit, model)
    kit.exact = False
    _steps(kit, model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    kit.note(*(state["exp_avg"].to(kit.device) for state in saved["state"].values()))
    for step in range(2, 6, 2):
        _steps(kit, model, optimizer, range(step, step + 2))
        optimizer.load_state_dict(saved)
    if not kit.plain:
        from lowtide.errors import StateError

        expect(StateError, optimizer._segments[0]._swap.get_val)
        optimizer.unwrap()


def failing(kit: Kit) -> None:
    """A step ends with an error in its midst, what was on its way goes back, and the same step goes on."""
    model = Rows(kit, torch.float32)
    optimizer = _optimizer(kit, model)
    kit.exact = False
    _steps(kit, model, optimizer, range(2))
    model.give_gradients(2)
    if not kit.plain:
        _fail_at(kit, optimizer, 4)
    optimizer.step()
    kit.note(*(row.float() for row in model.rows))
    model.zero_grad()
    _steps(kit, model, optimizer, range(3, 5))


def _fail_at(kit: Kit, optimizer: Any, number: int) -> None:
    from lowtide.optim import swap

    update, left = swap.update_segment, [number]

    def fails(*args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("no memory for a temporary")
        update(*args)

    swap.update_segment = fails
    try:
        expect(torch.OutOfMemoryError, optimizer.step)
    finally:
        swap.update_segment = update
    kit.check(not any(segment.is_resident for segment in optimizer._segments), "all that was on its way is back")


def chunks(kit: Kit) -> None:
    """Layers recompute in chunks of three, of which the first one's input moves."""
    model = kit.gpt(layers=6)
    if not kit.plain:
        import lowtide

        config = lowtide.MemoryConfig(
            recompute_method="uniform", full_recompute_num_layers=3, swap_inputs=True, layer_modules="layers.*"
        )
        lowtide.apply(model, config)
    train(kit, model)


class Reads(nn.Module):
    """A layer that saves its own output, and reads what an earlier layer made besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        x = self.second(self.first(x).sin())
        return (x if skip is None else x * skip).tanh()


class Skips(nn.Module):
    """Layers of which each reads the output of the one before, and of the one before that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reads() for _ in range(6))

    def forward(self, x: Tensor) -> list[Tensor]:
        made = [x.cos()]
        for layer in self.layers:
            made.append(layer(made[-1], made[-2] if len(made) > 1 else None))
        return made


def chunks_read_again(kit: Kit) -> None:
    """Outputs of a chunk's layers are read twice, in whole backwards, in parts, with graphs that stay or die."""
    torch.manual_seed(3)
    model = Skips().to(kit.device)
    if not kit.plain:
        import lowtide

        kit.configure(min_bytes=0)
        config = lowtide.MemoryConfig(
            recompute_method="uniform", full_recompute_num_layers=3, swap_inputs=True, layer_modules="layers.*"
        )
        lowtide.apply(model, config)
    for drops in (False, True):
        x = torch.linspace(0, 9, 128 * 64, device=kit.device).view(128, 64).requires_grad_()
        made = model(x)
        kit.mark()
        if drops:
            made.pop()
        loss = made[-1].square().mean()
        del made
        kit.mark()
        kit.note(*torch.autograd.grad(loss, list(model.layers[4].parameters()), retain_graph=True))
        kit.mark()
        for keep in (True, False):
            loss.backward(retain_graph=keep)
            kit.mark()
        del loss
        kit.note(x.grad)
        kit.note_gradients(model)


class Scale(nn.Module):
    """Saves its input and nothing else; a second product reads the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aside = (nn.Parameter(torch.ones(64)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.main, (x * self.aside).mean()


class Scales(nn.Module):
    """Layers whose outputs their own backward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        asides = []
        for layer in self.layers:
            x, aside = layer(x)
            asides.append(aside)
        return x, torch.stack(asides).sum()


def chunks_of_products(kit: Kit) -> None:
    """What a chunk's layers hand on is all there is: the peak is made of it, and so is what stays too long."""
    model = Scales().to(kit.device)
    if not kit.plain:
        import lowtide

        kit.configure(min_bytes=0)
        config = lowtide.MemoryConfig(
            recompute_method="uniform", full_recompute_num_layers=3, swap_inputs=True, layer_modules="layers.*"
        )
        lowtide.apply(model, config)
    asides = [layer.aside for layer in model.layers]
    model(torch.linspace(0, 9, 4096 * 64, device=kit.device).view(4096, 64))[0].sum().backward()
    kit.note_gradients(model)
    for keep in (False, True):
        x = torch.linspace(0, 9, 256 * 64, device=kit.device).view(256, 64)
        out, aside = model(x)
        kit.note(out.grad_fn._saved_self)  # type: ignore[union-attr]
        kit.mark()
        out.square().mean().backward(retain_graph=keep)
        kit.mark()
        # What the first backward has not read is still there.
        kit.note(*torch.autograd.grad(aside, asides))
        del out, aside
        kit.note_gradients(model)


class Bend(nn.Module):
    """Its backward reads what it computes in the middle, and neither its input nor its output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.scale


def chunks_of_bends(kit: Kit) -> None:
    """What one layer makes for the next is all that the peak is made of, once bytes are compared no more."""
    model: nn.Module = nn.Module()
    model.layers = nn.ModuleList(Bend() for _ in range(6))
    model.to(kit.device)
    if not kit.plain:
        import lowtide

        kit.configure(min_bytes=0)
        config = lowtide.MemoryConfig(
            recompute_method="uniform", full_recompute_num_layers=3, swap_inputs=True, layer_modules="layers.*"
        )
        lowtide.apply(model, config)
    for _ in range(4):
        x = torch.linspace(0, 9, 256 * 64, device=kit.device).view(256, 64).requires_grad_()
        out = x
        for layer in model.layers:
            out = layer(out)
        kit.mark()
        out.sum().backward()
        kit.note(x.grad)
        kit.note_gradients(model)
        del x, out
        kit.mark()


STEPPED: dict[str, Callable[[Kit], None]] = {
    "optimizer": swapped_state,
    "optimizer beside activations": swapped_beside_activations,
    "optimizer overlapping": overlapping,
    "optimizer saved": saved_and_loaded,
    "optimizer failing": failing,
    "chunks": chunks,
    "chunks of products": chunks_of_products,
    "chunks of bends": chunks_of_bends,
    "chunks read again": chunks_read_again,
}
