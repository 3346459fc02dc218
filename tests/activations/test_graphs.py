"""What autograd may do with a graph beside one backward, and the pitfalls that the first tapes fell into.

Law: retained, partial, double, nested, interleaved and failing backwards give
plain autograd's bits, run each node once per backward, and leave nothing behind.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import lowtide
from lowtide import CheckpointPolicy, SwapManager, checkpoint_wrapper, save_ops, swap_wrapper
from lowtide.activations.tape import Tape

from .kit import Operators, alive, backward_operators, no_collector, recompute, results, row_of, same

N = 8


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, N)


def _wide(x: Tensor) -> Tensor:
    return F.dropout((x.exp() * x.tanh()).softmax(-1), 0.2) * x.sin()


def _random_answers(ctx: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Some operators kept, some moved, some computed again; the same in every run."""
    return list(CheckpointPolicy)[len(str(op)) % 6]


WRAPS: dict[str, Callable[[Any], Any]] = {
    "recompute": recompute,
    "mixed": lambda f: recompute(f, policy_fn=_random_answers, swap_inputs=True),
    "swap": swap_wrapper,
}


@pytest.fixture(params=WRAPS)
def wrap(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Each way to treat activations, with a group that moves what may move."""
    SwapManager().configure(min_bytes=0)
    SwapManager().set_current_group_name("all")
    return WRAPS[request.param]


def both(wrap: Callable[[Any], Any], action: Callable[[Any], Any], fn: Callable[..., Any]) -> None:
    """``action`` gives the same tensors with ``fn`` and with the wrapped one."""
    seen = []
    for call in (fn, wrap(fn)):
        torch.manual_seed(1)
        seen.append([*action(call), torch.get_rng_state()])
    assert same(*seen)


# ---- more than one backward ------------------------------------------------------------------------


@pytest.mark.cpu
def test_a_retained_graph_runs_each_node_once_per_backward(x: Tensor) -> None:
    out = recompute(_wide)(x.requires_grad_()).sum()
    counts = []
    for retain in (True, True, False):
        with Operators() as operators:
            out.backward(retain_graph=retain)
        counts.append(operators.of("exp", "tanh", "_softmax", "bernoulli_", "sin"))
    # exp, tanh and the softmax; the dropped mask's draw; sin only in its own derivative
    assert counts == [counts[0]] * 3
    assert counts[0] == sum(backward_operators(recompute(_wide), x)[o] for o in ("exp", "tanh", "_softmax", "sin")) + 1


def test_retained_graphs_give_the_sum(wrap: Any, x: Tensor) -> None:
    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = call(leaf).sum()
        for retain in (True, True, False):
            out.backward(retain_graph=retain)
        return [leaf.grad]

    both(wrap, action, _wide)


def test_a_backward_in_two_halves_runs_every_operator_once(x: Tensor) -> None:
    """First the gradients of the inputs, later those of the weights, as pipeline schedules without bubbles have it."""
    torch.manual_seed(0)
    layer = nn.Sequential(
        nn.Linear(N, 2 * N), nn.GELU(), nn.Linear(2 * N, N), nn.Dropout(0.5), nn.Tanh(), nn.Linear(N, N)
    )

    def run(call: Any, *, halves: bool) -> tuple[list[Tensor | None], Counter[str]]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        loss = call(leaf).square().sum()
        with Operators() as operators:
            if halves:
                (first,), groups = stage_backward_input([loss], None, [leaf], layer.parameters())
                stage_backward_weight(layer.parameters(), groups)
            else:
                loss.backward()
                first = leaf.grad
        got = [first, *(p.grad for p in layer.parameters())]
        for parameter in layer.parameters():
            parameter.grad = None
        return got, operators.counts

    wrapped = recompute(layer.forward)
    want, plain = run(layer, halves=True)
    got, counts = run(wrapped, halves=True)
    assert same(want, got)
    _, bare = run(layer, halves=False)
    whole, once = run(wrapped, halves=False)
    assert same(want, whole)
    of_interest = ("addmm", "gelu", "tanh", "bernoulli_", "native_dropout")
    assert {name: counts[name] - plain[name] for name in of_interest} == {
        name: once[name] - bare[name] for name in of_interest
    }
    assert counts["addmm"] == 2  # the last product feeds nothing that backward reads


def test_a_whole_backward_ends_what_half_a_backward_borrowed(x: Tensor) -> None:
    layer = nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Linear(N, N))
    plain, wrapped = x.clone().requires_grad_(), x.clone().requires_grad_()
    region = recompute(layer.forward)
    losses = [layer(plain).square().sum(), region(wrapped).square().sum()]
    tape = next(thing for thing in gc.get_objects() if type(thing) is Tape and thing.closed and thing.packed)
    for step in range(3):
        want = torch.autograd.grad(losses[0], [plain], retain_graph=True)
        got = torch.autograd.grad(losses[1], [wrapped], retain_graph=True)
        assert same(list(want), list(got)), step
        assert tape.lent
        for loss in losses:
            loss.backward(retain_graph=True)
        assert not tape.lent and plain.grad is not None and wrapped.grad is not None
        assert torch.equal(plain.grad, wrapped.grad)


class ReadsTwice(torch.autograd.Function):
    """A Python node that asks for its saved tensors twice, with a recompute of others in between."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        first = [t.clone() for t in ctx.saved_tensors]
        second = ctx.saved_tensors
        assert all(torch.equal(f, s) for f, s in zip(first, second, strict=True))
        return grad * second[1], grad * second[0]


def test_saved_tensors_may_be_read_twice_by_a_python_node(wrap: Any, x: Tensor) -> None:
    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        call(leaf).sum().backward()
        return [leaf.grad]

    both(wrap, action, lambda x: ReadsTwice.apply(ReadsTwice.apply(x.exp(), x.sin()), x.tanh() * 2).cos())


# The entry in C++ below every Python `apply`: what `apply = Fn.apply` is in torch 2.14 where it was bound before
# lowtide was imported.
passes_by = super(torch.autograd.function._SingleLevelFunction, ReadsTwice).apply  # type: ignore[misc]


def test_an_apply_that_never_passes_our_hook_may_read_twice_too(wrap: Any, x: Tensor) -> None:
    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        call(leaf).sum().backward()
        return [leaf.grad]

    both(wrap, action, lambda x: passes_by(passes_by(x.exp(), x.sin()), x.tanh() * 2).cos())


def test_saved_tensors_may_be_looked_at_before_backward(wrap: Any, x: Tensor) -> None:
    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        looked = [out.grad_fn._saved_self.clone() for _ in range(2)]
        out.sum().backward()
        return [*looked, leaf.grad]

    both(wrap, action, lambda x: (x.exp() * 2).sin())


def test_a_partial_backward_runs_only_what_its_branch_needs(x: Tensor) -> None:
    wrapped = recompute(lambda x: ((x * 2).exp().sin(), (x * 3).tanh().cos()))
    leaf = x.requires_grad_()
    first, second = wrapped(leaf)
    with Operators() as operators:
        torch.autograd.grad(first.sum(), leaf)
    assert (operators.of("exp"), operators.of("tanh")) == (1, 0)
    with Operators() as operators:
        torch.autograd.grad(second.sum(), leaf)
    assert (operators.of("exp"), operators.of("tanh")) == (0, 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_branch_by_branch_with_a_shared_trunk(order: tuple[int, ...], wrap: Any, x: Tensor) -> None:
    def branches(x: Tensor) -> tuple[Tensor, ...]:
        trunk = F.dropout(x.exp(), 0.2).softmax(-1)
        return trunk.sin() * x, trunk.tanh().mul(2).exp(), trunk.cumsum(0) * trunk

    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        outs = call(leaf)
        return [torch.autograd.grad(outs[k].sum(), leaf, retain_graph=k != order[-1])[0] for k in order]

    both(wrap, action, branches)


def test_double_backward(wrap: Any, x: Tensor) -> None:
    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad((first * first.detach().cos()).sum(), leaf, create_graph=True)
        second.square().sum().backward()
        return [first.detach(), second.detach(), leaf.grad]

    both(wrap, action, _wide)


def test_gradient_penalty_inside_the_regions_own_forward(wrap: Any, x: Tensor) -> None:
    weight = torch.randn(N, N)

    def penalised(x: Tensor) -> Tensor:
        h = F.dropout(x @ weight, 0.1).tanh().exp()
        (grad,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h * grad.square().sum() + x.sin()

    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = call(leaf.sin())
        out.sum().backward()
        return [out.detach(), leaf.grad]

    both(wrap, action, penalised)


def test_a_plain_gradient_inside_the_regions_own_forward(wrap: Any, x: Tensor) -> None:
    """Without ``create_graph``: a value that it has used may be needed again by the backward to come."""
    weight = torch.randn(N, N, requires_grad=True)

    def guided(x: Tensor) -> Tensor:
        h = (x * 2).exp()
        (grad,) = torch.autograd.grad(h.sum(), x)
        return h.detach() * weight + grad

    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(call(leaf).square().sum(), weight)
        return [grad]

    both(wrap, action, guided)


def test_a_policy_is_asked_once_though_the_open_region_replays(x: Tensor) -> None:
    asked: list[str] = []

    def policy(ctx: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op._schema.name)
        return CheckpointPolicy.PREFER_RECOMPUTE

    def penalised(x: Tensor) -> Tensor:
        h = x.tan().exp() * 2
        (grad,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h * grad.square().sum()

    wrapped = recompute(penalised, policy_fn=policy)
    wrapped(x.requires_grad_()).sum().backward()
    assert not row_of(wrapped).refused, "the replay itself was recorded"
    assert asked.count("aten::exp") == asked.count("aten::tan") == 1


def test_a_backward_inside_of_a_backward_over_the_same_region(wrap: Any, x: Tensor) -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        trunk = F.dropout(x.exp(), 0.2).softmax(-1)
        return trunk.sin() * x, trunk.tanh().mul(2).exp()

    def action(call: Any) -> list[Tensor]:
        inner: list[Tensor] = []
        leaf = x.clone().requires_grad_()
        first, second = call(leaf)
        second.register_hook(lambda g: inner.append(torch.autograd.grad(first, leaf, g.cos(), retain_graph=True)[0]))
        (first + second).sum().backward()
        return [*inner, leaf.grad]

    both(wrap, action, two)


def test_branches_that_share_recorded_values_but_no_node_of_autograd(wrap: Any, x: Tensor) -> None:
    """What the first one has used up becomes a leaf for the second: no graph was retained."""
    weights = [torch.randn(N, N, requires_grad=True) for _ in range(2)]

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        h = x.detach().exp() * 2
        return tuple(w * h for w in weights)

    def action(call: Any) -> list[Tensor]:
        outs = call(x)
        return [torch.autograd.grad(out.sum(), weight)[0] for out, weight in zip(outs, weights, strict=True)]

    both(wrap, action, fn)


# ---- several threads and micro-batches ---------------------------------------------------------------


def _in_thread(fn: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def body() -> None:
        try:
            fn()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def test_backward_from_another_thread(wrap: Any, x: Tensor) -> None:
    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = call(call(leaf)).sum()
        _in_thread(out.backward)
        return [leaf.grad]

    both(wrap, action, _wide)


def test_forward_in_two_threads_at_once(wrap: Any, x: Tensor) -> None:
    want: dict[int, Tensor] = {}
    got: dict[int, Tensor] = {}
    barrier = threading.Barrier(2)

    def fn(x: Tensor) -> Tensor:
        return (x.exp() * 0.1).sin() * x.tanh()

    def train(call: Any, seed: int, store: dict[int, Tensor], *, together: bool) -> None:
        leaf = (x * seed).requires_grad_()
        for _ in range(5):
            if together:
                barrier.wait(timeout=30)
            call(call(leaf)).sum().backward()
        assert leaf.grad is not None
        store[seed] = leaf.grad

    for seed in (1, 2):
        train(fn, seed, want, together=False)
    wrapped = wrap(fn)
    failed: list[BaseException] = []

    def body(seed: int) -> None:
        try:
            train(wrapped, seed, got, together=True)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failed.append(error)

    threads = [threading.Thread(target=body, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert all(torch.equal(want[seed], got[seed]) for seed in (1, 2))


@pytest.mark.parametrize("order", ["1f1b", "first in first out", "all then all"])
def test_micro_batches_interleaved(order: str) -> None:
    SwapManager().configure(min_bytes=0)
    plans = {
        "1f1b": ["f0", "f1", "b0", "f2", "b1", "b2"],
        "first in first out": ["f0", "f1", "b0", "b1", "f2", "b2"],
        "all then all": ["f0", "f1", "f2", "b2", "b1", "b0"],
    }

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Dropout(0.1), nn.Linear(N, N))

    seen = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[layer() for _ in range(4)])
        if wrapped:
            for index, part in enumerate(model):
                if index % 2:
                    swap_wrapper(part)
                else:
                    checkpoint_wrapper(part, lowtide.swap_matmuls_and_attention(), swap_inputs=True)
            lowtide.auto(model)
        batches = [torch.randn(3, N) for _ in range(3)]
        losses: dict[str, Tensor] = {}
        for what, number in plans[order]:
            if what == "f":
                losses[number] = model(batches[int(number)]).square().sum()
            else:
                losses.pop(number).backward()
        seen.append([p.grad for p in model.parameters()])
    assert same(*seen)
    assert SwapManager().lower_bytes() == 0


# ---- things that go wrong -------------------------------------------------------------------------------


def _installed() -> tuple[int, bool, int, int]:
    """What a region could leave behind: modes, hooks, tapes, threads."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return torch._C._len_torch_dispatch_stack(), hooks, alive(), threading.active_count()


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("where", ["first", "middle", "nested", "function"])
def test_an_exception_in_forward_leaves_nothing_behind(where: str, x: Tensor) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            raise ValueError("mine")

    def fail(h: Tensor) -> Tensor:
        raise ValueError("mine")

    inner = recompute(lambda h: fail(h.sin().cos()))
    lowtide.pure(Raises)
    bodies: dict[str, Callable[[Tensor], Tensor]] = {
        "first": fail,
        "middle": lambda x: fail(x.exp().tanh() * x),
        "nested": lambda x: inner(x.exp()) * 2,
        "function": lambda x: Raises.apply(x.exp()) * 2,
    }
    SwapManager().configure(min_bytes=0)

    def step(body: Callable[[Tensor], Tensor]) -> None:
        model = nn.Sequential(*[swap_wrapper(nn.Sequential(nn.Linear(N, N), nn.Tanh())) for _ in range(3)])
        lowtide.auto(model)
        recompute(body)(model(x.clone().requires_grad_())).sum().backward()

    step(lambda x: x.sin())  # threads and the spill file of the tier are there, as in any later step
    files = _open_files()
    with no_collector():
        before = _installed()
        for _ in range(2):
            with pytest.raises(ValueError, match="mine"):
                step(bodies[where])
        assert SwapManager().lower_bytes() == 0
        assert _installed() == before
    assert _open_files() <= files
    step(lambda x: x.sin())


def test_an_exception_in_the_only_step_leaves_no_thread_and_no_file() -> None:
    """A process that never swaps anything has no spill file, whatever it raises."""
    program = (
        "import os, threading, torch, lowtide\n"
        "def fn(x):\n"
        "    raise ValueError(x.exp().sum())\n"
        "def files():\n"
        "    return sorted(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')[:-1])\n"
        "before, threads = files(), threading.active_count()\n"
        "for wrap in (lowtide.checkpoint_wrapper, lowtide.swap_wrapper):\n"
        "    try:\n"
        "        wrap(fn)(torch.ones(3, requires_grad=True))\n"
        "    except ValueError:\n"
        "        pass\n"
        "assert files() == before and threading.active_count() == threads\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


class RaisesInBackward(torch.autograd.Function):
    armed = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if RaisesInBackward.armed:
            raise ValueError("mine")
        return grad


@pytest.mark.parametrize("retain", [False, True])
def test_a_backward_that_raises_in_the_middle_and_the_steps_after_it(
    retain: bool,  # noqa: FBT001
    wrap: Any,
    x: Tensor,
) -> None:
    def fn(x: Tensor) -> Tensor:
        return RaisesInBackward.apply(_wide(x).exp()).sin() * x

    def action(call: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = call(leaf).sum()
        RaisesInBackward.armed = True
        with pytest.raises(ValueError, match="mine"):
            out.backward(retain_graph=retain)
        RaisesInBackward.armed = False
        grads = []
        if retain:
            out.backward()
            grads.append(leaf.grad.clone())
        leaf.grad = None
        call(leaf).sum().backward()
        return [*grads, leaf.grad]

    both(wrap, action, fn)


class SpoilsAndRaises(torch.autograd.Function):
    """A backward that writes to what it has saved, and then gives up."""

    armed = True

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        if SpoilsAndRaises.armed:
            h.mul_(3)
            raise ValueError("mine")
        return grad * 2 * h


def test_what_a_backward_that_raised_did_to_a_replayed_value_is_forgotten(x: Tensor) -> None:
    leaf = x.requires_grad_()
    out = recompute(lambda x: SpoilsAndRaises.apply((x * 3).exp()))(leaf).sum()
    SpoilsAndRaises.armed = True
    with pytest.raises(ValueError, match="mine"):
        out.backward(retain_graph=True)
    SpoilsAndRaises.armed = False
    out.backward()
    h = (leaf.detach() * 3).exp()
    assert torch.equal(leaf.grad, torch.ones_like(h) * 2 * h * h * 3)


def test_evaluation_between_steps_leaves_nothing(wrap: Any) -> None:
    model = nn.Sequential(*[wrap(nn.Sequential(nn.Linear(N, N), nn.Tanh())) for _ in range(3)])
    lowtide.auto(model)
    x = torch.randn(3, N)
    model(x).sum().backward()
    counts = [row.calls for row in lowtide.report(model).rows]
    moved = SwapManager().traffic.out_bytes
    with no_collector():
        before = alive()
        with torch.no_grad():
            quiet = model(x)
        with torch.inference_mode():
            assert torch.equal(model(x), quiet)
        assert alive() == before
    assert SwapManager().traffic.out_bytes == moved
    assert [row.calls for row in lowtide.report(model).rows] == counts
    assert torch.equal(model(x), quiet)


# ---- pitfalls of the first tapes ---------------------------------------------------------------------------


def test_pitfall_1_version_counters_are_not_per_storage() -> None:
    """``unsafe_split`` and ``_unsafe_view`` give aliases with counters of their own, and a GRU writes to them."""
    gru = nn.GRU(N, N, num_layers=2, dropout=0.3, batch_first=True)
    inputs = torch.randn(2, 5, N)
    assert same(results(lambda x: gru(x)[0], inputs), results(recompute(lambda x: gru(x)[0]), inputs))

    def split(x: Tensor) -> Tensor:
        a, b = torch.ops.aten.unsafe_split(x * 1.5, N // 2)
        return a.sigmoid_() * b.tanh_() + a * 2

    def data(x: Tensor) -> Tensor:
        h = x.detach().exp()
        h.data.mul_(2)
        h.detach().add_(1)
        return x.sin() * h

    def view(x: Tensor) -> Tensor:
        h = x.detach() * 2
        torch.ops.aten._unsafe_view(h, (h.numel(),)).add_(1)
        return x.sin() * h

    followed = recompute(view)
    results(followed, inputs[0])
    assert row_of(followed).kept_bytes == inputs[0].nbytes, "a write through an undeclared alias was not followed"
    for fn in (split, data, view):
        assert same(results(fn, inputs[0, :4].repeat(2, 1)), results(recompute(fn), inputs[0, :4].repeat(2, 1)))


def test_pitfall_2_the_counter_of_an_in_place_result_moves_after_its_operator(x: Tensor) -> None:
    """A result kept right after the write must not look modified, and a later one must."""

    def fn(x: Tensor) -> Tensor:
        return (x * 2).exp_().sin() * 2

    wrapped = recompute(fn, policy_fn=save_ops("aten.exp_"))
    assert same(results(fn, x), results(wrapped, x))
    assert backward_operators(wrapped, x)["exp_"] == 0


def test_pitfall_3_a_region_is_no_cycle(x: Tensor) -> None:
    """Holding an output with its history beyond the region would keep the graph alive for good."""
    wrapped = recompute(lambda x: (x.exp() * 2).sin(), policy_fn=lambda *_a, **_k: CheckpointPolicy.MUST_SAVE)
    with no_collector():
        out = wrapped(x.requires_grad_())
        handle = alive(Tape)
        del out
        assert alive(Tape) == handle - 1


def test_pitfall_4_lazy_bits_of_inputs_and_intermediates() -> None:
    z = torch.randn(N, N, dtype=torch.complex64)

    def fn(z: Tensor) -> Tensor:
        c = torch.fft.fft(z).conj()
        return (c * z).imag.exp() + c.mT.conj().real.sin() + (c @ z.conj()).imag

    assert same(results(fn, z.conj()), results(recompute(fn), z.conj()))
    kept = recompute(fn, policy_fn=lambda *_a, **_k: CheckpointPolicy.MUST_SAVE)
    assert same(results(fn, z), results(kept, z))


def test_pitfall_6_the_first_region_of_a_process_dies_too() -> None:
    """The first call of a dispatch mode imports dynamo lazily, and that import would keep the first tape alive."""
    program = (
        "import gc, torch, lowtide\n"
        "from lowtide.activations.tape import Tape\n"
        "gc.disable()\n"
        "lowtide.checkpoint_wrapper(lambda x: x.exp().sin())(torch.ones(3, requires_grad=True)).sum().backward()\n"
        "assert not [t for t in gc.get_objects() if type(t) is Tape]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pitfall_9_buffers_cost_copies_but_stay_right() -> None:
    """A region that reads and then moves its own running state, again and again."""

    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(N))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = (x - self.mean).tanh()
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
            return x * self.mean

    plain, other = Averages(), checkpoint_wrapper(Averages(), recompute="replay")
    x = torch.randn(N, N)
    assert same(results(plain, x), results(other, x))
    assert torch.equal(plain.mean, other.mean)


def test_pitfall_10_regions_and_checkpoint_inside_of_each_other(x: Tensor) -> None:
    from torch.utils.checkpoint import checkpoint

    inner = recompute(_wide)
    outer = recompute(lambda x: checkpoint(_wide, x.tanh(), use_reentrant=False) * 2)
    want = results(lambda x: _wide(x.tanh()) * 2, x)
    assert same(want, results(outer, x))
    assert same(want, results(lambda x: checkpoint(lambda h: inner(h.tanh()) * 2, x, use_reentrant=False), x))
    assert same(want, results(recompute(lambda x: inner(x.tanh()) * 2), x))
