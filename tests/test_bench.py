"""The bench counts what it says it counts. Times are measured by it and tested nowhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from lowtide import CheckpointPolicy, bench
from lowtide.bench.flops import backward_flops, flops_of
from lowtide.bench.footprint import footprint, tape_bytes
from lowtide.bench.models import Gpt, GptBlock, LigerBlock, LlamaBlock, MegatronBlock, Stack, fused_classes
from lowtide.bench.modes import MODES, PEERS, Kept, operator_counts
from lowtide.bench.swapfile import file_bandwidth
from lowtide.bench.table import GOALS, Figures, print_figures, print_goals
from lowtide.bench.timing import Workload, interleave, ratios
from lowtide.measure import Record

SMALL = {"width": 32, "heads": 2, "hidden": 48, "tokens": 16}
X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))


def _llama(layers: int = 2) -> Stack:
    torch.manual_seed(0)
    return Stack(*[LlamaBlock(**SMALL) for _ in range(layers)])


def test_flops_of_a_product() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    assert flops_of(lambda: a @ b) == 2 * 3 * 5 * 7


def test_flops_of_attention_on_a_cpu() -> None:
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    assert flops_of(lambda: nn.functional.scaled_dot_product_attention(q, q, q)) == 4 * 2 * 4 * 16 * 16 * 8


def test_backward_flops_of_a_linear() -> None:
    linear = nn.Linear(5, 7, bias=False)
    assert backward_flops(linear(torch.randn(3, 5, requires_grad=True)).sum()) == 2 * (2 * 3 * 5 * 7)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_gradients(mode: str) -> None:
    plain, model = _llama(), _llama()
    MODES[mode].prepare(model)
    for m, around in ((plain, MODES["plain"].around), (model, MODES[mode].around)):
        with around():
            loss = m(X).square().mean()
        loss.backward()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert want.grad is not None
        assert got.grad is not None
        assert torch.equal(want.grad, got.grad)


@pytest.mark.parametrize("build", [LigerBlock, MegatronBlock])
def test_hand_written_gradients_are_those_of_the_plain_block(build: type[LigerBlock]) -> None:
    torch.manual_seed(0)
    block, plain = build(fused_classes(), **SMALL).double(), LlamaBlock(**SMALL).double()
    plain.load_state_dict(block.state_dict())
    for m in (block, plain):
        m(X.double()).square().mean().backward()
    for want, got in zip(plain.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-12)


def test_a_kept_set_answers_for_one_call_of_each_block() -> None:
    block = LlamaBlock(**SMALL)
    counts = operator_counts(block, X)
    assert counts[torch.ops.aten.mm.default] == 7
    kept = Kept(("gate", "up"), counts, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
    answers = [kept(None, torch.ops.aten.mm.default) for _ in range(14)]
    once = [CheckpointPolicy.MUST_RECOMPUTE] * 4 + [CheckpointPolicy.MUST_SAVE] * 2 + [CheckpointPolicy.MUST_RECOMPUTE]
    assert answers == once * 2


def test_footprint_of_a_plain_linear() -> None:
    model = Stack(nn.Linear(64, 32, bias=False))
    seen = footprint(model, MODES["plain"], None, torch.randn(16, 64))
    input_, output, gradient = 16 * 64 * 4, 16 * 32 * 4, 32 * 64 * 4
    assert input_ + output <= seen.kept_bytes <= input_ + output + 64
    # the gradients of output (expanded from one number), input and weight come on top
    assert seen.peak_bytes >= seen.kept_bytes + gradient
    assert seen.peak_without_gradients <= seen.peak_bytes


def test_tape_bytes_of_plain_are_small() -> None:
    assert tape_bytes(_llama(), MODES["plain"], X) < tape_bytes(_llama(), MODES["checkpoint"], X)


def test_interleaved_times_have_a_ratio_for_every_mode() -> None:
    work = Workload("tiny", lambda: Stack(GptBlock(16, 2)), lambda: torch.randn(1, 4, 16), 2)
    times = interleave(work, PEERS)
    assert {len(seconds) for seconds in times.values()} == {2}
    assert ratios(times, "plain") == {"step": 1.0, "forward": 1.0, "backward": 1.0}
    assert all(ratio > 0 for ratio in ratios(times, "sac").values())


def test_file_bandwidth_leaves_no_file(tmp_path: Path) -> None:
    write, read = file_bandwidth(tmp_path, 8 << 20)
    assert write > 0
    assert read > 0
    assert list(tmp_path.iterdir()) == []


def test_gpt_ends_in_logits() -> None:
    assert Gpt(16, 2, 1)(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 256)


def test_goals_without_figures_are_not_met() -> None:
    console = Console(file=io.StringIO(), width=200)
    assert print_goals(console, Figures([])) == len(GOALS)
    assert "not measured" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_goal_is_judged_by_its_bound() -> None:
    def judged(ratio: float) -> int:
        records = [
            Record("bench", "host-bound", "keep", "step_over_plain", ratio, "ratio"),
            Record("bench", "host-bound", "sac", "step_over_plain", 1.0, "ratio"),
        ]
        return print_goals(Console(file=io.StringIO()), Figures(records))

    assert judged(0.6) == judged(0.7) - 1 == len(GOALS) - 1


def test_figures_are_printed_by_case() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_figures(console, [Record("bench", "llama x1 (none)", "keep", "kept_bytes", 2 << 20, "B")])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "llama x1 (none)" in text
    assert "2.00 MiB" in text


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown mode: expected some of plain, .*, got magic"):
        bench.run(None, modes=["magic"])
