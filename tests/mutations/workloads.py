"""Programs that a mutant has to survive: training in several modes, and tensors moved by hand.

Each runs twice: plain, without lowtide, and with it; what it notes must agree
in every bit. None reads a value on the host before its end, since that would
order every stream and hide a race. Imports lowtide inside of functions only:
the package is imported anew for every mutant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .edges import EDGES
from .handmade import HANDMADE
from .hosted import HOSTED
from .kit import Kit, Tapped, made, train
from .parts import Even, Pauses
from .stepped import STEPPED

__all__ = ["WORKLOADS", "Workload"]

Workload = Callable[[Kit], None]


def _checkpointed(kit: Kit, model: Any, **options: Any) -> None:
    if kit.plain:
        return
    import lowtide

    for layer in model.layers:
        lowtide.checkpoint_wrapper(layer, lowtide.swap_matmuls_and_attention(), swap_inputs=True, **options)


def _swapped(kit: Kit, layers: Any) -> None:
    if kit.plain:
        return
    import lowtide

    for layer in layers:
        lowtide.swap_wrapper(layer)


def _learned(kit: Kit, model: nn.Module) -> None:
    if not kit.plain:
        import lowtide

        lowtide.auto(model)


def checkpoint_learned(kit: Kit) -> None:
    """checkpoint_wrapper with a swap policy under lowtide.auto, two micro-batches one by one."""
    model = kit.gpt()
    _checkpointed(kit, model)
    _learned(kit, model)
    train(kit, model)


def swap_learned(kit: Kit) -> None:
    """swap_wrapper under lowtide.auto, two micro-batches interleaved."""
    model = kit.gpt()
    _swapped(kit, model.layers)
    _learned(kit, model)
    train(kit, model, interleaved=True)


def stages(kit: Kit) -> None:
    """The stages of two chunks of a pipeline: two micro-batches warm up, then a forward and a backward in turn."""
    chunks = [kit.gpt() for _ in range(2)]
    for model in chunks:
        _swapped(kit, model.layers)
        _learned(kit, model)
    waiting: list[list[torch.Tensor]] = [[], []]
    for batch in kit.batches(5):
        for model, losses in zip(chunks, waiting, strict=True):
            losses.append(model(batch).square().mean())
            kit.mark()
        for losses in waiting:
            if len(losses) > 2:
                losses.pop(0).backward()
                kit.mark()
    for losses in waiting:
        while losses:
            losses.pop(0).backward()
            kit.mark()
    for model in chunks:
        kit.note_gradients(model)


def swap_narrow(kit: Kit) -> None:
    """The whole model is one swapped region, and few bytes may be in flight."""
    kit.configure(in_flight_bytes=300_000)
    model = kit.gpt()
    _swapped(kit, [model])
    _learned(kit, model)
    train(kit, model)
    for layer in model.layers:
        _swapped(kit, [layer])
    train(kit, model)


def swap_far(kit: Kit) -> None:
    """Backward loads three regions ahead."""
    kit.configure(prefetch=3)
    model = kit.gpt()
    _swapped(kit, model.layers)
    _learned(kit, model)
    train(kit, model)


def swap_far_bounded(kit: Kit) -> None:
    """Backward would load three regions ahead, and the bound on bytes in flight allows one."""
    kit.configure(prefetch=3, in_flight_bytes=300_000)
    model = kit.gpt(layers=6)
    _swapped(kit, model.layers)
    _learned(kit, model)
    train(kit, model)


def nested(kit: Kit) -> None:
    """A swapped model around checkpointed layers: what those keep of their inputs moves."""
    model = kit.gpt()
    if not kit.plain:
        import lowtide

        for layer in model.layers:
            lowtide.checkpoint_wrapper(layer, lowtide.save_matmuls_and_attention())
    _swapped(kit, [model])
    _learned(kit, model)
    train(kit, model, interleaved=True)


def _chain(kit: Kit, layers: Any) -> None:
    if kit.plain:
        return
    import lowtide

    for first, second in itertools.pairwise(layers):
        lowtide.SwapManager().set_forward_prefetch_layer(first, second)


def chained(kit: Kit) -> None:
    """A declared chain over layers; one layer holds two regions inside."""
    model = kit.gpt()
    _checkpointed(kit, model)
    _chain(kit, model.layers)
    train(kit, model, interleaved=True)


def chained_bounded(kit: Kit) -> None:
    """Two layers of a chain would leave at once, and the bound on bytes in flight forbids it."""
    kit.configure(in_flight_bytes=300_000)
    torch.manual_seed(4)
    model = Pauses(5).to(kit.device)
    _swapped(kit, model.layers)
    _chain(kit, model.layers)
    for _ in range(2):
        _even_steps(kit, model, 200)


def chained_inside(kit: Kit) -> None:
    """One swapped region around a declared chain: what is open when a layer ends belongs to that layer."""
    model = kit.gpt()
    _swapped(kit, [model])
    _chain(kit, model.layers)
    train(kit, model)


def chained_apart(kit: Kit) -> None:
    """Layers that belong to no chain run between two that do: the time in between is there to be used."""
    model = kit.gpt(layers=6)
    _checkpointed(kit, model)
    _chain(kit, [model.layers[0], model.layers[3], model.layers[5]])
    train(kit, model)


def cut_short(kit: Kit) -> None:
    """Forward stops in the midst of a chain: what is leaving then is what backward needs first."""
    for wrap in (_checkpointed, lambda k, m: _swapped(k, m.layers)):
        model = Tapped(kit.gpt())
        wrap(kit, model)
        _chain(kit, model.layers)
        for stop in (1, 2, 3):
            taps = model(*kit.batches(1), stop=stop)
            weights = list(model.layers[stop - 1].mlp.parameters())
            kit.note(*torch.autograd.grad(taps[-1].sum(), weights, retain_graph=True))
            # Another forward ends while the first one's graph is alive and reached.
            model(*kit.batches(1))[-1].square().mean().backward()
            taps[-1].square().mean().backward()
            del taps
            kit.note_gradients(model)
    _reached_one_by_one(kit)


def _reached_one_by_one(kit: Kit) -> None:
    """A first backward reaches the last layer alone, and lets the one before it stay; a second graph then passes it."""
    kit.configure(prefetch=3)
    model = Tapped(kit.gpt())
    _swapped(kit, model.layers)
    _chain(kit, model.layers)
    taps = model(*kit.batches(1))
    weights = list(model.layers[-1].mlp.parameters())
    kit.note(*torch.autograd.grad(taps[-1].sum(), weights, retain_graph=True))
    model(*kit.batches(1))[-1].square().mean().backward()
    taps[-1].square().mean().backward()
    del taps
    kit.note_gradients(model)


def groups(kit: Kit) -> None:
    """Groups driven by hand, one for each of two micro-batches; the second goes down on a stream of the user's."""
    model = kit.gpt()
    _checkpointed(kit, model)
    batches = kit.batches(2)
    manager = kit.manager()
    own = torch.Stream(device=kit.device)
    for _ in range(2):
        losses = []
        for number, batch in enumerate(batches):
            manager.set_current_group_name(f"batch {number}")
            losses.append(model(batch).square().mean())
            manager.set_current_group_name(None)
            manager.launch_offload(f"batch {number}", own if number else None)
            if number:
                manager.wait_offload(f"batch {number - 1}")
        manager.wait_offload("batch 1")
        manager.launch_load("batch 0")
        kit.note(*losses)
        for number in range(2):
            manager.wait_load(f"batch {number}")
            kit.check(number == 0 or manager.lower_bytes() == 0, "what was waited for has no copy on the host")
            if not number:
                manager.launch_load("batch 1", own)
            losses[number].backward()
        del losses
        kit.note_gradients(model)


def pipeline(kit: Kit) -> None:
    """One micro-batch goes down while another comes back: both directions of the link work at once."""
    model = kit.gpt()
    _swapped(kit, model.layers)
    batches = kit.batches(3)
    manager = kit.manager()
    for _ in range(2):
        losses: dict[int, torch.Tensor] = {}
        for number, batch in enumerate(batches):
            manager.set_current_group_name(f"batch {number}")
            losses[number] = model(batch).square().mean()
            manager.set_current_group_name(None)
            manager.launch_offload(f"batch {number}")
            if number:
                manager.launch_load(f"batch {number - 1}")
            manager.wait_offload(f"batch {number}")
            if number:
                manager.wait_load(f"batch {number - 1}")
                losses.pop(number - 1).backward()
        manager.launch_load("batch 2")
        manager.wait_load("batch 2")
        losses.pop(2).backward()
        kit.note_gradients(model)


def call_mode(kit: Kit) -> None:
    """recompute="call": the module runs again, what the policy swaps comes back."""
    model = kit.gpt()
    _checkpointed(kit, model, recompute="call")
    _learned(kit, model)
    train(kit, model, interleaved=True)


def side_stream(kit: Kit) -> None:
    """Everything computes on a stream that is not the default one, which runs behind."""
    side = torch.Stream(device=kit.device)
    model = kit.gpt()
    _checkpointed(kit, model)
    _learned(kit, model)
    kit.warm_up(model)  # on the default stream first: a stream that is remembered is the wrong one
    side.wait_stream(torch.accelerator.current_stream(kit.device))
    with side:
        train(kit, model)
    torch.accelerator.current_stream(kit.device).wait_stream(side)


def worker_threads(kit: Kit) -> None:
    """Backward runs on a thread of autograd's, as it does by default, and on a stream that is not the default one."""
    kit.exact = False
    with torch.autograd.set_multithreading_enabled(True):
        side_stream(kit)
        swap_learned(kit)


def retained(kit: Kit) -> None:
    """A retained graph runs backward twice; a third graph is dropped without one."""
    for wrap in (_checkpointed, lambda k, m: _swapped(k, m.layers)):
        model = kit.gpt()
        wrap(kit, model)
        _learned(kit, model)
        (batch,) = kit.batches(1)
        loss = model(batch).square().mean()
        loss.backward(retain_graph=True)
        kit.note_gradients(model)  # what it computed again is gone
        model(batch).square().mean().backward()  # what backward has reached stays
        kit.note_gradients(model)
        loss.backward()
        kit.note(loss)
        kit.note_gradients(model)
        del loss
        model(batch).square().mean()  # dropped
        with torch.no_grad():
            kit.note(model(batch))
        model(batch).square().mean().backward()
        kit.note_gradients(model)


def partial(kit: Kit) -> None:
    """Backward runs branch by branch, and one branch never does."""
    for wrap in (_checkpointed, lambda k, m: _swapped(k, m.layers)):
        model = Tapped(kit.gpt())
        wrap(kit, model)
        _learned(kit, model)
        for _ in range(2):
            taps = model(*kit.batches(1))
            kit.note(
                *torch.autograd.grad(taps[1].square().mean(), list(model.layers[1].parameters()), retain_graph=True)
            )
            kit.note(*torch.autograd.grad(taps[2].sum(), list(model.layers[0].parameters()), retain_graph=True))
            del taps[3]
            taps[2].square().mean().backward()
            del taps
            kit.note_gradients(model)


def halves(kit: Kit) -> None:
    """Half a backward, which borrows; a whole one that keeps its graph, which gives back; and the last one."""
    model = kit.gpt()
    if not kit.plain:
        import lowtide

        for layer in model.layers:
            lowtide.checkpoint_wrapper(layer, swap_inputs=True)
    _learned(kit, model)
    loss = model(*kit.batches(1)).square().mean()
    kit.note(*torch.autograd.grad(loss, list(model.token.parameters()), retain_graph=True))
    kit.mark()
    for keep in (True, False):
        loss.backward(retain_graph=keep)
        kit.mark()
    del loss
    kit.note_gradients(model)


def discarded(kit: Kit) -> None:
    """An output is used, and emptied, on another stream than the one that made it."""
    compute, side = torch.accelerator.current_stream(), torch.Stream(device=kit.device)
    x, weight = (made(kit, seed, 64 * 64).view(64, 64).requires_grad_() for seed in (1, 2))
    side.wait_stream(compute)
    if kit.plain:
        hidden = torch.nn.functional.gelu(x)
        with side:
            side.wait_stream(compute)
            out = hidden @ weight
    else:
        import lowtide

        checkpoint = lowtide.CheckpointWithoutOutput()
        hidden = checkpoint.checkpoint(torch.nn.functional.gelu, False, x)
        with side:
            side.wait_stream(compute)
            out = hidden @ weight
            checkpoint.discard_output_and_register_recompute(out)
    compute.wait_stream(side)
    out.square().mean().backward()
    kit.note(x.grad, weight.grad)
    del hidden, out
    checkpoint_learned(kit)


def budget(kit: Kit) -> None:
    """A host budget that refuses some tensors, and sizes that change, so that buffers are reused and freed."""
    torch.manual_seed(4)
    # All that moves has one size, so that it does not matter which tensor is refused.
    model = nn.Sequential(*(Even() for _ in range(5))).to(kit.device)
    _swapped(kit, model)
    _learned(kit, model)
    kit.configure(host_bytes=400_000)
    for rows in (200, 100, 300, 50, 200):
        _even_steps(kit, model, rows)
    kit.configure(host_bytes=1_000_000)  # retires the carrier
    _even_steps(kit, model, 200)


def _even_steps(kit: Kit, model: nn.Module, rows: int) -> None:
    x = torch.ones(rows, 64, device=kit.device)
    losses = [model(x + number).square().mean() for number in range(2)]
    for loss in losses:
        loss.backward()
    kit.note_gradients(model)


WORKLOADS: dict[str, Workload] = {
    "checkpoint": checkpoint_learned,
    "swap": swap_learned,
    "stages": stages,
    "narrow": swap_narrow,
    "far": swap_far,
    "far, bounded": swap_far_bounded,
    "nested": nested,
    "chain": chained,
    "chain, bounded": chained_bounded,
    "chain inside": chained_inside,
    "chain apart": chained_apart,
    "cut short": cut_short,
    "pipeline": pipeline,
    "groups": groups,
    "call": call_mode,
    "side stream": side_stream,
    "worker threads": worker_threads,
    "retained": retained,
    "partial": partial,
    "halves": halves,
    "discarded": discarded,
    "budget": budget,
    **HANDMADE,
    **EDGES,
    **STEPPED,
    **HOSTED,
}
