"""The demonstration: what it trains, that it compares honestly, and what it writes."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.demo import Settings, Shape, comparison, run
from lowtide.demo.data import read_corpus
from lowtide.demo.figures import Table, records_of, table_of
from lowtide.demo.model import GPT
from lowtide.demo.modes import MODES, Mode
from lowtide.demo.train import Run, train
from lowtide.measure import read_records

TINY = Settings(steps=4, batch=2, shape=Shape(layers=3, heads=2, width=128, context=128))


def train_tiny(mode: Mode, settings: Settings = TINY) -> Run:
    return train(mode, read_corpus(), settings, lambda _done, _loss: None)


def mode_named(name: str) -> Mode:
    return next(mode for mode in MODES if mode.name == name)


def test_the_model_is_of_the_promised_size_and_starts_at_a_uniform_guess() -> None:
    shape = Shape()
    model = GPT(shape)
    assert shape.layers >= 8
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(10e6, rel=0.05)
    tokens = torch.randint(256, (1, 64))
    loss = torch.nn.functional.cross_entropy(model(tokens)[0], tokens[0].roll(1)).item()
    assert loss == pytest.approx(math.log(256), abs=0.4)


def test_the_model_cannot_see_the_future() -> None:
    model = GPT(TINY.shape).eval()
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = 7
    assert torch.equal(model(tokens)[:, :20], model(changed)[:, :20])


def test_the_corpus_is_this_pythons_library_and_batches_repeat_with_their_seed() -> None:
    corpus = read_corpus()
    assert corpus.training.numel() > 1_000_000
    assert b"import " in bytes(corpus.training[:100_000].tolist())
    first, again, other = (corpus.batches(2, 16, seed=seed) for seed in (1, 1, 2))
    tokens, targets = first.next()
    assert torch.equal(tokens[:, 1:], targets[:, :-1]), "the target is the next byte"
    assert torch.equal(tokens, again.next()[0])
    assert not torch.equal(tokens, other.next()[0])
    assert not torch.equal(tokens, first.next()[0])


def test_batches_leave_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    read_corpus().batches(2, 16, seed=1).next()
    assert torch.equal(before, torch.get_rng_state())


def test_the_last_byte_of_the_text_is_reachable_and_nothing_behind_it(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"second")
    (tmp_path / "a.py").write_bytes(b"first ")
    (tmp_path / "c.txt").write_bytes(b"no python")
    corpus = read_corpus(tmp_path, held_out=0.0)
    assert bytes(corpus.training.tolist()) == b"first second"
    _, targets = corpus.batches(200, 4, seed=0).next()
    assert {bytes(row.tolist()) for row in targets} == {b"first second"[at : at + 4] for at in range(1, 9)}


def test_a_folder_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        read_corpus(tmp_path)


@pytest.mark.parametrize("setting", [{"steps": 1}, {"batch": 0}, {"threads": 0}])
def test_settings_that_cannot_be_are_refused_by_name(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        replace(TINY, **setting)


@pytest.fixture(scope="module")
def plain_run() -> Run:
    torch.set_num_threads(1)
    return train_tiny(mode_named("plain"))


@pytest.mark.parametrize("name", [mode.name for mode in MODES[1:]])
def test_every_mode_trains_exactly_like_plain_and_holds_less(name: str, plain_run: Run) -> None:
    ours = train_tiny(mode_named(name))
    figures = {(record.mode, record.metric): record.value for record in records_of("tiny", [plain_run, ours])}
    assert figures[name, "steps_with_equal_loss"] == TINY.steps
    assert figures[name, "weights_equal"] == figures[name, "rng_state_equal"] == 1
    assert ours.held_out_loss.hex() == plain_run.held_out_loss.hex()
    assert figures[name, "peak_bytes"] < figures["plain", "peak_bytes"]
    assert figures[name, "held_after_forward_bytes"] < figures["plain", "held_after_forward_bytes"]
    assert [layer.name for layer in ours.layers] == [f"layers.{number}" for number in range(3)]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the lower tier is a file only on a plain CPU")
@pytest.mark.parametrize(("name", "recomputes"), [("swap", True), ("swap all", False)])
def test_swapped_bytes_go_to_the_file_and_all_but_the_last_layer_swaps(name: str, *, recomputes: bool) -> None:
    swapped = train_tiny(mode_named(name))
    *others, last = swapped.layers
    assert all(layer.swapped > 0 for layer in others)
    assert swapped.lower_tier_bytes == swapped.file_bytes
    assert 0 < swapped.file_bytes <= sum(layer.swapped for layer in others) + last.swapped
    assert any(layer.recomputed for layer in swapped.layers) == recomputes
    assert lowtide.SwapManager().lower_bytes() == 0, "nothing is left behind"


def test_the_gradients_are_what_is_left_of_a_step_before_its_update(plain_run: Run) -> None:
    forward, backward, update = plain_run.curve.phases
    assert [forward.name, backward.name, update.name] == ["forward", "backward", "update"]
    gradients = sum(weight.numel() * 4 for weight in plain_run.weights)
    before_update = [size for second, size in plain_run.curve.points if second <= backward.end][-1]
    assert gradients <= before_update < gradients + 64 * 1024, "batch, logits and loss besides"


def test_a_difference_in_one_bit_is_found(plain_run: Run) -> None:
    nudged = plain_run.losses[2] * (1 + 2**-52)
    weights = tuple(weight.clone() for weight in plain_run.weights)
    weights[0][0, 0] = -0.0
    plain_weights = tuple(weight.clone() for weight in weights)
    plain_weights[0][0, 0] = 0.0
    plain = replace(plain_run, weights=plain_weights)
    other = replace(
        plain_run,
        mode=replace(plain_run.mode, name="other"),
        losses=(*plain_run.losses[:2], nudged, plain_run.losses[3]),
        weights=weights,
    )
    figures = {(record.mode, record.metric): record.value for record in records_of("tiny", [plain, other])}
    assert figures["plain", "steps_with_equal_loss"] == 4
    assert figures["other", "steps_with_equal_loss"] == 3
    assert figures["plain", "weights_equal"] == 1
    assert figures["other", "weights_equal"] == 0


def test_a_mode_that_changes_training_makes_the_command_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_dropout(model: GPT) -> None:
        for layer in model.layers:
            layer.dropout.p = 0.0

    wrong = Mode("wrong", "Not the same training.", no_dropout)
    monkeypatch.setattr(comparison, "MODES", (MODES[0], wrong))
    assert run(TINY, tmp_path) == 1
    assert "Training differs from the plain run in: wrong." in capsys.readouterr().out
    assert "Training differs" in (tmp_path / "report.html").read_text()


def test_a_whole_demonstration_writes_page_pictures_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, copy, markdown = tmp_path / "out", tmp_path / "copy.json", tmp_path / "table.md"
    threads = torch.get_num_threads()
    assert run(replace(TINY, threads=threads), out, json=copy, markdown=markdown) == 0
    assert torch.get_num_threads() == threads
    printed = capsys.readouterr().out
    assert "Every mode gave the same loss in every step" in printed
    assert json.loads(copy.read_text()) == json.loads((out / "figures.json").read_text())
    table = table_of(read_records(copy))
    assert [row[0] for row in table.rows] == [mode.name for mode in MODES]
    assert markdown.read_text() == table.markdown() + "\n"
    page = (out / "report.html").read_text()
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(pictures) == 3
    for picture, name in zip(pictures, ("memory", "layers", "loss"), strict=True):
        assert b"<svg" in base64.b64decode(picture)
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not re.search(r'(src|href)="(?!data:)', page), "the page needs nothing from outside"
    for row in table.rows:
        assert all(f"<td>{cell}</td>" in page for cell in row)


def test_records_that_are_no_demonstration_are_refused() -> None:
    with pytest.raises(ValueError, match="no demonstration"):
        table_of([])


def test_a_record_list_with_a_figure_missing_is_refused_by_its_name(plain_run: Run) -> None:
    records = [record for record in records_of("tiny", [plain_run]) if record.metric != "peak_bytes"]
    with pytest.raises(ValueError, match="peak_bytes"):
        table_of(records)


def test_markdown_aligns_figures_to_the_right() -> None:
    assert Table(("mode", "a", "b"), (("plain", "1", "2"),)).markdown().splitlines() == [
        "| mode | a | b |",
        "|---|---:|---:|",
        "| plain | 1 | 2 |",
    ]


def test_the_example_in_the_readme_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    model = GPT(TINY.shape)
    exec(example, {"model": model, "tokens": torch.randint(256, (1, 16))})  # noqa: S102
    assert all(parameter.grad is not None for parameter in model.layers.parameters())
    printed = capsys.readouterr().out
    assert all(f"layers.{number}" in printed for number in range(TINY.shape.layers))


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_the_report_extra_the_error_names_it_before_training(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setattr(comparison, "train", lambda *_: pytest.fail("trained although nothing can be drawn"))
    with pytest.raises(lowtide.errors.UnsupportedError, match=rf"no {missing}.*pip install 'lowtide\[report\]'"):
        run(TINY, tmp_path)
