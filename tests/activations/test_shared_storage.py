"""Several owners of one storage: regions, views, outputs of one operator. Each gets back what it saved."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide import CheckpointPolicy, SwapManager, checkpoint_wrapper, swap_wrapper

Tensor = torch.Tensor


def _gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(3)
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def _equal(plain: nn.Module, wrapped: nn.Module, x: Tensor) -> None:
    SwapManager().configure(min_bytes=0)
    for want, got in zip(_gradients(plain, x), _gradients(wrapped, x), strict=True):
        assert want is not None
        assert got is not None
        assert torch.equal(want, got)


class _Reads(nn.Module):
    """Saves its input through a view of its own."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view = view
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.view(x)
        return x + (seen * seen).sum() * 0.01 + x @ self.weight


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda x: x.reshape(-1),
    "transposed": lambda x: x.transpose(-1, -2),
    "slice": lambda x: x[..., 1:, ::2],
    "diagonal": lambda x: x.diagonal(dim1=-2, dim2=-1),
    "reinterpreted": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2)))),
}


@pytest.mark.parametrize("second", VIEWS)
@pytest.mark.parametrize("first", ["flat", "transposed"])
@pytest.mark.parametrize("wrap", [swap_wrapper, functools.partial(checkpoint_wrapper, swap_inputs=True)])
def test_regions_that_share_a_copy_each_get_their_own_view(
    wrap: Callable[[nn.Module], nn.Module], first: str, second: str
) -> None:
    """One storage is saved by neighbours through different views; it moves once and comes back right for both."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([_Reads(VIEWS[first]), _Reads(VIEWS[second]), nn.Tanh()])

        def forward(self, x: Tensor) -> Tensor:
            h = x.sin()
            out = torch.zeros(())
            for part in self.parts:
                out = out + part(h)
            return out

    plain = Branches()
    wrapped = copy.deepcopy(plain)
    for part in wrapped.parts:
        wrap(part)
    lowtide.auto(wrapped)
    _equal(plain, wrapped, torch.randn(3, 4, 4, requires_grad=True))


class _Splits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.unsafe_split(self.linear(x), 3, 1)
        mask = torch.bernoulli(torch.full_like(a, 0.5))
        return torch.cat([a.sin() * b.exp(), nn.functional.dropout(b.cos(), 0.5) * mask], 1)


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP])
@pytest.mark.parametrize("recompute", ["replay", "call"])
def test_outputs_that_share_a_storage_and_draws_that_are_kept(answer: CheckpointPolicy, recompute: str) -> None:
    """Every operator's output is kept or swapped: two outputs in one storage, and random ones that do not run again."""
    plain = nn.Sequential(_Splits(), _Splits(), _Splits())
    wrapped = copy.deepcopy(plain)
    for layer in wrapped:
        checkpoint_wrapper(layer, lambda *_args, **_kwargs: answer, recompute=recompute)
    lowtide.auto(wrapped)
    _equal(plain, wrapped, torch.randn(4, 6))


@pytest.mark.parametrize("wrap", [swap_wrapper, checkpoint_wrapper])
def test_certify_accepts_statistics_that_an_operator_moves(wrap: Callable[..., nn.Module]) -> None:
    plain = nn.Sequential(nn.Sequential(nn.BatchNorm1d(8), nn.Tanh()), nn.Linear(16, 4))
    wrapped = copy.deepcopy(plain)
    for layer in wrapped:
        wrap(layer, certify=10)
    lowtide.auto(wrapped)
    for _ in range(2):
        _equal(plain, wrapped, torch.randn(2, 8, 16))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), wrapped.buffers(), strict=True))


@pytest.mark.cpu
def test_a_sparse_argument_is_kept_by_reference() -> None:
    sparse = torch.eye(4).to_sparse()
    want, got = torch.randn(2, 4, 4).unbind()
    x = want.clone().requires_grad_()
    y = want.clone().requires_grad_()

    def body(t: Tensor) -> Tensor:
        return torch.sparse.mm(sparse, t.sin()).exp() + (t.cos().to_sparse() @ t).sin()

    body(x).sum().backward()
    checkpoint_wrapper(body, recompute="replay")(y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)
    assert got.shape == want.shape


def test_what_a_policy_raises_comes_out_of_the_region() -> None:
    def policy(_tensor: Tensor) -> CheckpointPolicy:
        raise NotImplementedError("no answer yet")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = checkpoint_wrapper(nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.detach().requires_grad_())

    with pytest.raises(NotImplementedError, match="no answer yet"):
        swap_wrapper(Outer(), policy)(torch.randn(4, requires_grad=True))


def test_reset_closes_the_spill_files_that_hold_nothing() -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("needs /proc")

    def once() -> int:
        SwapManager().reset()
        SwapManager().configure(min_bytes=0)
        model = nn.Sequential(*[swap_wrapper(nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(3)])
        switch = lowtide.auto(model)
        model(torch.randn(4, 6)).sum().backward()
        switch.undo()
        return len(list(descriptors.iterdir()))

    gc.collect()
    first = once()
    assert [once() for _ in range(5)] == [first] * 5
