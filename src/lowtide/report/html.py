"""A page about training runs: one file that needs no network, with its pictures inside.

Holds the page, its template and the three pictures. Law: it draws the figures
that it is given and computes none. matplotlib and jinja2 are imported when
something is drawn, not before: they belong to the optional part ``report``.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide.errors import UnsupportedError, explain
from lowtide.measure import MemoryCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Page", "Picture", "Stack", "layers_picture", "loss_picture", "memory_picture", "render", "require"]

_MIB = 1 << 20
# Okabe and Ito's colours, which stay apart for colour-blind readers; as many as are told apart at a glance.
_COLOURS = ("#444444", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9")
_FATES = (("kept", "#0072B2", ""), ("swapped", "#E69F00", "///"), ("recomputed", "#DDDDDD", ""))


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture with its caption, as SVG for the page and as PNG for everything else."""

    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes

    @property
    def source(self) -> str:
        """The SVG as a ``data:`` address."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode("ascii")


@dataclass(frozen=True, slots=True)
class Stack:
    """The bytes of one layer by fate."""

    layer: str
    kept: int
    swapped: int
    recomputed: int


@dataclass(frozen=True, slots=True)
class Page:
    """Everything that the page says, in the order in which it says it."""

    title: str
    summary: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    meanings: Mapping[str, str]
    pictures: Sequence[Picture]
    settings: Mapping[str, str]
    remarks: Mapping[str, Sequence[str]] = field(default_factory=dict)


def require() -> None:
    """Check that what the page is drawn with is installed, without importing it.

    Raises:
        UnsupportedError: matplotlib or jinja2 is missing; the message names the extra to install.
    """
    for package in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(
                explain(
                    "the report cannot be drawn",
                    expected="matplotlib and jinja2",
                    got=f"no {package}",
                    where="lowtide[report]",
                    remedy="Install them with: pip install 'lowtide[report]'",
                )
            )


def render(page: Page) -> str:
    """Return the page as HTML, everything inside."""
    require()
    # Optional, see the head of this file.
    import jinja2  # noqa: PLC0415

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lowtide.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(page=page)


def memory_picture(curves: Mapping[str, MemoryCurve]) -> Picture:
    """Draw memory over one step, a line a mode, with equal phases lying one above the other."""
    phases = [phase.name for phase in next(iter(curves.values())).phases]

    def draw(axes: Axes) -> None:
        for (mode, curve), colour in zip(curves.items(), _COLOURS, strict=False):
            label = f"{mode}: peak {curve.peak_bytes / _MIB:.0f} MiB"
            times = [_place(second, curve) for second, _ in curve.points]
            sizes = [size / _MIB for _, size in curve.points]
            axes.plot(times, sizes, drawstyle="steps-post", color=colour, linewidth=1.4, label=label)
            peak = max(range(len(sizes)), key=sizes.__getitem__)
            axes.plot(times[peak], sizes[peak], marker="o", markersize=5, color=colour)
        for number, phase in enumerate(phases):
            axes.axvline(number, color="#999999", linewidth=0.8, linestyle=":")
            axes.annotate(phase, (number + 0.5, 1.01), xycoords=("data", "axes fraction"), ha="center", va="bottom")
        axes.set_xlim(0, len(phases))
        axes.set_ylim(bottom=0)
        axes.set_xticks([])
        axes.set_xlabel("one training step, each phase drawn equally wide")
        axes.set_ylabel("memory beyond weights and optimizer state, MiB")
        axes.legend(loc="upper right", framealpha=0.95)

    return _picture(
        "memory",
        "Memory over one step",
        "Every allocation and release of one training step, as torch's allocator reported it. Dots mark the peaks.",
        draw,
        height=4.6,
    )


def _place(second: float, curve: MemoryCurve) -> float:
    """Map a moment to its place on the axis: phase number plus the share of that phase that has passed.

    What lies between two phases is drawn where the next one begins.
    """
    for number, phase in enumerate(curve.phases):
        if second < phase.start:
            return float(number)
        if second <= phase.end:
            return number + (second - phase.start) / max(phase.end - phase.start, 1e-12)
    return float(len(curve.phases))


def layers_picture(modes: Mapping[str, Sequence[Stack]]) -> Picture:
    """Draw, for every layer of every mode, what became of the bytes that its backward needs."""

    def draw(axes: Axes) -> None:
        left = 0
        ticks: list[tuple[float, str]] = []
        for mode, stacks in modes.items():
            places = range(left, left + len(stacks))
            bottom = [0.0] * len(stacks)
            for fate, colour, hatch in _FATES:
                sizes = [getattr(stack, fate) / _MIB for stack in stacks]
                label = fate if left == 0 else None
                axes.bar(places, sizes, 0.85, bottom, color=colour, hatch=hatch, edgecolor="white", label=label)
                bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
            ticks.extend((place, str(number)) for number, place in enumerate(places))
            centre = left + (len(stacks) - 1) / 2
            axes.annotate(mode, (centre, 1.01), xycoords=("data", "axes fraction"), ha="center", va="bottom")
            left += len(stacks) + 1
        axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=8)
        axes.set_xlim(-1, left - 1)
        axes.set_xlabel("layer")
        axes.set_ylabel("bytes that backward needs, MiB")
        axes.margins(y=0.25)
        axes.legend(loc="upper center", ncols=3)

    return _picture(
        "layers",
        "What each layer keeps, swaps and recomputes",
        "Bytes of one forward by fate, each storage counted once. What is swapped or recomputed is not in memory "
        "between forward and backward.",
        draw,
        height=3.8,
    )


def loss_picture(losses: Mapping[str, Sequence[float]]) -> Picture:
    """Draw the loss of every step; modes with equal losses lie on one another, the first drawn widest."""

    def draw(axes: Axes) -> None:
        widest = len(losses)
        for number, ((mode, values), colour) in enumerate(zip(losses.items(), _COLOURS, strict=False)):
            steps = range(1, len(values) + 1)
            axes.plot(steps, values, color=colour, linewidth=1.2 + 1.6 * (widest - 1 - number), label=mode)
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats per byte")
        axes.legend(loc="upper right")

    return _picture(
        "loss",
        "The loss falls, and it is the same loss",
        "All modes are drawn, each thinner than the one below it: where only nested colours show, losses are equal.",
        draw,
        height=3.4,
    )


def _picture(name: str, title: str, caption: str, draw: Callable[[Axes], None], *, height: float) -> Picture:
    """Draw on fresh axes, without pyplot: no window system, no global state."""
    require()
    # Optional, see the head of this file.
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Text as text keeps the SVG small and searchable; a fixed salt makes equal pictures equal files.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowtide", "font.size": 10, "hatch.color": "white"}):
        figure = Figure(figsize=(9.6, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#EEEEEE")
        axes.set_axisbelow(True)
        draw(axes)
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.savefig(png, format="png", dpi=120)
    return Picture(name, title, caption, svg.getvalue(), png.getvalue())
