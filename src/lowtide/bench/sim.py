"""``lowtide bench sim``: the real engine on a real Llama, on a simulated device, one policy after the other.

Holds the order of the measurements, their records and their table. Law: no
kernel runs and nothing is timed by the clock on the wall; every figure follows
from the device's description and from what the engine launched. A policy that
does not fit into the device's memory is reported, not skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import lowtide.sim
from lowtide.bench.modes import operator_counts
from lowtide.bench.sim_formula import step_seconds
from lowtide.bench.sim_models import MODELS, Shape
from lowtide.bench.sim_policies import HIDEABLE, POLICIES, Policy, hideable, moving, products
from lowtide.bench.sim_step import Seen, Work, layers_of, lead_of, link_of, measure
from lowtide.errors import LowtideError, explain
from lowtide.measure import Record, write_records
from lowtide.sim import Simulator
from lowtide.sim.describe import Description

__all__ = ["OptionError", "described", "run", "shape_of"]

BENCH = "bench sim"
PLAIN = "plain"
ALL = "all"
GIB = 1 << 30


class OptionError(LowtideError, ValueError):
    """An option of a bench on a simulated device names something that does not exist, or a size that cannot be."""


@dataclass(frozen=True)
class _Column:
    """A line of the table: the metric of the records, how it is called there, and how it is shown."""

    metric: str
    title: str
    shown: Callable[[float], str]


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.3f}"


def _share(value: float) -> str:
    return f"{value * 100:.2f} %"


def _gib(value: float) -> str:
    return f"{value / GIB:.3f}"


# Three tables that fit a narrow terminal, a row a policy.
_TABLES = {
    "time": (
        _Column("step_seconds", "step, ms", _milliseconds),
        _Column("over_plain", "over plain", _share),
        _Column("recompute_over_plain", "run again", _share),
        _Column("over_closed_form", "over closed form", _share),
        _Column("device_seconds_per_layer", "device, ms a layer", _milliseconds),
        _Column("host_seconds_per_layer", "host, ms a layer", _milliseconds),
    ),
    "memory": (
        _Column("peak_active_bytes", "peak, GiB", _gib),
        _Column("kept_after_forward_bytes", "kept after forward, GiB", _gib),
        _Column("inputs_resident", "between layers, inputs", "{:.2f}".format),
        _Column("layer_bytes", "a layer moves, GiB", _gib),
        _Column("out_bytes", "moved out, GiB", _gib),
    ),
    "link": (
        _Column("exposed_over_step", "exposed, of the step", _share),
        _Column("exposed_seconds", "exposed, ms", _milliseconds),
        _Column("exposed_out_seconds", "out, ms", _milliseconds),
        _Column("exposed_in_seconds", "in, ms", _milliseconds),
        _Column("out_utilisation", "out busy", _share),
        _Column("in_utilisation", "in busy", _share),
    ),
}


def _refuse(what: str, expected: str, got: object) -> OptionError:
    return OptionError(
        explain(what, expected=expected, got=repr(got), where="lowtide bench", remedy="See: lowtide bench sim --help")
    )


def _chosen(policies: Sequence[str]) -> list[str]:
    """Names of the policies to run, in the order of the table; plain is always among them."""
    unknown = [name for name in policies if name not in POLICIES and name != ALL]
    if unknown or not policies:
        raise _refuse("unknown policy", f"some of {', '.join(POLICIES)}, or {ALL}", ", ".join(unknown))
    return [name for name in POLICIES if name == PLAIN or name in policies or ALL in policies]


def shape_of(model: str, layers: int | None) -> Shape:
    """A named model's shape, with another number of layers where one is given."""
    if model not in MODELS:
        raise _refuse("unknown model", f"one of {', '.join(MODELS)}", model)
    shape = MODELS[model] if layers is None else MODELS[model].with_layers(layers)
    if shape.layers < 1:
        raise _refuse("wrong number of layers", "at least 1", layers)
    return shape


def _closed_form(seen: Seen, plain: Seen, sim: Simulator, count: int, lead: float) -> float:
    """The step's closed form, from the layers' own times and the bytes that one of them moved.

    The last layer never leaves, and the one before it is still on its way when backward asks for it: two stay.
    """
    return step_seconds(layers_of(plain, count, seen, lead), link_of(sim, seen), seen.layer_bytes, stays=2)


def figures(
    seen: Seen, plain: Seen | None, sim: Simulator, work: Work, lead: float = 0.0
) -> dict[str, tuple[float, str]]:
    """Turn one step into metrics with their units; what compares with plain needs a plain step.

    The closed form is that of one micro-batch; ``lead`` as in :class:`~lowtide.bench.sim_formula.Layers`.
    """
    count = work.layers
    found: dict[str, tuple[float, str]] = {
        "step_seconds": (seen.step, "s"),
        "peak_active_bytes": (seen.peak, "B"),
        "kept_after_forward_bytes": (seen.kept, "B"),
        "inputs_resident": (seen.inputs_resident, "count"),
        "exposed_seconds": (seen.exposed, "s"),
        "exposed_over_step": (seen.exposed / seen.step, "ratio"),
        "exposed_out_seconds": (seen.exposed_out, "s"),
        "exposed_in_seconds": (seen.exposed_in, "s"),
        "layer_bytes": (seen.layer_bytes, "B"),
        "out_bytes": (seen.out_bytes, "B"),
        "in_bytes": (seen.in_bytes, "B"),
        "out_utilisation": (seen.out / seen.step, "ratio"),
        "in_utilisation": (seen.inward / seen.step, "ratio"),
        "device_seconds_per_layer": (seen.compute / count, "s"),
        "host_seconds_per_layer": (seen.host / count, "s"),
        "launches": (seen.launches, "count"),
    }
    if plain is not None:
        found["over_plain"] = (seen.step / plain.step - 1, "ratio")
        found["recompute_over_plain"] = (seen.compute / plain.compute - 1, "ratio")
    if plain is not None and work.micro_batches == 1:
        closed = _closed_form(seen, plain, sim, count, lead)
        found["closed_form_seconds"] = (closed, "s")
        found["over_closed_form"] = (seen.step / closed - 1, "ratio")
    return found


def _hideable(work: Work, plain: Seen, sim: Simulator) -> tuple[Policy, str]:
    """The policy that moves what is free, and its operators in words."""
    count = work.layers
    device = sim.description
    candidates = products(work.shape, work.tokens, work.batch, device)
    chosen = hideable(layers_of(plain, count), link_of(sim), candidates, work.input_bytes, device.link_latency)
    x = torch.empty(work.batch, work.tokens, work.shape.width, dtype=torch.bfloat16, device="sim")
    layer = partial(work.model.blocks[0], cos=work.model.cos, sin=work.model.sin)
    counts = operator_counts(cast("nn.Module", layer), x)
    return moving(chosen, counts), ", ".join(["inputs", *(product.name for product in chosen)])


def _trace_path(trace: Path | None, name: str, names: Sequence[str]) -> Path | None:
    """One file a policy: its name goes in front of the file's where there are several."""
    if trace is None or len(names) == 1:
        return trace
    return trace.with_name(f"{name}.{trace.name}")


def _measure(
    names: Sequence[str], work: Work, sim: Simulator, *, in_flight: int | None, trace: Path | None
) -> Iterable[tuple[str, str, object]]:
    """Measure every policy; give (policy, metric, value or figure)."""
    plain: Seen | None = None
    for name in names:
        policy = POLICIES[name]
        if name == HIDEABLE:
            if plain is None:
                yield name, "failure", "plain does not fit, so nobody knows what is free"
                continue
            policy, moved = _hideable(work, plain, sim)
            yield name, "moved", moved
        try:
            seen = measure(policy, work, sim, in_flight=in_flight, trace=_trace_path(trace, name, names))
        except torch.OutOfMemoryError:
            yield name, "failure", "out of memory"
            continue
        if name == PLAIN:
            plain = seen
        lead = 0.0 if policy.reads is None or plain is None else lead_of(work, sim, policy.reads)
        for metric, figure in figures(seen, plain, sim, work, lead).items():
            yield name, metric, figure


def _table(console: Console, case: str, records: Iterable[Record]) -> None:
    cells: dict[str, dict[str, float | int | str]] = {}
    for record in records:
        cells.setdefault(record.mode, {})[record.metric] = record.value
    for name, columns in _TABLES.items():
        table = Table("policy", *[column.title for column in columns], title=f"{case}: {name}")
        table.columns[0].no_wrap = True
        for mode, seen in cells.items():
            if columns[0].metric in seen:
                table.add_row(mode, *[c.shown(float(seen[c.metric])) if c.metric in seen else "" for c in columns])
        console.print(table)
    for mode, seen in cells.items():
        for metric in ("moved", "failure"):
            if metric in seen:
                console.print(f"{mode}: {'moves ' if metric == 'moved' else ''}{seen[metric]}.", markup=False)


def described(device: str, link: float | None, capacity: float | None) -> Description:
    """A named device, with another link (GB/s) or memory (GB) where they are given."""
    description = Description.named(device)
    if link is not None:
        description = description.with_(link=link * 1e9)
    return description if capacity is None else description.with_(capacity=round(capacity * 1e9))


def _demand_a_step(seq: int, batch: int, micro_batches: int, warm_up: int) -> None:
    if seq < 1 or batch < 1:
        raise _refuse("wrong size of a step", "at least 1 token and 1 sequence", (seq, batch))
    if micro_batches < 1 or not 0 <= warm_up < micro_batches:
        raise _refuse("wrong schedule", "fewer forwards to warm up than micro-batches", (micro_batches, warm_up))


def run(
    device: str = "h100-80gb",
    model: str = "llama-7b",
    *,
    policies: Sequence[str] = (ALL,),
    layers: int | None = None,
    seq: int = 4096,
    batch: int = 1,
    micro_batches: int = 1,
    warm_up: int = 0,
    link: float | None = None,
    capacity: float | None = None,
    in_flight: float | None = None,
    ends: bool = False,
    json: Path | None = None,
    trace: Path | None = None,
) -> int:
    """Run a model's training step on a simulated device under each policy, print the table, write the records.

    Starts the simulator in this process, which can use no other accelerator
    from then on. Costs seconds and, whatever the model's size, little memory.

    Args:
        device: name of a description.
        model: one of ``llama-7b``, ``llama-8b-gqa``, ``llama-70b``, ``tiny-llama``.
        policies: names out of ``POLICIES``, or ``all``; plain is always measured.
        layers: None for the model's own number.
        seq: tokens of a sequence.
        batch: sequences of a micro-batch.
        micro_batches: how many a step has; with more than one it is the step of a pipeline's stage (1F1B).
        warm_up: forwards before the first backward.
        link: GB/s of either direction; None for the description's.
        capacity: GB of device memory; None for the description's.
        in_flight: MiB that may be leaving or coming at once; None for lowtide's own bound.
        ends: with embedding, last norm and head.
        json: where to write the records, or None.
        trace: where to write a trace of the measured step; with several policies one file each.

    Returns:
        0: a figure is a finding, not a failure.

    Raises:
        OptionError: an unknown model or policy, or an impossible size.
        DescriptionError: an unknown device.
    """
    names, shape = _chosen(policies), shape_of(model, layers)
    _demand_a_step(seq, batch, micro_batches, warm_up)
    description = described(device, link, capacity)
    sim = lowtide.sim.start(description, compute=False, checks=False)
    case = f"{device} {model} x{shape.layers} {batch}x{seq} {description.link_out / 1e9:g} GB/s"
    if micro_batches > 1:
        case += f" 1f1b {warm_up}+{micro_batches - warm_up}"
    work = Work.build(shape, seq, batch, ends=ends, micro_batches=micro_batches, warm_up=warm_up)
    records = []
    bound = None if in_flight is None else round(in_flight * (1 << 20))
    for name, metric, value in _measure(names, work, sim, in_flight=bound, trace=trace):
        number, unit = value if isinstance(value, tuple) else (value, "text")
        records.append(Record(BENCH, case, name, metric, number, unit))
    if json is not None:
        write_records(json, records)
    _table(Console(), case, records)
    return 0
