"""Two forms of one storage: exact there and back, four bytes an element, nothing else (P1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowtide import SharedMasters
from lowtide.errors import UnsupportedError
from lowtide.optim import residual

from .patterns import as_floats, is_nan, patterns_of, stratified


def on_device(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.get_default_device()).clone()


@pytest.mark.values
@pytest.mark.parametrize("n", [0, 1, 2, 7, 9, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 * (1 << 16) + 5])
def test_there_and_back_in_place(n: int) -> None:
    values = stratified()
    values = values[~is_nan(values)][:n]
    master = on_device(as_floats(values))
    shared = SharedMasters([master])
    for _ in range(2):
        weights = shared.to_bf16()[0]
        assert shared.to_bf16()[0] is weights
        assert weights.untyped_storage().data_ptr() == master.untyped_storage().data_ptr()
        assert torch.equal(patterns_of(weights), patterns_of(on_device(as_floats(values)).to(torch.bfloat16)))
        assert shared.to_fp32()[0] is master
        assert torch.equal(patterns_of(master), values)
    assert master.untyped_storage().nbytes() == 4 * n


@pytest.mark.values
def test_weights_that_were_written_are_masters_of_less_than_half_a_step_more() -> None:
    shared = SharedMasters([on_device(torch.linspace(-1, 1, 1000, device="cpu"))])
    shared.to_bf16()[0].fill_(2.0)
    assert (shared.to_fp32()[0] - 2.0).abs().max() <= 2.0**-7


@pytest.mark.parametrize("mode", ["exact", "saturate", "half_away"])
def test_shapes_and_several_tensors(mode: residual.Mode) -> None:
    masters = [torch.randn(3, 5, 7), torch.randn(()), torch.randn(11).requires_grad_()]
    shared = SharedMasters(masters, mode=mode)
    assert [w.shape for w in shared.to_bf16()] == [m.shape for m in masters]
    assert all(got is given for got, given in zip(shared.to_fp32(), masters, strict=True))
    assert masters[2].requires_grad


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.randn(4).bfloat16()],
        lambda: [torch.randn(4, 5).t()],
        lambda: [torch.randn(8)[2:6]],
        lambda: [torch.randn(8)[:4]],
        lambda: [torch.randn(4, requires_grad=True) * 2],
        lambda: [torch.ones(4)] * 2,
    ],
)
def test_what_cannot_change_its_form_is_refused(make: Callable[[], list[torch.Tensor]]) -> None:
    with pytest.raises(UnsupportedError, match="change their form"):
        SharedMasters(make())
