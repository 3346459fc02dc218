"""The bench's figures beside what they should reach.

Holds the goals and prints them. Law: a goal is a ratio or a number of bytes of
the same run; missing figures are shown as missing, never as met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lowtide.measure import Record

__all__ = ["GOALS", "Figures", "Goal", "print_figures", "print_goals"]

MIB = 1 << 20
LLAMA_SETS = "rope q, rope k, v, sdpa, gate, up"


class Figures:
    """The records of one run, looked up by case, mode and metric."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        self._by_key = {(r.case, r.mode, r.metric): r.value for r in self.records}

    def get(self, case: str, mode: str, metric: str) -> float:
        """Return a figure.

        Raises:
            KeyError: this run did not measure it.
        """
        return float(self._by_key[case, mode, metric])

    def cases(self, prefix: str) -> list[str]:
        """Return the cases whose name begins so, in order."""
        return [case for case in dict.fromkeys(r.case for r in self.records) if case.startswith(prefix)]


@dataclass(frozen=True)
class Goal:
    """What should hold, the figure, the bound, and the unit they are printed in."""

    text: str
    figure: Callable[[Figures], float]
    bound: Callable[[Figures], float]
    unit: str = "x"


def _ratio(case: str, mode: str, base: str) -> Callable[[Figures], float]:
    metric = "step_over_plain"
    return lambda f: f.get(case, mode, metric) / f.get(case, base, metric)


def _const(value: float) -> Callable[[Figures], float]:
    return lambda f: value


def _mib(case: str, mode: str, metric: str) -> Callable[[Figures], float]:
    return lambda f: f.get(case, mode, metric) / MIB


def _worst_excess(mode: str, bases: tuple[str, ...], metric: str) -> Callable[[Figures], float]:
    """Largest excess of a mode over the cheapest of its bases, over every Llama case that was measured."""

    def worst(f: Figures) -> float:
        return max(f.get(c, mode, metric) - min(f.get(c, b, metric) for b in bases) for c in f.cases("llama x"))

    return worst


def _against_both(f: Figures) -> float:
    """Largest excess of keep over SAC, and of recompute over checkpoint, in peak without gradients."""
    metric = "peak_without_gradients_bytes"
    pairs = [("keep", "sac"), ("recompute", "checkpoint")]
    cases = f.cases("llama x")
    gaps = [f.get(c, ours, metric) - f.get(c, peer, metric) for c in cases for ours, peer in pairs]
    return max(gaps) / MIB


GOALS: tuple[Goal, ...] = (
    Goal("host-bound step, keep mm+addmm+sdpa, of SAC's", _ratio("host-bound", "keep", "sac"), _const(0.65)),
    Goal("host-bound step, recompute, of checkpoint's", _ratio("host-bound", "recompute", "checkpoint"), _const(1.2)),
    Goal("compute-bound step, keep, of SAC's", _ratio("compute-bound", "keep", "sac"), _const(1.0)),
    Goal(
        "compute-bound step, recompute, of checkpoint's",
        _ratio("compute-bound", "recompute", "checkpoint"),
        _const(1.0),
    ),
    Goal("llama: peak without gradients, worst excess over SAC or checkpoint", _against_both, _const(0.0), "MiB"),
    Goal(
        "llama x1, sdpa+gate+up kept: peak",
        _mib("llama x1 (sdpa, gate, up)", "keep", "peak_bytes"),
        _const(39.1),
        "MiB",
    ),
    Goal(
        "llama x4, sdpa kept: peak, SAC's less 10",
        _mib("llama x4 (sdpa)", "keep", "peak_bytes"),
        lambda f: f.get("llama x4 (sdpa)", "sac", "peak_bytes") / MIB - 10.0,
        "MiB",
    ),
    Goal(
        "llama: recomputed, worst excess over SAC",
        lambda f: _worst_excess("keep", ("sac",), "recomputed_flops")(f) / 1e6,
        _const(0.0),
        "MFLOP",
    ),
    Goal(
        f"llama x1, {LLAMA_SETS} kept: recomputed, of SAC's",
        lambda f: (
            f.get(f"llama x1 ({LLAMA_SETS})", "keep", "recomputed_flops")
            / f.get(f"llama x1 ({LLAMA_SETS})", "sac", "recomputed_flops")
        ),
        _const(1 / 3),
    ),
    Goal(
        "Liger-like, declared pure: kept beyond the output, of the input",
        lambda f: f.get("liger-like", "recompute", "kept_over_input"),
        _const(1.2),
    ),
    Goal(
        "Megatron-like, declared pure: kept beyond the output, of the input",
        lambda f: f.get("megatron-like", "recompute", "kept_over_input"),
        _const(1.2),
    ),
    Goal(
        "swap to file, step over plain",
        lambda f: f.get("swap-to-file", "swap all", "step_over_plain"),
        lambda f: f.get("swap-to-file", "swap all", "step_over_plain_allowed"),
    ),
    Goal(
        "swap to file, peak's distance from the formula",
        lambda f: abs(
            f.get("swap-to-file", "swap all", "peak_without_gradients_bytes")
            / f.get("swap-to-file", "swap all", "formula_bytes")
            - 1
        ),
        _const(0.01),
    ),
    Goal(
        "Python memory of the tape, a Llama block",
        lambda f: f.get("llama tape", "recompute", "tape_bytes") / 1024,
        _const(64.0),
        "KiB",
    ),
)


def print_goals(console: Console, figures: Figures) -> int:
    """Print every goal with its figure and bound; return how many are missed or were not measured."""
    table = Table("goal", "figure", "at most", "", title="Goals of this run")
    open_goals = 0
    for goal in GOALS:
        try:
            figure, bound = goal.figure(figures), goal.bound(figures)
        except (KeyError, ValueError):
            table.add_row(goal.text, "-", "-", "not measured")
            open_goals += 1
            continue
        met = figure <= bound
        open_goals += not met
        table.add_row(goal.text, f"{figure:.3f} {goal.unit}", f"{bound:.3f}", "met" if met else "[bold red]missed[/]")
    console.print(table)
    return open_goals


def _shown(record: Record) -> str:
    if record.unit == "B":
        return f"{float(record.value) / MIB:.2f} MiB"
    if record.unit == "B/s":
        return f"{float(record.value) / 1e9:.2f} GB/s"
    if record.unit == "FLOP":
        return f"{float(record.value) / 1e6:.0f} MF"
    return f"{record.value:.3f}" if isinstance(record.value, float) else str(record.value)


WIDEST = 5  # metrics beside each other; more stand below each other


def print_figures(console: Console, records: Iterable[Record]) -> None:
    """Print one table per case: a row a mode and a column a metric, or the other way round where metrics are many."""
    cases: dict[str, dict[tuple[str, str], str]] = {}
    for record in records:
        cases.setdefault(record.case, {})[record.mode, record.metric] = _shown(record)
    for case, cells in cases.items():
        modes = list(dict.fromkeys(mode for mode, _ in cells))
        metrics = list(dict.fromkeys(metric for _, metric in cells))
        wide = len(metrics) <= WIDEST
        rows, columns = (modes, metrics) if wide else (metrics, modes)
        table = Table("mode" if wide else "metric", *[_heading(name) for name in columns], title=case)
        table.columns[0].no_wrap = True
        for row in rows:
            keys = [(row, column) if wide else (column, row) for column in columns]
            table.add_row(_heading(row), *[cells.get(key, "") for key in keys])
        console.print(table)


def _heading(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")
