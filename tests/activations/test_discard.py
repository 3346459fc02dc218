"""F1: an output that is freed after its consumers have run, and is back, in place, before backward reads it.

Law: bits, gradients and random state are plain autograd's; the bytes of every discarded output are free between the
discard and the recompute; whatever cannot be discarded safely stays and is counted; misuse raises.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide
from lowtide import CheckpointWithoutOutput, SwapManager, checkpoint_wrapper, swap_wrapper
from lowtide import _torch as shim
from lowtide.activations import discard
from lowtide.errors import ModifiedError, StateError, UnsupportedError
from lowtide.storage import Emptied

from .kit import Operators, alive, no_collector, results, same

WIDTH, WIDE = 16, 48


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def dropped(x: Tensor) -> Tensor:
    return F.dropout(F.gelu(x), 0.25)


def own_output(x: Tensor) -> Tensor:
    return x.sin().tanh()  # its own backward reads the output, too


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def in_place(x: Tensor) -> Tensor:
    return x.sin().mul_(0.5).add_(1.0)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (gelu, swiglu, dropped, own_output, normed, in_place)
}


class Mlp(nn.Module):
    """Up, activation, down; with the output of the activation discarded, or not."""

    def __init__(self, function: Callable[[Tensor], Tensor], *, discards: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.discards = discards
        self.up = nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE // 2 if function is swiglu else WIDE, WIDTH)
        self.freed = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if not self.discards:
            return self.down(self.function(h))
        self.checkpoint = CheckpointWithoutOutput()
        hidden = self.checkpoint.checkpoint(self.function, False, h)
        nbytes = hidden.untyped_storage().nbytes()
        out = self.down(hidden)
        if torch.is_grad_enabled():
            self.checkpoint.discard_output_and_register_recompute(out)
        self.freed = nbytes - hidden.untyped_storage().nbytes()
        return out


def pair(function: Callable[[Tensor], Tensor]) -> tuple[Mlp, Mlp]:
    return Mlp(function, discards=False), Mlp(function, discards=True)


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    return found


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, WIDTH)


def trains_alike(plain: nn.Module, other: nn.Module, x: Tensor) -> None:
    for seed in (3, 4):
        want, got = results(plain, x, seed=seed), results(other, x, seed=seed)
        assert same(want, got)
        assert same(gradients(plain), gradients(other))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_training_is_the_same_and_the_output_is_freed(name: str, x: Tensor) -> None:
    plain, other = pair(FUNCTIONS[name])
    trains_alike(plain, other, x)
    width = WIDE // 2 if name == "swiglu" else WIDE
    assert other.freed == x.shape[0] * width * x.element_size()


@pytest.mark.parametrize("name", ["gelu", "dropped"])
def test_only_the_function_runs_again(name: str, x: Tensor) -> None:
    counts = []
    for model in pair(FUNCTIONS[name]):
        torch.manual_seed(1)
        out = model(x)
        with Operators() as operators:
            out.sum().backward()
        counts.append(operators.counts)
    extra = counts[1] - counts[0]
    assert extra["gelu"] == 1
    assert extra["native_dropout"] + extra["bernoulli_"] == (name == "dropped")
    assert not {"mm", "addmm"} & set(extra)


def test_autocast_is_that_of_forward(x: Tensor) -> None:
    kind = x.device.type

    def step(model: nn.Module) -> Tensor:
        with torch.autocast(kind, torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
        return out

    plain, other = pair(gelu)
    assert torch.equal(step(plain), step(other))
    assert same(gradients(plain), gradients(other))


def test_views_that_consumers_saved_see_the_output_again_in_its_own_storage(x: Tensor) -> None:
    w = torch.randn(WIDTH // 2, 4, requires_grad=True)
    seen: list[int] = []

    def run(call: Any) -> list[Tensor | None]:
        leaf = x.clone().requires_grad_()
        hidden, end = call(leaf)
        left, right = hidden.view(6, 2, -1).unbind(1)
        out = (left @ w) * (right.t().t() @ w)
        end(out)
        seen.append(hidden.untyped_storage().nbytes())
        out.sum().backward()
        seen.append(hidden.untyped_storage().nbytes())
        grad, w.grad = w.grad, None
        return [leaf.grad, grad, hidden.detach()]

    def discarding(leaf: Tensor) -> Any:
        checkpoint = CheckpointWithoutOutput()
        hidden = checkpoint.checkpoint(own_output, False, leaf)
        return hidden, checkpoint.discard_output_and_register_recompute

    want = run(lambda leaf: (own_output(leaf), lambda out: None))
    got = run(discarding)
    assert same(want, got)
    nbytes = x.numel() * x.element_size()
    assert seen == [nbytes, nbytes, 0, nbytes]


@pytest.mark.sim
@pytest.mark.skipif(shim.swap_bytes is None, reason="this torch copies")
def test_there_is_never_a_second_copy() -> None:
    import lowtide.sim

    simulator = lowtide.sim.active()
    assert simulator is not None
    x = torch.randn(256, 1024, device="sim", requires_grad=True)
    w = torch.randn(1024, 2, device="sim", requires_grad=True)
    before = simulator.memory().allocated
    nbytes = x.numel() * 4
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(gelu, False, x)
    assert simulator.memory().allocated == before + nbytes
    out = hidden @ w
    checkpoint.discard_output()
    held = simulator.memory().allocated
    assert held == before + out.numel() * 4
    simulator.reset_peaks()
    checkpoint.recompute()
    memory = simulator.memory()
    assert memory.peak_allocated == memory.allocated == held + nbytes
    out.sum().backward()
    assert not simulator.races()


def test_without_an_exchange_of_memory_the_bytes_are_copied(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    monkeypatch.setattr(lowtide.storage, "swap_bytes", None)
    trains_alike(*pair(own_output), x)


def test_several_outputs_and_arguments_that_are_no_tensors(x: Tensor) -> None:
    def function(x: Tensor, power: int, table: dict[str, float]) -> tuple[Tensor, dict[str, Tensor], int]:
        return x**power, {"scaled": x.exp() * table["scale"]}, power

    def run(*, discards: bool) -> list[Tensor | None]:
        leaf = x.clone().requires_grad_()
        checkpoint = CheckpointWithoutOutput()
        arguments = (leaf, 3, {"scale": 0.5})
        first, rest, power = checkpoint.checkpoint(function, False, *arguments) if discards else function(*arguments)
        assert power == 3
        out = first * rest["scaled"]
        if discards:
            checkpoint.discard_output_and_register_recompute(out)
            assert first.untyped_storage().nbytes() == rest["scaled"].untyped_storage().nbytes() == 0
        out.sum().backward()
        return [leaf.grad]

    assert same(run(discards=False), run(discards=True))


def test_an_output_that_shares_storage_with_an_input_stays(x: Tensor) -> None:
    leaf = (x * 2).requires_grad_()
    checkpoint = CheckpointWithoutOutput()
    view, made = checkpoint.checkpoint(lambda t: (t.view(-1), t.exp()), False, leaf)
    out = view.square().sum() + made.square().sum()
    checkpoint.discard_output_and_register_recompute(out)
    assert leaf.untyped_storage().nbytes() > 0 == made.untyped_storage().nbytes()
    out.backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, 2 * leaf.detach() + 2 * leaf.detach().exp().square())
    refused = checkpoint._region.row.refused  # type: ignore[union-attr]
    assert [r.bytes for r in refused.values()] == [x.numel() * x.element_size()]


def test_an_output_that_was_written_to_afterwards_stays(x: Tensor) -> None:
    def run(*, discards: bool) -> list[Tensor | None]:
        leaf = x.clone().requires_grad_()
        checkpoint = CheckpointWithoutOutput()
        hidden = checkpoint.checkpoint(gelu, False, leaf) if discards else gelu(leaf)
        hidden += 1
        out = hidden.square().sum()
        if discards:
            checkpoint.discard_output_and_register_recompute(out)
            (reason,) = checkpoint._region.row.refused  # type: ignore[union-attr]
            assert reason == discard._WRITTEN and hidden.untyped_storage().nbytes() > 0
        out.backward()
        return [leaf.grad]

    assert same(run(discards=False), run(discards=True))


class Layer(nn.Module):
    """Several in forward order: the input of the second is the discarded output of the first."""

    def __init__(self, *, discards: bool, down: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.discards = discards
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        if down is not None:
            down(self.down)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        if not self.discards:
            return x + self.down(dropped(self.up(normed(x)).sigmoid()))
        first, second, third = (CheckpointWithoutOutput() for _ in range(3))
        n = first.checkpoint(normed, False, x)
        h = second.checkpoint(torch.sigmoid, False, self.up(n))
        a = third.checkpoint(dropped, False, h)
        out = self.down(a)
        for one in (first, second, third):
            one.discard_output()
        assert all(t.untyped_storage().nbytes() == 0 for t in (n, h, a)) or not torch.is_grad_enabled()
        if out.requires_grad:
            # In forward order, and in any other.
            for one in (third, first, second):
                out.register_hook(one.recompute)
        return x + out


def test_several_in_one_layer(x: Tensor) -> None:
    trains_alike(
        nn.Sequential(*[Layer(discards=False) for _ in range(3)]),
        nn.Sequential(*[Layer(discards=True) for _ in range(3)]),
        x,
    )


def test_evaluation_between_steps(x: Tensor) -> None:
    plain, other = Layer(discards=False), Layer(discards=True)
    for model in (plain, other):
        results(model, x)
    with torch.no_grad():
        torch.manual_seed(5)
        want = plain(x)
        torch.manual_seed(5)
        assert torch.equal(want, other(x))
    for model in (plain, other):
        gradients(model)
    trains_alike(plain, other, x)


CONSUMERS: dict[str, Callable[[nn.Module], Any]] = {
    "recompute": checkpoint_wrapper,
    "recompute, swapped inputs": lambda m: checkpoint_wrapper(m, swap_inputs=True),
    "swap": swap_wrapper,
}


@pytest.mark.parametrize("kind", CONSUMERS)
def test_a_consumer_that_is_a_region_makes_it_again_by_itself(kind: str, x: Tensor) -> None:
    SwapManager().configure(min_bytes=0)
    SwapManager().set_current_group_name("all")
    plain, other = Mlp(own_output, discards=False), Mlp(own_output, discards=True)
    CONSUMERS[kind](other.down)
    trains_alike(plain, other, x)


OUTER: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "checkpoint_wrapper, call": lambda m: checkpoint_wrapper(m, recompute="call"),
    "swap_wrapper": swap_wrapper,
    "torch": lambda m: lambda x: torch_checkpoint(m, x, use_reentrant=False),
    "torch, reentrant": lambda m: lambda x: torch_checkpoint(m, x, use_reentrant=True),
    "save_on_cpu": lambda m: lambda x: _on_cpu(m, x),
}


def _on_cpu(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        out = module(x)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("kind", OUTER)
def test_inside_of_whatever_else_holds_saved_tensors(kind: str, x: Tensor) -> None:
    SwapManager().configure(min_bytes=0)
    SwapManager().set_current_group_name("all")
    plain, other = pair(dropped)
    call = OUTER[kind](other)
    for seed in (3, 4):
        assert same(results(plain, x, seed=seed), results(call, x, seed=seed))
        assert same(gradients(plain), gradients(other))


def test_what_other_hooks_hold_is_counted(x: Tensor) -> None:
    _, other = pair(gelu)
    _on_cpu(other, x)
    assert other.freed == 0
    row = other.checkpoint._region.row  # type: ignore[union-attr]
    assert row.refused[discard._HOOKED].bytes == x.shape[0] * WIDE * x.element_size()
    assert discard._HOOKED in str(lowtide.report(other))


@pytest.mark.parametrize("create", [False, True])
def test_backward_twice(x: Tensor, *, create: bool) -> None:
    def run(model: nn.Module) -> list[Tensor | None]:
        leaf = x.clone().requires_grad_()
        torch.manual_seed(2)
        out = model(leaf).square().sum()
        if create:
            (grad,) = torch.autograd.grad(out, leaf, create_graph=True)
            (out + grad.square().sum()).backward()
        else:
            out.backward(retain_graph=True)
            out.backward()
        return [leaf.grad, *gradients(model)]

    plain, other = pair(dropped)
    assert same(run(plain), run(other))


def test_nothing_outlives_the_graph(x: Tensor) -> None:
    _, model = pair(own_output)
    with no_collector():
        before = alive()
        out = model(x)
        inner = weakref.ref(model.checkpoint._session())  # type: ignore[misc]
        out.sum().backward()
        del out
        assert inner() is None
        out = model(x)  # and one that never runs backward
        del out
        assert alive() == before
        assert not any(type(thing) is Emptied for thing in gc.get_objects())
    model.checkpoint.recompute()  # harmless: its graph is gone


def test_a_copy_of_what_holds_one_begins_anew(x: Tensor) -> None:
    plain, other = pair(gelu)
    results(other, x)
    for made in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):  # noqa: S301 - our own bytes
        for model in (plain, made):
            gradients(model)
        trains_alike(plain, made, x)


@dataclasses.dataclass
class Pair:
    first: Tensor
    second: Tensor


def test_a_dataclass_of_outputs(x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    checkpoint = CheckpointWithoutOutput()
    both = checkpoint.checkpoint(lambda t: Pair(t.sin(), t.exp()), False, leaf)
    out = (both.first * both.second).sum()
    checkpoint.discard_output_and_register_recompute(out)
    assert both.first.untyped_storage().nbytes() == both.second.untyped_storage().nbytes() == 0
    out.backward()
    plain = x.clone().requires_grad_()
    (plain.sin() * plain.exp()).sum().backward()
    assert leaf.grad is not None and plain.grad is not None and torch.equal(leaf.grad, plain.grad)


@pytest.mark.sim
@pytest.mark.parametrize("made_on_side", [False, True])
def test_the_consumers_may_run_on_another_stream_than_the_function(*, made_on_side: bool) -> None:
    import lowtide.sim

    simulator = lowtide.sim.active()
    assert simulator is not None
    x, w = (torch.randn(64, 64, device="sim", requires_grad=True) for _ in range(2))
    streams = [torch.accelerator.current_stream(), torch.Stream(device="sim")]
    maker, reader = reversed(streams) if made_on_side else streams
    checkpoint = CheckpointWithoutOutput()
    maker.wait_stream(streams[0])
    with maker:
        hidden = checkpoint.checkpoint(gelu, False, x)
    with reader:
        reader.wait_stream(maker)
        out = hidden @ w
        checkpoint.discard_output_and_register_recompute(out)
    del hidden
    streams[0].wait_stream(reader)
    out.sum().backward()
    assert not simulator.races()


def test_what_failed_once_is_still_missing(x: Tensor) -> None:
    leaf = x.clone().requires_grad_()
    middle = leaf * 2
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(gelu, False, middle)
    checkpoint.discard_output()
    middle.detach().add_(1)
    for _ in range(2):
        with pytest.raises(ModifiedError):
            checkpoint.recompute()
    assert hidden.untyped_storage().nbytes() == 0


# ---- misuse ------------------------------------------------------------------------------------------------


def test_saved_activations_are_not_distributed(x: Tensor) -> None:
    with pytest.raises(UnsupportedError, match="Pass False"):
        CheckpointWithoutOutput().checkpoint(gelu, True, x)


@pytest.mark.parametrize("call", ["discard_output", "recompute"])
def test_a_call_without_checkpoint(call: str) -> None:
    with pytest.raises(StateError, match=f"{call} without a checkpoint"):
        getattr(CheckpointWithoutOutput(), call)()


def test_recompute_of_what_is_there_and_discarding_twice(x: Tensor) -> None:
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(gelu, False, x.requires_grad_())
    with pytest.raises(StateError, match="discard_output\\(\\) first"):
        checkpoint.recompute()
    checkpoint.discard_output()
    with pytest.raises(StateError, match="twice"):
        checkpoint.discard_output()
    checkpoint.recompute()
    checkpoint.recompute()
    assert torch.equal(hidden, gelu(x))


def test_a_hook_tensor_without_gradient(x: Tensor) -> None:
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(gelu, False, x.requires_grad_())
    with pytest.raises(StateError, match="has none"):
        checkpoint.discard_output_and_register_recompute(hidden.detach())
    assert hidden.untyped_storage().nbytes() > 0


def test_an_output_that_nobody_made_again_raises(x: Tensor) -> None:
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(gelu, False, x.requires_grad_())
    out = hidden.sum() + hidden.mean()  # consumers that read nothing in backward
    checkpoint.discard_output()
    with pytest.raises(StateError, match="was not made again"):
        out.backward()


def test_a_frozen_input_still_serves_the_consumers_weight(x: Tensor) -> None:
    w = torch.randn(WIDTH, 4, requires_grad=True)
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(gelu, False, x)
    out = hidden @ w
    checkpoint.discard_output()
    out.register_hook(checkpoint.recompute)
    assert hidden.untyped_storage().nbytes() == 0
    out.sum().backward()
    assert w.grad is not None and torch.equal(w.grad, gelu(x).t() @ torch.ones(6, 4))
