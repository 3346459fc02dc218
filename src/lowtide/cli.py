"""The command ``lowtide``: see it work, check it here, measure it, read a saved report.

Holds the commands' options and nothing else: each hands over to the part that
does the work and exits with what it returns. Law: every ``--json`` writes one
list of flat records (:class:`lowtide.measure.Record`). A part is imported
inside its command: none is needed by another, some draw with packages of an
optional extra, and an environment variable that torch's profiler reads must be
set before it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer

import lowtide
from lowtide.errors import LowtideError

__all__ = ["app", "main"]

app = typer.Typer(
    name="lowtide",
    help="Lower the peak of PyTorch training memory: save, recompute or swap each activation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

# typer reads these at run time, and on Python 3.10 it understands Optional but not `Path | None` in every release.
Json = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--json", metavar="FILE", dir_okay=False, help="Also write the figures as a list of flat records."),
]


def _quiet_profiler() -> None:
    """Keep torch's profiler, which measures memory, from announcing itself in the middle of a progress bar."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@app.command()
def demo(
    *,
    steps: Annotated[int, typer.Option(min=2, help="Training steps in each mode.")] = 60,
    batch: Annotated[int, typer.Option(min=1, help="Windows of text in each step.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Where weights, dropout and batches start from.")] = 1234,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads on a CPU; copies have their own.")] = 1,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the page, pictures, figures.")] = Path(
        "demo-out"
    ),
    json: Json = None,
    markdown: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", dir_okay=False, help="Also write the table as Markdown."),
    ] = None,
) -> None:
    """Train a GPT of ten million parameters in every memory mode and compare.

    Exits with 1 if any mode trained differently from the plain one in any bit.
    """
    _quiet_profiler()
    from lowtide.demo import Settings, run  # noqa: PLC0415

    raise typer.Exit(
        run(Settings(steps=steps, batch=batch, seed=seed, threads=threads), out, json=json, markdown=markdown)
    )


@app.command()
def selfcheck(json: Json = None) -> None:
    """Check on this machine that saving, recomputing and swapping change no bit and do lower the peak.

    Exits with 1 if a loss differs or an order of memory does not hold.
    """
    _quiet_profiler()
    from lowtide import selfcheck as part  # noqa: PLC0415

    raise typer.Exit(part.run(json))


benches = typer.Typer(help="Measure time and memory of every mode.", invoke_without_command=True)
app.add_typer(benches, name="bench")


@benches.callback()
def bench(
    context: typer.Context,
    *,
    json: Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions: rougher times, same bytes.")] = False,
) -> None:
    """Measure time and memory of every mode against torch's own checkpointing and offloading, on this machine."""
    if context.invoked_subcommand is not None:
        return
    _quiet_profiler()
    from lowtide import bench as part  # noqa: PLC0415

    raise typer.Exit(part.run(json, quick=quick))


Device = Annotated[str, typer.Option(metavar="NAME", help="A described device, such as h100-80gb, gh200 or tiny.")]
Model = Annotated[str, typer.Option(help="llama-7b, llama-8b-gqa, llama-70b or tiny-llama.")]
Layers = Annotated[Optional[int], typer.Option(min=1, help="The model's own number if not given.")]  # noqa: UP045
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences of a micro-batch.")]
Link = Annotated[Optional[float], typer.Option(metavar="GB/s", help="Each way, for the description's.")]  # noqa: UP045
TraceFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--trace", metavar="FILE", dir_okay=False, help="Also write a trace for Perfetto; .gz compresses."),
]


@benches.command("sim")
def bench_sim(
    *,
    device: Device = "h100-80gb",
    model: Model = "llama-7b",
    policy: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="plain, recompute, recompute+swap-inputs, save, swap, swap-hideable, swap-all, or all."),
    ] = None,
    layers: Layers = None,
    seq: Tokens = 4096,
    batch: Sequences = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a step; more than one: a pipeline's stage, 1F1B.")] = 1,
    warm_up: Annotated[int, typer.Option(min=0, help="Forwards before the first backward.")] = 0,
    link: Link = None,
    capacity: Annotated[Optional[float], typer.Option(metavar="GB", help="For the description's.")] = None,  # noqa: UP045
    in_flight: Annotated[Optional[float], typer.Option(metavar="MiB", help="Bound on bytes in flight.")] = None,  # noqa: UP045
    ends: Annotated[bool, typer.Option("--ends", help="With embedding, last norm and head.")] = False,
    json: Json = None,
    trace: TraceFile = None,
) -> None:
    """Step a real model with the real engine on a simulated device: virtual times, exact bytes, no hardware."""
    from lowtide.bench import sim as part  # noqa: PLC0415

    raise typer.Exit(
        part.run(
            device,
            model,
            policies=policy or ["all"],
            layers=layers,
            seq=seq,
            batch=batch,
            micro_batches=micro_batches,
            warm_up=warm_up,
            link=link,
            capacity=capacity,
            in_flight=in_flight,
            ends=ends,
            json=json,
            trace=trace,
        )
    )


@benches.command("optimizer")
def bench_optimizer(
    *,
    elements: Annotated[int, typer.Option(min=1, help="Parameters, in matrices of 2**20.")] = 25_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each mode that are timed.")] = 5,
    json: Json = None,
) -> None:
    """Step AdamW plain and with swapped state, side by side on this machine's CPU."""
    _quiet_profiler()
    from lowtide.bench import optimizer as part  # noqa: PLC0415

    raise typer.Exit(part.run(elements, json, rounds=rounds))


@benches.command("sim-optimizer")
def bench_sim_optimizer(
    *,
    device: Device = "h100-80gb",
    model: Model = "llama-7b",
    layers: Layers = None,
    seq: Tokens = 4096,
    batch: Sequences = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 8,
    swap_times: Annotated[int, typer.Option(min=1, help="Buckets of a step.")] = 16,
    link: Link = None,
    json: Json = None,
) -> None:
    """Step a model's AdamW on a simulated device, plain and with swapped state: virtual times, exact bytes."""
    from lowtide.bench import sim_optimizer as part  # noqa: PLC0415

    raise typer.Exit(
        part.run(
            device,
            model,
            json,
            layers=layers,
            seq=seq,
            batch=batch,
            accumulation=accumulation,
            swap_times=swap_times,
            link=link,
        )
    )


@app.command()
def simulate(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A training script of your own.")],
    args: Annotated[Optional[list[str]], typer.Argument(help="Its arguments, after --.")] = None,  # noqa: UP045
    *,
    device: Device = "h100-80gb",
    compute: Annotated[bool, typer.Option(help="Compute values; without, shapes and times only.")] = True,
    json: Json = None,
    trace: TraceFile = None,
) -> None:
    """Run a script that picks its device from torch.accelerator on a simulated one, and report on it."""
    from lowtide.sim.script import run_script  # noqa: PLC0415

    raise typer.Exit(run_script(script, args or [], device=device, compute=compute, json=json, trace=trace))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="What `lowtide demo --out` wrote.")] = Path(
        "demo-out"
    ),
) -> None:
    """Print the table of a saved demonstration again, and where its page is."""
    from rich.console import Console  # noqa: PLC0415

    from lowtide.demo.comparison import FIGURES, PAGE, print_table  # noqa: PLC0415
    from lowtide.demo.figures import table_of  # noqa: PLC0415
    from lowtide.measure import read_records  # noqa: PLC0415

    figures = folder / FIGURES
    if not figures.is_file():
        raise typer.BadParameter(
            f"expected a saved demonstration with {FIGURES} in {folder}, got none. Run: lowtide demo"
        )
    console = Console()
    print_table(table_of(read_records(figures)), console)
    console.print(f"Report with pictures: {folder / PAGE}", soft_wrap=True)


@app.command()
def version() -> None:
    """Print the version of lowtide and of the torch that it runs on."""
    typer.echo(f"lowtide {lowtide.__version__}, torch {torch.__version__}")


def main() -> None:
    """Run the command line; the entry point that the package installs.

    Errors that lowtide raises on purpose are told in one line, without a traceback.
    """
    try:
        app()
    except LowtideError as error:
        typer.echo(f"lowtide: {error}", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
