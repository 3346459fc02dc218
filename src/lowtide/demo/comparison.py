"""The demonstration from start to end: train in every mode, compare, print, write the page.

Holds the order of things and what is said about them. Law: a difference is
reported as a failure, by the return value too. Must never decide what equal
means: that is in :mod:`lowtide.demo.figures`.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable

import lowtide
from lowtide.demo.data import Corpus, read_corpus
from lowtide.demo.figures import Table, records_of, table_of
from lowtide.demo.modes import MODES, Mode
from lowtide.demo.train import Run, Settings, train
from lowtide.measure import Record, write_records
from lowtide.report.html import (
    Page,
    Stack,
    layers_picture,
    loss_picture,
    memory_picture,
    render,
    require,
)

__all__ = ["FIGURES", "PAGE", "print_table", "run"]

FIGURES = "figures.json"
PAGE = "report.html"


def run(settings: Settings, out: Path, *, json: Path | None = None, markdown: Path | None = None) -> int:
    """Run the demonstration and return 0 if every mode trained exactly as the plain one did, else 1.

    Writes ``report.html``, ``figures.json`` and the pictures as PNG into ``out``.

    Args:
        settings: what to train and for how long.
        out: a folder, made if it is missing.
        json: a second place for the records.
        markdown: where to write the table as Markdown.

    Raises:
        UnsupportedError: the extra ``report`` is not installed; found out before training.
    """
    require()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    corpus = read_corpus()
    described = _describe(settings, corpus)
    console.print(*(f"[bold]{name}:[/bold] {escape(value)}" for name, value in described.items()), sep="\n")
    with _compute_threads(settings.threads):
        runs = _train_all(_modes_for_this_machine(), corpus, settings, console)
    records = records_of(_case(settings), runs)
    table = table_of(records)
    verdict, equal = _verdict(records)
    for path in filter(None, (out / FIGURES, json)):
        write_records(path, records)
    if markdown is not None:
        markdown.write_text(table.markdown() + "\n", encoding="utf-8")
    _write_page(out, runs, table, verdict, described)
    print_table(table, console)
    console.print(f"[{'green' if equal else 'red'}]{verdict}[/]")
    console.print(f"Report with pictures: {out / PAGE}", soft_wrap=True)
    return 0 if equal else 1


@contextlib.contextmanager
def _compute_threads(count: int) -> Iterator[None]:
    """Compute with so many threads on a CPU, then with as many as before; leave an accelerator's host alone."""
    before = torch.get_num_threads()
    if not torch.accelerator.is_available():
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _modes_for_this_machine() -> Sequence[Mode]:
    """Add a second plain run on an accelerator, whose own kernels need not repeat themselves bit for bit."""
    if not torch.accelerator.is_available():
        return MODES
    plain = MODES[0]
    return (plain, replace(plain, name="plain again", meaning="Does this machine repeat itself?"), *MODES[1:])


def _train_all(modes: Sequence[Mode], corpus: Corpus, settings: Settings, console: Console) -> list[Run]:
    """Train once a mode, with a progress bar each."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(mode.name, total=settings.steps, loss="", start=False) for mode in modes]
        for mode, task in zip(modes, tasks, strict=True):
            progress.start_task(task)
            runs.append(train(mode, corpus, settings, _show(progress, task)))
    return runs


def _show(progress: Progress, task: TaskID) -> Callable[[int, float], None]:
    """Return what moves one mode's bar after each step."""

    def on_step(done: int, loss: float) -> None:
        progress.update(task, completed=done, loss=f"loss {loss:.3f}")

    return on_step


def _case(settings: Settings) -> str:
    return f"gpt-{settings.shape.layers}x{settings.shape.width}"


def _verdict(records: Sequence[Record]) -> tuple[str, bool]:
    """Say in one sentence whether every mode trained as the plain one did, and return whether all is well.

    Where a second plain run differs from the first, the machine itself does not
    repeat a step bit for bit, and the comparison says nothing about lowtide.
    """
    figures = {(record.mode, record.metric): record.value for record in records}
    steps = figures[records[0].mode, "steps"]
    different = [
        mode
        for mode in dict.fromkeys(record.mode for record in records)
        if figures[mode, "steps_with_equal_loss"] != steps
        or not figures[mode, "weights_equal"]
        or not figures[mode, "rng_state_equal"]
    ]
    if not different:
        return "Every mode gave the same loss in every step, the same weights and the same random state.", True
    if "plain again" in different:
        return "This machine does not repeat a plain run bit for bit, so no mode can be compared exactly.", True
    return f"Training differs from the plain run in: {', '.join(different)}.", False


def print_table(table: Table, console: Console) -> None:
    """Print the table; it fits eighty columns."""
    printed = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, cell in enumerate(table.header):
        printed.add_column(cell.replace(" ", "\n"), justify="left" if number == 0 else "right", vertical="bottom")
    for row in table.rows:
        printed.add_row(*row)
    console.print(printed)


def _describe(settings: Settings, corpus: Corpus) -> dict[str, str]:
    """Say what runs on what: enough to read the figures a year later."""
    shape = settings.shape
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = (
        "cpu; the lower tier is a file" if accelerator is None else f"{accelerator}; the lower tier is pinned memory"
    )
    return {
        "model": f"byte-level GPT: {shape.layers} layers, width {shape.width}, {shape.heads} heads, "
        f"context {shape.context}, dropout {shape.dropout}",
        "text": f"{corpus.training.numel() / 1e6:.1f} MB of the Python standard library's sources",
        "training": f"{settings.steps} steps of {settings.batch} x {shape.context} bytes, "
        f"AdamW, learning rate up to {settings.learning_rate:g}, seed {settings.seed}",
        "device": device,
        "memory": "what torch's allocator holds beyond weights and optimizer state, without the lower tier's buffers",
        "compute threads": str(settings.threads) if accelerator is None else "not set",
        "software": f"lowtide {lowtide.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
    }


def _write_page(out: Path, runs: Sequence[Run], table: Table, verdict: str, settings: Mapping[str, str]) -> None:
    """Draw the pictures and write them and the page."""
    stacks = {
        run.mode.name: [Stack(layer.name, layer.kept, layer.swapped, layer.recomputed) for layer in run.layers]
        for run in runs
        if run.layers
    }
    pictures = [
        memory_picture({run.mode.name: run.curve for run in runs}),
        *([layers_picture(stacks)] if stacks else []),
        loss_picture({run.mode.name: run.losses for run in runs}),
    ]
    for picture in pictures:
        (out / f"{picture.name}.png").write_bytes(picture.png)
    page = Page(
        title=f"lowtide: one training run, {len(runs)} ways to hold its activations",
        summary=verdict,
        header=table.header,
        rows=table.rows,
        meanings={run.mode.name: run.mode.meaning for run in runs},
        pictures=pictures,
        settings=settings,
        remarks={run.mode.name: run.remarks for run in runs if run.remarks},
    )
    (out / PAGE).write_text(render(page), encoding="utf-8")
