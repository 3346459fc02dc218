"""Two forms of one storage: exact there and back, four bytes an element, nothing else (P1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lowtide import SharedMasters
from lowtide.errors import StateError, UnsupportedError
from lowtide.measure import memory_curve
from lowtide.optim import residual, shared

from .patterns import as_floats, is_nan, patterns_of, stratified, there_and_back


class Other(torch.Tensor):
    pass


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
@pytest.mark.parametrize("mode", ["exact", "saturate", "half_away"])
@pytest.mark.parametrize("n", [8, 15, 16, 17, 24, 40, 8 * 13, 8 * 16 + 1, 8 * 37 + 7])
def test_any_number_of_blocks_and_any_rest(n: int, mode: residual.Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_BLOCK_CPU", 8)
    monkeypatch.setattr(shared, "_BLOCK_DEVICE", 8)
    draw = torch.Generator(device="cpu").manual_seed(n)
    master = on_device(torch.randn(n, generator=draw, device="cpu").half().float())  # one in sixteen is a tie
    given = master.clone()
    weight, back = there_and_back(given, mode)
    both = SharedMasters([master], mode=mode)
    for _ in range(2):
        assert torch.equal(both.to_bf16()[0], weight)
        assert torch.equal(both.to_fp32()[0], back)
    if mode != "saturate":
        assert torch.equal(master, given)


@pytest.mark.values
def test_halves_lie_in_a_row() -> None:
    """Layout B of the documents: all weights, then all codes."""
    n = 2 * shared._BLOCK_CPU + 24
    master = torch.randn(n)
    weight, code = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    residual.split(master, weight, code, None, "saturate")
    SharedMasters([master], mode="saturate").to_bf16()
    assert torch.equal(master.view(torch.int16)[:n], weight.view(torch.int16))
    assert torch.equal(master.view(torch.int16)[n:], code)


@pytest.mark.cpu
def test_scratch_does_not_grow_with_the_tensor() -> None:
    for n in (1 << 22, (1 << 23) + shared._BLOCK_CPU - 1):
        both = SharedMasters([torch.randn(n).half().float()])
        both.to_bf16()
        both.to_fp32()
        for change in (both.to_bf16, both.to_fp32):
            # Both halves of a block and of a rest, and what a split of a block takes.
            assert memory_curve(change).peak_bytes <= 8 * shared._BLOCK_CPU + 10 * residual._BLOCK


@pytest.mark.parametrize("kept", ["weights", "masters"])
def test_a_graph_that_saved_the_other_form_cannot_go_backward(kept: str) -> None:
    master = torch.randn(4).requires_grad_()
    both = SharedMasters([master])
    if kept == "weights":
        weight = both.to_bf16()[0].detach().requires_grad_()
        loss = (weight * weight).sum()
        both.to_fp32()
    else:
        loss = (master * master).sum()
        both.to_bf16()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_change_of_form_that_was_interrupted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    both = SharedMasters([torch.randn(4), torch.randn(4)])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(residual, "split", interrupted)
        with pytest.raises(KeyboardInterrupt):
            both.to_bf16()
    for change in (both.to_bf16, both.to_fp32):
        with pytest.raises(StateError, match="interrupted"):
            change()


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
        lambda: [torch.ones(4).as_subclass(Other)],
    ],
)
def test_what_cannot_change_its_form_is_refused(make: Callable[[], list[torch.Tensor]]) -> None:
    with pytest.raises(UnsupportedError, match="change their form"):
        SharedMasters(make())


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'exactly'"):
        SharedMasters([torch.ones(4)], mode="exactly")  # type: ignore[arg-type]
