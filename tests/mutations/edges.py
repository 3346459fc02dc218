"""Workloads at the edges: shared storages, exceptions, writes in place, autograd.Functions, gradients in forward.

As in ``workloads``: plain and with lowtide, and no host read before the end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .kit import Kit, expect, made
from .parts import (
    Boxed,
    Branches,
    Caller,
    Forces,
    Fork,
    Late,
    Moody,
    MoodyGradient,
    Pairs,
    Read,
    SideBranch,
    Tail,
    Twice,
    Wide,
    Writer,
)

__all__ = ["EDGES"]


def shared_storage(kit: Kit) -> None:
    """Several regions save one storage: it moves once, and its last owner frees it."""
    torch.manual_seed(5)
    model = Branches().to(kit.device)
    if not kit.plain:
        import lowtide

        for branch in model.branches:
            lowtide.checkpoint_wrapper(branch, lowtide.swap_matmuls_and_attention(), swap_inputs=True)
        lowtide.swap_wrapper(model.tail)
        lowtide.auto(model)
    functions = model.functions
    if not kit.plain:
        for part in functions:
            lowtide.swap_wrapper(part)
    for keep in (False, True):
        x = made(kit, 7, 64 * 200).view(200, 64)
        out = model(x)
        if not keep:
            del x  # else somebody holds what was to move
        out.square().mean().backward()
        kit.note(out)
        del out
        kit.note_gradients(model)


def raising(kit: Kit) -> None:
    """Regions that raise in forward, in all kinds of wraps, and then run as ever."""
    for wrap in ("checkpoint", "swap", "call"):
        torch.manual_seed(6)
        model: Any = nn.Sequential(Moody(), Moody(), Moody()).to(kit.device)
        _wrap_each(kit, model, wrap)
        for raises in (True, False, True, False):
            model[1].raises = raises
            x = made(kit, 8, 64 * 100).view(100, 64)
            if raises:
                expect(KeyError, functools.partial(model, x))
                # A part of the graph outlives the exception; what its region held does not.
                kit.note(made(kit, 1, 500_000)[:1])
                model[1].kept = None
            else:
                model(x).square().mean().backward()
                kit.note_gradients(model)


def _wrap_each(kit: Kit, parts: Any, wrap: str, *, around: nn.Module | None = None) -> None:
    if kit.plain:
        return
    import lowtide

    for part in parts:
        if wrap == "swap":
            lowtide.swap_wrapper(part)
        else:
            recompute = "call" if wrap == "call" else "replay"
            policy = lowtide.swap_matmuls_and_attention()
            lowtide.checkpoint_wrapper(part, policy, swap_inputs=True, recompute=recompute)
    lowtide.auto(parts if around is None else around)


def writes(kit: Kit) -> None:
    """Writes in place: to what the region kept, to what it was given, and in backward's own order."""
    for wrap in ("checkpoint", "swap", "call"):
        torch.manual_seed(7)
        model: Any = nn.Sequential(Writer(), Writer(), Writer()).to(kit.device)
        _wrap_each(kit, model, wrap)
        for retain in (True, False):
            x = made(kit, 8, 64 * 100).view(100, 64).requires_grad_()
            for part in model:
                # Not where Python runs twice: that writes twice, as everybody knows.
                part.state = None if wrap == "call" else made(kit, 9, 64 * 100).view(100, 64)
                part.spare = None if wrap == "call" else made(kit, 9, 64 * 100).view(100, 64)
            middle = x + 0
            middle.register_hook(lambda _: kit.mark())
            out = model(middle)
            del middle
            out.square().mean().backward(retain_graph=retain)
            kit.note(out, x.grad)
            del out, x
            kit.note_gradients(model)


def functions(kit: Kit) -> None:
    """autograd.Functions inside of regions, first opaque and kept, then declared pure and replayed."""
    for pure in (False, True):
        if pure and not kit.plain:
            import lowtide

            lowtide.pure(Twice)
        for wrap in ("checkpoint", "swap"):
            torch.manual_seed(8)
            model = nn.Sequential(Caller(), Caller()).to(kit.device)
            _wrap_each(kit, model, wrap)
            for retain in (False, True):
                out = model(made(kit, 8, 128 * 32).view(32, 128))
                out.square().mean().backward(retain_graph=retain)
                kit.mark()
                if retain:
                    out.square().mean().backward()
                kit.note(out)
                del out
                kit.note_gradients(model)


def _wide_moves(tensor: Tensor) -> Any:
    """What is made first moves; what is made last stays, and is read first."""
    from lowtide import CheckpointPolicy

    return CheckpointPolicy.MUST_SWAP if tensor.shape[1] == 256 else CheckpointPolicy.MUST_SAVE


def signals(kit: Kit) -> None:
    """Backward is noticed by the outputs of a region, by its first unpack, and by what it brings back."""
    for kind in (True, False):
        torch.manual_seed(9)
        model = nn.Sequential(*(Boxed(boxes=kind) for _ in range(6))).to(kit.device)
        if not kit.plain:
            import lowtide

            for part in model:
                lowtide.swap_wrapper(part, _wide_moves)
            lowtide.auto(model)
        for _ in range(2):
            out = model(made(kit, 3, 64 * 100).view(100, 64))
            out = getattr(out, "value", out)
            out.square().mean().backward()
            kit.note(out)
            del out
            kit.note_gradients(model)


def signals_of_a_chain(kit: Kit) -> None:
    """The outputs of a chained layer come long after those of the region inside of it."""
    torch.manual_seed(9)
    model: Any = nn.Sequential(*(Tail() for _ in range(6))).to(kit.device)
    if not kit.plain:
        import lowtide

        for part in model:
            lowtide.swap_wrapper(part.inner)
        for first, second in itertools.pairwise(model):
            lowtide.SwapManager().set_forward_prefetch_layer(first, second)
    for _ in range(2):
        out = model(made(kit, 3, 64 * 100).view(100, 64))
        out.square().mean().backward()
        kit.note(out)
        del out
        kit.note_gradients(model)


def hooks_that_read(kit: Kit) -> None:
    """Hooks read what is saved, in the midst of backward, before its node does."""
    for wrap in ("checkpoint", "swap"):
        torch.manual_seed(15)
        model: Any = nn.Sequential(*(Read() for _ in range(4))).to(kit.device)
        _wrap_each(kit, model, wrap)
        for part in model:
            part.note = kit.note
        out = model(made(kit, 3, 64 * 100).view(100, 64))
        for _ in range(2):
            out.square().mean().backward(retain_graph=True)
            kit.note_gradients(model)
        del out
        for part in model:
            part.node = None


def wide_calls(kit: Kit) -> None:
    """recompute="call" where most of what is kept is not saved by autograd, and the last product is not needed."""
    for part in (Late, Wide):
        torch.manual_seed(16)
        model = nn.Sequential(*(part() for _ in range(4))).to(kit.device)
        _wrap_each(kit, model, "call")
        out = model(made(kit, 3, 64 * 100).view(100, 64))
        kit.mark()
        out.square().mean().backward()
        kit.note(out)
        kit.note_gradients(model)  # with the graph alive
        del out


def branch_by_branch(kit: Kit) -> None:
    """Gradients of several results of a region, one after the other, without retaining its graph."""
    for wrap in ("checkpoint", "swap"):
        torch.manual_seed(14)
        model = nn.Sequential(Fork(), nn.Identity()).to(kit.device)
        _wrap_each(kit, [model[0]], wrap, around=model)
        inputs = [made(kit, seed, 64 * 100).requires_grad_() for seed in (3, 4, 5, 6)]
        calls = [model(x) for x in inputs]  # the second leaves when the third begins
        for results, x in zip(calls, inputs, strict=True):
            for result in results:
                kit.note(*torch.autograd.grad(result.sum(), [x]))
                kit.mark()
        del result, results, calls


def unscheduled(kit: Kit) -> None:
    """A wrapped model that nothing schedules runs after one that is: its bytes stay."""
    scheduled, other = (nn.Sequential(*(SideBranch() for _ in range(3))).to(kit.device) for _ in range(2))
    _wrap_each(kit, scheduled, "swap")
    if not kit.plain:
        import lowtide

        for part in other:
            lowtide.swap_wrapper(part)
    for _ in range(2):
        for model in (scheduled, other):
            out = model(made(kit, 3, 64 * 100).view(100, 64))
            out.square().mean().backward()
            del out
            kit.note_gradients(model)


def gradient_inside(kit: Kit) -> None:
    """A chained layer takes a gradient in its own forward, while the layer before it leaves."""
    torch.manual_seed(10)
    model: Any = nn.Sequential(*(Forces(differentiates=bool(number % 2)) for number in range(5))).to(kit.device)
    if not kit.plain:
        import lowtide

        for part in model:
            lowtide.swap_wrapper(part.energy)
        for first, second in itertools.pairwise(model):
            lowtide.SwapManager().set_forward_prefetch_layer(first, second)
    for _ in range(2):
        out = model(made(kit, 3, 64 * 100).view(100, 64).requires_grad_())
        out.square().mean().backward()
        kit.note(out)
        del out
        kit.note_gradients(model)


def side_branch(kit: Kit) -> None:
    """A region builds a branch and drops it; what autograd saved for that is nobody's."""
    for wrap in ("checkpoint", "swap"):
        torch.manual_seed(11)
        model = nn.Sequential(*(SideBranch() for _ in range(4))).to(kit.device)
        _wrap_each(kit, model, wrap)
        for _ in range(2):
            out, kept = model(made(kit, 3, 64 * 100).view(100, 64)), None
            out.square().mean().backward()
            kit.note(out)
            del out, kept
            kit.note_gradients(model)


def _clear(kit: Kit, things: list[Any]) -> None:
    things.clear()
    kit.mark()


def two_outputs(kit: Kit) -> None:
    """Regions with two results: one is dropped unread, before backward, in its midst, or between two of them."""
    for wrap in ("checkpoint", "swap"):
        torch.manual_seed(12)
        model: Any = Pairs(4).to(kit.device)
        _wrap_each(kit, model.parts, wrap, around=model)
        for when in ("never", "before", "amid", "between"):
            out, sides = model(made(kit, 3, 128 * 32).view(32, 128))
            if when == "before":
                sides.clear()
            for part in model.parts:
                part.amid = functools.partial(_clear, kit, sides) if when == "amid" else None
            if when in {"never", "between"}:
                out.square().mean().backward(retain_graph=True)
                if when == "never":
                    sum(side.mean() for side in sides).backward(retain_graph=True)
                kit.mark()
                sides.clear()
            kit.note(out.grad_fn.next_functions[0][0]._saved_self)  # read outside of a backward
            kit.mark()
            out.square().mean().backward()
            kit.note(out)
            del out
            kit.note_gradients(model)


def backward_raises(kit: Kit) -> None:
    """A hook raises in the midst of backward; the next one starts from the beginning."""
    for wrap in ("checkpoint", "swap", "call"):
        torch.manual_seed(13)
        hooks = [MoodyGradient() for _ in range(6)]
        moody = hooks[3]
        for hook in hooks:
            hook.calm = kit.mark
        pairs = zip(hooks[::2], hooks[1::2], strict=True)
        model = nn.Sequential(*(nn.Sequential(one, SideBranch(), two, SideBranch()) for one, two in pairs))
        model.to(kit.device)
        _wrap_each(kit, model, wrap)
        x = made(kit, 3, 64 * 100).view(100, 64).requires_grad_()
        out = model(x)
        for raises in (True, True, False):
            moody.raises = raises
            loss = out.square().mean()
            if raises:
                expect(KeyError, functools.partial(loss.backward, retain_graph=True))
                kit.mark()
            else:
                loss.backward()
        kit.note(out, x.grad)
        del out, loss
        kit.note_gradients(model)


EDGES: dict[str, Callable[[Kit], None]] = {
    "shared": shared_storage,
    "raising": raising,
    "writes": writes,
    "functions": functions,
    "signals": signals,
    "signals of a chain": signals_of_a_chain,
    "hooks that read": hooks_that_read,
    "wide calls": wide_calls,
    "branch by branch": branch_by_branch,
    "unscheduled": unscheduled,
    "gradient inside": gradient_inside,
    "side branch": side_branch,
    "two outputs": two_outputs,
    "backward raises": backward_raises,
}
