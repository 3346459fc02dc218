"""``recompute="call"`` and the context pair: what runs again, what is given back, and when ``auto`` changes to it."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    SwapManager,
    SwapTensor,
    checkpoint_wrapper,
    create_selective_checkpoint_contexts,
)
from lowtide.errors import LowtideWarning, PolicyError, ReplayError, WrapError

from .kit import Operators, alive, no_collector, results, row_of, same, unseen

N = 32


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, N)


def _body(x: Tensor) -> Tensor:
    h = F.dropout(x @ x.t(), 0.2).exp().clamp_max(9.0)
    return (h @ x).tanh() * x.sin()


def _answer(answer: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    def policy(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return answer if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _through_checkpoint(policy: Any) -> Callable[[Tensor], Tensor]:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda x: checkpoint(_body, x, use_reentrant=False, context_fn=contexts)


def _products_in_backward(fn: Callable[[Tensor], Tensor], x: Tensor) -> int:
    out = fn(x.clone().requires_grad_()).sum()
    with Operators() as operators:
        out.backward()
    return operators.of("mm")


@pytest.mark.parametrize("answer", [*CheckpointPolicy, *TorchPolicy], ids=lambda a: f"{type(a).__module__}.{a.name}")
def test_the_pair_runs_again_exactly_what_its_policy_says(answer: Any, x: Tensor) -> None:
    SwapManager().configure(min_bytes=0)
    SwapManager().set_current_group_name("pair")
    fn = _through_checkpoint(_answer(answer))
    assert same(results(_body, x), results(fn, x))
    again = 2 if answer.name.endswith("RECOMPUTE") else 0
    assert _products_in_backward(fn, x) == _products_in_backward(_body, x) + again


def test_a_swapped_output_leaves_and_comes_back(x: Tensor) -> None:
    manager = SwapManager()
    manager.configure(min_bytes=0)
    manager.set_current_group_name("pair")
    leaf = x.clone().requires_grad_()
    out = _through_checkpoint(_answer(CheckpointPolicy.MUST_SWAP))(leaf).sum()
    manager.launch_offload("pair")
    manager.wait_offload("pair")
    assert manager.lower_bytes() == 2 * N * N * 4
    moved = [thing for thing in gc.get_objects() if type(thing) is SwapTensor]
    assert len(moved) == 2 and not any(tensor.held_elsewhere for tensor in moved), "the device's bytes are still there"
    del moved
    manager.launch_load("pair")
    out.backward()
    assert manager.lower_bytes() == 0
    assert manager.traffic.in_bytes == 2 * N * N * 4


def test_the_policy_is_asked_in_forward_only(x: Tensor) -> None:
    asked: Counter[bool] = Counter()

    def policy(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked[ctx.is_recompute] += 1
        return CheckpointPolicy.PREFER_SAVE

    results(_through_checkpoint(policy), x)
    assert asked[True] == 0 < asked[False]


@pytest.mark.parametrize("mode", ["call", "replay", "pair"])
def test_a_kept_output_that_its_owner_overwrites_raises(mode: str, x: Tensor) -> None:
    """Plain autograd never saved it, so it cannot tell: given back as it is now, it would be silently wrong."""
    kept: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        h = x @ x
        kept.append(h)
        return (h + 1).exp().sin()

    policy = lowtide.save_ops("aten.mm")
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    if mode == "pair":
        out = checkpoint(body, x.requires_grad_(), use_reentrant=False, context_fn=contexts)
    else:
        out = checkpoint_wrapper(body, policy, recompute=mode)(x.requires_grad_())
    kept[0].detach().add_(1)
    with pytest.raises(ReplayError, match="modified"):
        out.sum().backward()


def test_what_the_second_run_does_not_come_to_is_let_go(x: Tensor) -> None:
    """Torch stops running again once it has what backward needs: here before the last product."""
    manager = SwapManager()
    manager.configure(min_bytes=0)
    manager.set_current_group_name("pair")
    contexts = functools.partial(create_selective_checkpoint_contexts, lowtide.swap_ops("aten.mm"))
    out = checkpoint(lambda x: x.exp().sin() @ x.tanh(), x.requires_grad_(), use_reentrant=False, context_fn=contexts)
    manager.launch_offload("pair")
    manager.wait_offload("pair")
    assert manager.lower_bytes() > 0
    out.sum().backward()
    assert manager.lower_bytes() == 0


def test_a_kept_random_operator_leaves_the_generator_where_it_was(x: Tensor) -> None:
    def body(x: Tensor) -> Tensor:
        h = x * torch.rand_like(x)
        return F.dropout(h.exp(), 0.5).sin()

    contexts = functools.partial(create_selective_checkpoint_contexts, lowtide.save_ops("aten.rand_like"))
    wrapped = lambda x: checkpoint(body, x, use_reentrant=False, context_fn=contexts)  # noqa: E731
    assert same(results(body, x), results(wrapped, x))


@pytest.mark.parametrize("through", ["itself", "data", "unseen"])
def test_an_output_overwritten_within_the_region_is_computed_again(through: str, x: Tensor) -> None:
    def body(x: Tensor) -> Tensor:
        h = x @ x
        if through == "itself":
            h.add_(1)
        elif through == "data":
            h.data.add_(1)  # counts its versions apart
        else:
            with unseen():
                h.add_(1)
        return h.exp() * 2

    contexts = functools.partial(create_selective_checkpoint_contexts, lowtide.save_ops("aten.mm"))
    wrapped = lambda x: checkpoint(body, x, use_reentrant=False, context_fn=contexts)  # noqa: E731
    assert same(results(body, x), results(wrapped, x))


def test_an_answer_that_is_none_raises(x: Tensor) -> None:
    with pytest.raises(PolicyError, match="CheckpointPolicy"):
        _through_checkpoint(lambda *_a, **_k: "save")(x.requires_grad_())


# ---- recompute="call" ---------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.runs = 0

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        self.runs += 1
        return F.dropout(self.linear(x).tanh().exp(), 0.2) * scale + x


@pytest.mark.parametrize("policy", [None, lowtide.save_ops("aten.addmm"), lowtide.swap_ops("aten.addmm", "aten.tanh")])
@pytest.mark.parametrize("swap_inputs", [False, True])
def test_call_mode_trains_the_same_and_runs_the_module_twice(
    policy: Any,
    swap_inputs: bool,  # noqa: FBT001
    x: Tensor,
) -> None:
    SwapManager().configure(min_bytes=0)
    plain = nn.Sequential(*[Layer() for _ in range(3)])
    other = copy.deepcopy(plain)
    for layer in other:
        checkpoint_wrapper(layer, policy, swap_inputs=swap_inputs, recompute="call")
    lowtide.auto(other)
    assert same(results(plain, x), results(other, x))
    assert same([p.grad for p in plain.parameters()], [p.grad for p in other.parameters()])
    assert [layer.runs for layer in other] == [2, 2, 2]
    assert SwapManager().lower_bytes() == 0


def test_keyword_tensors_get_their_gradients(x: Tensor) -> None:
    layer = Layer()
    wrapped = checkpoint_wrapper(copy.deepcopy(layer), recompute="call")
    scale = torch.rand(N)
    want = results(lambda x, s: layer(x, scale=s), x, scale)
    assert same(want, results(lambda x, s: wrapped(x, scale=s), x, scale))


def test_swap_inputs_frees_the_input(x: Tensor) -> None:
    manager = SwapManager()
    manager.configure(min_bytes=0)
    manager.set_current_group_name("inputs")
    for mode in ("call", "replay"):
        layer = checkpoint_wrapper(Layer(), swap_inputs=True, recompute=mode)
        hidden = x.clone().requires_grad_() * 2
        storage = torch.multiprocessing.reductions.StorageWeakRef(hidden.untyped_storage())
        reference = weakref.ref(hidden)
        out = layer(hidden).sum()
        del hidden
        manager.launch_offload("inputs")
        manager.wait_offload("inputs")
        assert reference() is None and storage.expired(), mode
        out.backward()


def test_without_swap_inputs_the_input_stays_and_is_counted(x: Tensor) -> None:
    layer = checkpoint_wrapper(Layer(), recompute="call")
    layer(x).sum().backward()
    row = row_of(layer)
    assert (row.calls, row.kept_bytes, row.swapped_bytes) == (1, N * N * 4, 0)


def test_call_mode_leaves_nothing_behind(x: Tensor) -> None:
    SwapManager().configure(min_bytes=0)
    model = nn.Sequential(
        *[checkpoint_wrapper(Layer(), lowtide.swap_ops("aten.addmm"), recompute="call") for _ in range(3)]
    )
    lowtide.auto(model)
    with no_collector():
        before = alive()
        for retain in (False, True):
            loss = model(x).sum()
            loss.backward(retain_graph=retain)
            del loss
            assert alive() == before
            assert SwapManager().lower_bytes() == 0
        with torch.no_grad():
            model(x)
        assert alive() == before


def test_regions_inside_a_region_that_runs_again_are_plain_calls(x: Tensor) -> None:
    plain = nn.Sequential(Layer(), Layer())
    other = copy.deepcopy(plain)
    checkpoint_wrapper(other[0])
    checkpoint_wrapper(other, recompute="call")
    assert same(results(plain, x), results(other, x))
    assert row_of(other[0]).calls == 0


def test_an_unknown_mode_and_a_certified_call_mode_raise() -> None:
    with pytest.raises(WrapError, match="'auto', 'replay' or 'call'"):
        checkpoint_wrapper(Layer(), recompute="again")
    with pytest.raises(WrapError, match="certify"):
        checkpoint_wrapper(Layer(), recompute="call", certify=1)


def test_call_mode_warns_of_what_moves_twice() -> None:
    with pytest.warns(LowtideWarning, match=r"BatchNorm statistics \(1\)"):
        checkpoint_wrapper(nn.Sequential(nn.Linear(N, N), nn.BatchNorm1d(N)), recompute="call")


# ---- when auto changes to call ----------------------------------------------------------------------------


class Hides(torch.autograd.Function):
    """Keeps an intermediate that no tape can make again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = torch.cat([x, x.exp()], 1)
        ctx.save_for_backward(wide)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (wide,) = ctx.saved_tensors
        return grad * wide[:, :N].cos()


class Opaque(nn.Module):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.more = nn.Sequential(*more)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return Hides.apply(self.more(x).sin())


class Moves(nn.Module):
    """Moves a state of its own with an operator, which a second run would move again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(N))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count


@pytest.fixture
def small_bytes_count() -> None:
    SwapManager().configure(min_bytes=0)


@pytest.mark.usefixtures("small_bytes_count")
def test_auto_runs_an_opaque_layer_again_from_its_second_call_and_says_so(x: Tensor) -> None:
    plain, layer = Opaque(), checkpoint_wrapper(Opaque())
    for runs in (1, 3, 5):
        assert same(results(plain, x), results(layer, x))
        assert layer.runs == runs
    assert row_of(layer).kept_bytes == N * N * 4
    notes = lowtide.report(nn.Sequential(layer)).notes
    assert any("from the next call on the module is run again" in note for note in notes)


@pytest.mark.usefixtures("small_bytes_count")
@pytest.mark.parametrize("reason", ["BatchNorm", "writes outside", "certify", "replay"])
def test_auto_does_not_run_again_what_would_change_the_training(reason: str, x: Tensor) -> None:
    more = {"BatchNorm": [nn.BatchNorm1d(N)], "writes outside": [Moves()]}.get(reason, [])
    options: dict[str, Any] = {"certify": {"certify": 1}, "replay": {"recompute": "replay"}}.get(reason, {})
    plain = Opaque(*copy.deepcopy(more))
    layer = checkpoint_wrapper(Opaque(*more), **options)
    for runs in (1, 2):
        assert same(results(plain, x), results(layer, x))
        assert layer.runs == runs
    assert same([b.float() for b in plain.buffers()], [b.float() for b in layer.buffers()])
    notes = lowtide.report(nn.Sequential(layer)).notes
    assert any("not chosen by itself" in note for note in notes) == (reason != "replay")
