"""A bfloat16 and 16 bits (and one more) are a float32, for every kind of value (P1)."""

from __future__ import annotations

from collections.abc import Callable
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
@pytest.mark.parametrize("many", [residual._MANY, -1.0])
def test_a_million_patterns_of_every_kind(mode: residual.Mode, many: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether ties are rare, and found by index, or taken to be many."""
    monkeypatch.setattr(residual, "_MANY", many)
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
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 511, 512, 513, 4097, (1 << 16) + 1, (1 << 17) + 517])
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("kind", ["few", "some", "ties", "fp16", "all"])
def test_rows_of_any_length_at_any_place(n: int, offset: int, kind: str) -> None:
    draw = torch.Generator(device="cpu").manual_seed(n)
    values = torch.randn(n, generator=draw, device="cpu")
    if kind == "fp16":
        values = values.half().float()  # one in sixteen is a tie
    elif kind != "few":
        bits = values.view(torch.int32)
        chosen = torch.rand(n, generator=draw, device="cpu") < {"some": 0.00005, "ties": 0.01, "all": 1.0}[kind]
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


@pytest.mark.values
@pytest.mark.parametrize("kind", ["few", "fp16"])
def test_a_mask_that_is_lost_costs_one_step_of_float32(kind: str) -> None:
    """And the codes of ``exact`` are those of ``saturate``: either mode reads what the other wrote."""
    x = on_device(as_floats(stratified()) if kind == "few" else torch.randn(1 << 17, device="cpu").half().float())
    n = x.numel()
    weight, code = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    ties = torch.empty(residual.tie_bytes(n), dtype=torch.uint8)
    residual.split(x, weight, code, ties, "exact")
    lost = torch.full_like(x, 7.0)
    residual.merge(weight, code, torch.zeros_like(ties), lost, "exact")
    given = patterns_of(x)
    number = ~is_nan(given)
    assert torch.equal(patterns_of(lost)[number], (given - even_ties(given).to(torch.int64))[number])
    other = torch.empty_like(code)
    residual.split(x, weight, other, None, "saturate")
    assert torch.equal(code, other)


@pytest.mark.values
@pytest.mark.parametrize("cut", [1 << 13, 1 << 17])
def test_spans_are_settled_each_by_itself(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties that are many in one span, few in the next and none in the last."""
    monkeypatch.setattr(residual, "_SPAN", cut)
    rows = [torch.randn(cut, device="cpu"), torch.randn(cut, device="cpu"), torch.randn(cut + 77, device="cpu")]
    rows[0] = rows[0].half().float()
    rows[1].view(torch.int32)[5::40_001] = 0x3F808000
    rows[2] = rows[2].bfloat16().float()
    x = on_device(torch.cat(rows))
    weight, back = there_and_back(x, "exact")
    assert torch.equal(back, x)
    assert torch.equal(weight, x.to(torch.bfloat16))


@pytest.mark.cpu
@pytest.mark.parametrize("threads", [2, 3])
def test_more_threads_give_the_same_bits(threads: int) -> None:
    x = torch.randn((1 << 18) + 12_345)
    x[: 1 << 17] = x[: 1 << 17].half().float()
    torch.set_num_threads(threads)
    weight, back = there_and_back(x, "exact")
    assert torch.equal(back, x)
    assert torch.equal(weight, x.to(torch.bfloat16))


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-4, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


@pytest.mark.values
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sixty_steps_on_masters_that_are_split_in_between(name: str) -> None:
    """Equal in every bit, master and weight, to masters that stay; with weights from float16, so with many ties."""
    n = 4099
    stays = torch.randn(n).half().float()
    comes = stays.clone()
    weight, code = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    ties = torch.empty(residual.tie_bytes(n), dtype=torch.uint8)
    steppers = [OPTIMIZERS[name]([row]) for row in (stays, comes)]
    draw = torch.Generator(device="cpu").manual_seed(1)
    for _ in range(60):
        residual.split(comes, weight, code, ties, "exact")
        comes.fill_(float("nan"))
        noise = on_device(torch.randn(n, generator=draw, device="cpu"))
        residual.merge(weight, code, ties, comes, "exact")
        for row, seen, stepper in ((stays, stays.to(torch.bfloat16), steppers[0]), (comes, weight, steppers[1])):
            row.grad = 2 * seen.float() + noise
            stepper.step()
    assert torch.equal(patterns_of(stays), patterns_of(comes))


@pytest.mark.values
def test_half_away_is_not_the_cast_in_every_tie_to_even_and_in_some_nan() -> None:
    """All 65,536 halfway patterns: 32,640 weights differ among numbers, and zeros or infinities stand for NaN."""
    given = (torch.arange(1 << 16, device="cpu") << 16) + 0x8000
    number = ~is_nan(given)
    weight, back = (patterns_of(t) for t in there_and_back(on_device(as_floats(given)), "half_away"))
    assert int((weight != rounded(given))[number].sum()) == 32_640
    assert torch.equal(back, given)
    signs = torch.tensor([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001], device="cpu")
    weight = patterns_of(there_and_back(on_device(as_floats(signs)), "half_away")[0])
    assert weight.tolist() == [0x8000, 0x0000, 0x7F80, 0xFF80]


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


@pytest.mark.cpu
def test_scratch_with_many_ties_is_that_of_a_block() -> None:
    n = 1 << 23
    x = torch.randn(n).half().float()
    rows = [torch.empty(n, dtype=dtype) for dtype in (torch.bfloat16, torch.int16)]
    ties = torch.empty(residual.tie_bytes(n), dtype=torch.uint8)
    for mode in ("exact", "saturate"):
        assert memory_curve(lambda m=mode: residual.split(x, *rows, ties, m)).peak_bytes <= 10 * residual._BLOCK
        assert memory_curve(lambda m=mode: residual.merge(*rows, ties, x, m)).peak_bytes <= 6 * residual._BLOCK


@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_only_read_where_it_is_said_to_be(mode: residual.Mode) -> None:
    x = torch.randn(1000)
    before = x.clone()
    there_and_back(x, mode)
    assert torch.equal(x, before)


@pytest.mark.parametrize("mode", MODES)
def test_a_device_is_asked_for_no_number(mode: residual.Mode) -> None:
    """A tensor on the meta device has none to give: reading one, or a shape that depends on one, raises."""
    there_and_back(torch.empty(1001, device="meta"), mode)


def test_which_path_serves_a_device_is_said() -> None:
    assert residual.path_for(torch.device("cpu")) == "blocks"
    assert residual.path_for(torch.device("meta")) == "dense"
    assert residual.path_for(torch.device("cuda")) in {"triton", "dense"}
