"""A bfloat16 and 16 bits (and one more) are a float32, for every kind of value (P1)."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from lowtide.measure import memory_curve
from lowtide.optim import residual

from .patterns import as_floats, even_ties, is_nan, patterns_of, rounded, stratified, there_and_back

MODES: tuple[residual.Mode, ...] = get_args(residual.Mode)


def on_device(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.get_default_device())


@pytest.mark.values
@pytest.mark.parametrize("mode", MODES)
def test_a_million_patterns_of_every_kind(mode: residual.Mode) -> None:
    given = stratified()
    weight, back = (patterns_of(t) for t in there_and_back(on_device(as_floats(given)), mode))
    number = ~is_nan(given)
    ties = even_ties(given) & number
    assert ties.sum() > 3000
    if mode == "half_away":
        assert torch.equal(weight[number & ~ties], rounded(given)[number & ~ties])
        assert torch.equal(weight[ties], (rounded(given)[ties] + 1) & 0xFFFF)
        assert torch.equal(back, given)
        return
    assert torch.equal(weight[number], rounded(given)[number])
    assert is_nan(weight[~number] << 16).all()
    assert is_nan(back[~number]).all()
    lost = ties if mode == "saturate" else torch.zeros_like(ties)
    assert torch.equal(back[number & ~lost], given[number & ~lost])
    assert torch.equal(back[lost], given[lost] - 1)


@pytest.mark.values
@pytest.mark.parametrize("mode", MODES)
def test_a_second_split_changes_nothing(mode: residual.Mode) -> None:
    x = on_device(as_floats(stratified()))
    weight, back = there_and_back(x, mode)
    again, back_again = there_and_back(back, mode)
    number = ~is_nan(patterns_of(x))
    for first, second in ((weight, again), (back, back_again)):
        assert torch.equal(patterns_of(first)[number], patterns_of(second)[number])


@pytest.mark.values
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 511, 512, 513, 4097, (1 << 17) + 5])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("kind", ["few", "fp16", "ties", "all"])
def test_rows_of_any_length_at_any_place(n: int, offset: int, kind: str) -> None:
    draw = torch.Generator(device="cpu").manual_seed(n)
    values = torch.randn(n, generator=draw, device="cpu")
    if kind == "fp16":
        values = values.half().float()  # one in sixteen is a tie
    elif kind != "few":
        bits = values.view(torch.int32)
        chosen = torch.rand(n, generator=draw, device="cpu") < (1.0 if kind == "all" else 0.01)
        values = torch.where(chosen, (bits & ~0x1FFFF) | 0x8000, bits).view(torch.float32)

    def row(dtype: torch.dtype, count: int = n) -> torch.Tensor:
        return torch.full((count + offset,), 1, dtype=dtype)[offset:]

    x = row(torch.float32).copy_(on_device(values))
    weight, code, back = row(torch.bfloat16), row(torch.int16), row(torch.float32)
    ties = row(torch.uint8, residual.tie_bytes(n))
    residual.split(x, weight, code, ties, "exact")
    residual.merge(weight, code, ties, back, "exact")
    assert torch.equal(patterns_of(back), patterns_of(x))
    assert torch.equal(patterns_of(weight), patterns_of(x.to(torch.bfloat16)))
    expected = even_ties(patterns_of(x))
    marks = (ties.cpu().unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu")) & 1
    assert torch.equal(marks.view(-1)[:n].bool(), expected)
    assert not marks.view(-1)[n:].any()


@pytest.mark.cpu
def test_scratch_does_not_grow_with_the_row() -> None:
    """On the CPU: a block of 32-bit numbers, and what is looked through for ties at a time."""
    peaks = []
    for n in (1 << 23, 1 << 24):
        x = torch.randn(n)
        rows = [torch.empty(n, dtype=dtype) for dtype in (torch.bfloat16, torch.int16)]
        ties = torch.empty(residual.tie_bytes(n), dtype=torch.uint8)

        def both(x: Any = x, rows: Any = rows, ties: Any = ties) -> None:
            residual.split(x, *rows, ties, "exact")
            residual.merge(*rows, ties, x, "exact")

        both()
        peaks.append(memory_curve(both).peak_bytes)
    assert max(peaks) <= 4 * residual._BLOCK + 8 * residual._SPAN // 64
    assert peaks[1] <= 1.1 * peaks[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_only_read_where_it_is_said_to_be(mode: residual.Mode) -> None:
    x = torch.randn(1000)
    before = x.clone()
    there_and_back(x, mode)
    assert torch.equal(x, before)


def test_which_path_serves_a_device_is_said() -> None:
    assert residual.path_for(torch.device("cpu")) == "blocks"
    assert residual.path_for(torch.device("meta")) == "dense"
    assert residual.path_for(torch.device("cuda")) in {"triton", "dense"}
