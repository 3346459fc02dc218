"""``lowtide selfcheck``: does training stay the same, and does memory fall, on this machine (U14, U15)?

Trains a 16-layer GPT for three steps in every mode, each in a process of its
own, and compares losses bit by bit and peaks by order. Law: no figure is
judged that the library reports about itself alone: what was released is proved
by weak references to storages, peaks are the allocator's own events. Must
never import a model or data from outside.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from lowtide import (
    CheckpointPolicy,
    SwapManager,
    checkpoint_wrapper,
    save_matmuls_and_attention,
    swap_matmuls_and_attention,
    swap_wrapper,
)
from lowtide.bench.flops import backward_flops
from lowtide.device import training_device
from lowtide.measure import MemoryCurve, Record, memory_curve, write_records

__all__ = ["MODES", "ChildResult", "judge", "run", "run_child"]

LAYERS, WIDTH, HEADS, TOKENS, BATCH = 16, 128, 4, 256, 4
STATE_BYTES = BATCH * TOKENS * WIDTH * 4
MOVED_AT_LEAST, CLOSE = 0.8, 0.1


class Attention(nn.Module):
    """Norm, fused qkv, attention, projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core = AttentionCore()

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states to what the residual stream gains."""
        y: Tensor = self.out(self.core(self.qkv(self.norm(x))))
        return F.dropout(y, 0.1, self.training)


class AttentionCore(nn.Module):
    """Attention proper, a module so that its result can be watched."""

    def forward(self, qkv: Tensor) -> Tensor:
        """Split the heads, attend causally, join the heads."""
        batch, tokens, _ = qkv.shape
        q, k, v = qkv.view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, WIDTH)


class FeedForward(nn.Module):
    """Norm, up, GELU, down."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states to what the residual stream gains."""
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return F.dropout(y, 0.1, self.training)


class Layer(nn.Module):
    """A transformer layer whose two halves are called as functions, so that each can be wrapped as one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = Attention(), FeedForward()
        self.halves: list[Callable[[Tensor], Tensor]] = [self.attention, self.feed]

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        for half in self.halves:
            x = x + half(x)
        return x


class Model(nn.Module):
    """A byte-level GPT of identical layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the next-byte loss of (batch, tokens + 1) ids."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


# ---------------------------------------------------------------- modes


def _link(model: Model) -> None:
    for first, second in pairwise(model.layers):
        SwapManager().set_forward_prefetch_layer(first, second)


def _each_layer(wrap: Callable[[nn.Module], object]) -> Callable[[Model], None]:
    def apply(model: Model) -> None:
        for layer in model.layers:
            wrap(layer)

    return apply


def _each_function(wrap: Callable[[Any], Any]) -> Callable[[Model], None]:
    def apply(model: Model) -> None:
        for layer in model.layers:
            assert isinstance(layer, Layer)
            layer.halves = [_as_function(wrap, layer.attention), _as_function(wrap, layer.feed)]

    return apply


def _as_function(wrap: Callable[[Any], Any], module: nn.Module) -> Any:
    def call(x: Tensor) -> Any:
        return module(x)

    return wrap(call)


def _chained(apply: Callable[[Model], None]) -> Callable[[Model], None]:
    def both(model: Model) -> None:
        apply(model)
        _link(model)

    return both


def _recompute(part: Any) -> Any:
    return checkpoint_wrapper(part)


def _save(part: Any) -> Any:
    return checkpoint_wrapper(part, save_matmuls_and_attention())


def _swap(part: Any) -> Any:
    return checkpoint_wrapper(part, swap_matmuls_and_attention(), swap_inputs=True)


def _wide_only(tensor: Tensor) -> CheckpointPolicy:
    """Send away what is wider than the hidden state, keep the rest."""
    wide = tensor.untyped_storage().nbytes() > STATE_BYTES
    return CheckpointPolicy.MUST_SWAP if wide else CheckpointPolicy.MUST_SAVE


@dataclass(frozen=True)
class Mode:
    """How a mode wraps the model, and which bytes it should move.

    Args:
        moves: picks the eligible ones among a layer's watched values by (name, bytes); None if nothing moves.
    """

    apply: Callable[[Model], None]
    moves: Callable[[str, int], bool] | None = None


_OPERATORS = {"input", "qkv", "core", "out", "up"}
_FUNCTION_OPERATORS = {
    "input",
    "middle",
    "qkv",
    "core",
    "up",
}  # out is a wrapped function's last linear: nobody needs it
MODES: dict[str, Mode] = {
    "none": Mode(lambda model: None),
    "recompute": Mode(_each_layer(_recompute)),
    "funcrecompute": Mode(_each_function(_recompute)),
    "save": Mode(_each_layer(_save)),
    "funcsave": Mode(_each_function(_save)),
    "swap": Mode(_chained(_each_layer(_swap)), lambda name, size: name in _OPERATORS),
    "funcswap": Mode(_chained(_each_function(_swap)), lambda name, size: name in _FUNCTION_OPERATORS),
    "swap_wrapper": Mode(_chained(_each_layer(swap_wrapper)), lambda name, size: True),
    "swap_with_policy": Mode(
        _chained(_each_layer(lambda layer: swap_wrapper(layer, _wide_only))), lambda name, size: size > STATE_BYTES
    ),
}
# Self-check 2 calls its modes none, swap and swap_with_policy; its swap is a swap_wrapper.
CHECKS: dict[str, dict[str, str]] = {
    "selfcheck-1": {
        name: name for name in ("none", "recompute", "funcrecompute", "save", "funcsave", "swap", "funcswap")
    },
    "selfcheck-2": {"none": "none", "swap": "swap_wrapper", "swap_with_policy": "swap_with_policy"},
}


# ---------------------------------------------------------------- one mode, in its own process


@dataclass
class Watch:
    """Weak references to a layer's values: alive after forward means held by somebody."""

    seen: list[tuple[str, int, StorageWeakRef]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)

    def note(self, name: str, tensor: Tensor) -> None:
        """Remember a value's storage by weak reference."""
        storage = tensor.untyped_storage()
        self.seen.append((name, storage.nbytes(), StorageWeakRef(storage)))

    def attach(self, model: Model) -> None:
        """Hang hooks on the sub-modules that make the values; they hold no tensor."""
        for layer in model.layers:
            assert isinstance(layer, Layer)
            parts = {
                "qkv": layer.attention.qkv,
                "core": layer.attention.core,
                "out": layer.attention.out,
                "up": layer.feed.up,
            }
            for name, part in parts.items():
                self.handles.append(part.register_forward_hook(lambda m, a, out, name=name: self.note(name, out)))
            self.handles.append(layer.attention.norm.register_forward_pre_hook(lambda m, a: self.note("input", a[0])))
            self.handles.append(layer.feed.norm.register_forward_pre_hook(lambda m, a: self.note("middle", a[0])))

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def released(self, wanted: Callable[[str, int], bool]) -> tuple[int, int]:
        """Return (bytes gone, bytes in all) of the watched values that ``wanted(name, bytes)`` picks."""
        picked = [(size, ref.expired()) for name, size, ref in self.seen if wanted(name, size)]
        return sum(size for size, gone in picked if gone), sum(size for size, _ in picked)


@dataclass(frozen=True)
class ChildResult:
    """What one mode measured.

    Args:
        losses: the loss of each step as ``float.hex``.
        peak_bytes: most bytes of the last step.
        kept_bytes: bytes alive when its forward has ended, beyond those before it.
        backward_flops: operations of a backward; less those of the plain model they are the recompute.
        swapped_bytes: bytes it sent to the lower tier.
        eligible_bytes: bytes it would send if the last layer went too.
        watched_bytes: bytes of the values under watch that it should send.
        released_bytes: of those, bytes whose storages were gone when forward had ended.
    """

    losses: list[str]
    peak_bytes: int
    kept_bytes: int
    backward_flops: int
    swapped_bytes: int
    eligible_bytes: int
    watched_bytes: int
    released_bytes: int


def _tokens(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 256, (BATCH, TOKENS + 1), generator=draw).to(training_device())


def _saved_bytes(mode: Mode) -> int:
    """Count what plain autograd saves inside the layers and the mode picks: unique storages, no parameters."""
    model = Model().to(training_device())
    skip = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        return tensor

    x = model.embed(_tokens(0)[:, :-1])
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in model.layers:
            x = layer(x)
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
    least = 65536
    assert mode.moves is not None
    return sum(n for at, n in found.items() if at not in skip and n >= least and mode.moves("saved", n))


def _model(mode: Mode) -> Model:
    torch.manual_seed(0)
    SwapManager().reset()
    model = Model().to(training_device())
    mode.apply(model)
    return model


def run_child(name: str) -> ChildResult:
    """Train three steps in one mode and measure the later ones; meant for a process of its own.

    Sets torch to one compute thread and to deterministic kernels: modes are compared bit by bit.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    mode = MODES[name]
    model = _model(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses: list[str] = []

    def forward(number: int) -> Tensor:
        with record_function("forward"):
            loss: Tensor = model(_tokens(number))
        losses.append(float(loss.detach()).hex())
        return loss

    forward(0).backward()
    _advance(optimizer)
    flops = backward_flops(forward(1))
    _advance(optimizer)
    watch, counts, before = Watch(), [0, 0], SwapManager().traffic.out_bytes
    watch.attach(model)

    def last_step() -> None:
        loss = forward(2)
        counts[:] = watch.released(mode.moves or (lambda name, size: True))
        loss.backward()

    curve = memory_curve(last_step)
    watch.detach()
    released, watched = counts
    return ChildResult(
        losses=losses,
        peak_bytes=curve.peak_bytes,
        kept_bytes=_at_end_of(curve, "forward"),
        backward_flops=flops,
        swapped_bytes=SwapManager().traffic.out_bytes - before,
        eligible_bytes=_saved_bytes(mode) if name in CHECKS["selfcheck-2"].values() and mode.moves else watched,
        watched_bytes=watched,
        released_bytes=released,
    )


def _advance(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _at_end_of(curve: MemoryCurve, phase: str) -> int:
    end = next(p.end for p in curve.phases if p.name == phase)
    return [size for when, size in curve.points if when <= end][-1]


def _spawn(name: str) -> ChildResult:
    command = [sys.executable, "-m", "lowtide.selfcheck", "--child", name]
    # CUDA's matrix products are deterministic only with a workspace of this size.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603 - our own interpreter
    if done.returncode != 0:
        raise RuntimeError(
            f"selfcheck mode {name}: expected exit code 0, got {done.returncode}.\n{done.stderr[-4000:]}"
        )
    return ChildResult(**loads(done.stdout.splitlines()[-1]))


# ---------------------------------------------------------------- verdict


def judge(results: dict[str, ChildResult]) -> list[str]:
    """Return every demand of U14 and U15 that the results break, as sentences; empty if all hold."""
    broken: list[str] = []
    none = results["none"]
    peak = {name: result.peak_bytes for name, result in results.items()}
    for name, result in results.items():
        for number, (want, got) in enumerate(zip(none.losses, result.losses, strict=True), 1):
            if want != got:
                broken.append(f"{name}: loss of step {number} is {got}, expected {want} as in none")
        if name != "none" and not peak[name] < peak["none"]:
            broken.append(f"{name}: peak {peak[name]:,} bytes, expected less than none's {peak['none']:,}")
        if MODES[name].moves is not None:
            broken += _moved(name, result)
    for swap, recompute in (("swap", "recompute"), ("funcswap", "funcrecompute")):
        if abs(peak[swap] - peak[recompute]) > CLOSE * peak["none"]:
            gap = abs(peak[swap] - peak[recompute]) / peak["none"]
            broken.append(f"{swap} and {recompute}: peaks differ by {gap:.1%} of none's, expected at most {CLOSE:.0%}")
    if not peak["swap_with_policy"] > peak["swap_wrapper"]:
        least = f"expected more than swap's {peak['swap_wrapper']:,}"
        broken.append(f"swap_with_policy: peak {peak['swap_with_policy']:,} bytes, {least}")
    return broken


def _moved(name: str, result: ChildResult) -> Iterator[str]:
    shares = {
        "moved": result.swapped_bytes / result.eligible_bytes,
        "released": result.released_bytes / result.watched_bytes,
    }
    for what, share in shares.items():
        if share < MOVED_AT_LEAST:
            yield f"{name}: {share:.0%} of the eligible bytes were {what}, expected at least {MOVED_AT_LEAST:.0%}"


def _records(results: dict[str, ChildResult]) -> list[Record]:
    records: list[Record] = []
    plain = results["none"].backward_flops
    for check, modes in CHECKS.items():
        for mode, key in modes.items():
            result = results[key]
            records += [
                Record("selfcheck", check, mode, f"loss_step_{number}", loss, "float.hex")
                for number, loss in enumerate(result.losses, 1)
            ]
            for metric, value, unit in (
                ("peak_bytes", result.peak_bytes, "B"),
                ("kept_bytes", result.kept_bytes, "B"),
                ("recomputed_flops", result.backward_flops - plain, "FLOP"),
                ("swapped_bytes", result.swapped_bytes, "B"),
            ):
                records.append(Record("selfcheck", check, mode, metric, value, unit))
    return records


def _print(console: Console, results: dict[str, ChildResult], broken: list[str]) -> None:
    mib, none = 1 << 20, results["none"]
    for check, modes in CHECKS.items():
        table = Table(
            "mode", "losses equal none", "peak", "of none", "kept", "recomputed", "swapped", "moved", title=check
        )
        for mode, key in modes.items():
            r = results[key]
            table.add_row(
                mode,
                "yes" if r.losses == none.losses else "[bold red]no[/]",
                f"{r.peak_bytes / mib:.1f} MiB",
                f"{r.peak_bytes / none.peak_bytes:.0%}",
                f"{r.kept_bytes / mib:.1f} MiB",
                f"{(r.backward_flops - none.backward_flops) / 1e9:.1f} GF",
                f"{r.swapped_bytes / mib:.1f} MiB",
                f"{r.swapped_bytes / r.eligible_bytes:.0%}" if MODES[key].moves else "",
            )
        console.print(table)
    for sentence in broken:
        console.print(f"[bold red]broken[/] {sentence}")
    console.print("Training is the same and memory falls." if not broken else f"{len(broken)} demands are broken.")


def run(json: Path | None) -> int:
    """Run every mode in a process of its own, two at a time, print the table, write the records.

    Costs about half a minute on two cores and 300 MB.

    Args:
        json: where to write the records, or None.

    Returns:
        0 if every demand of :func:`judge` holds, 1 if not.

    Raises:
        RuntimeError: a mode's process failed; the message ends with what it printed.
    """
    console = Console()
    with console.status("training in every mode"), ThreadPoolExecutor(max_workers=2) as pool:
        results = dict(zip(MODES, pool.map(_spawn, MODES), strict=True))
    broken = judge(results)
    _print(console, results, broken)
    if json is not None:
        write_records(json, _records(results))
    return 1 if broken else 0


def main() -> int:
    """Run the whole check, or with ``--child MODE`` one mode, whose result is the last line printed."""
    parser = argparse.ArgumentParser(prog="lowtide.selfcheck")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--child", choices=list(MODES), default=None)
    chosen = parser.parse_args()
    if chosen.child is None:
        return run(chosen.json)
    sys.stdout.write(dumps(asdict(run_child(chosen.child))) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
