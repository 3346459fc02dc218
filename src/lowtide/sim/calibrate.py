"""What lowtide's tape costs the host, by operator: ``python -m lowtide.sim.calibrate``.

Law: measured on tensors so small that a step is all host time, wrapped and
plain steps in turn, medians of ratios. A device's description stores the ratio
times its own ``launch``, since a host that launches faster records faster too.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import checkpoint_wrapper
from lowtide.sim.describe import Description

__all__ = ["Costs", "main", "measure"]

LAYERS, WIDTH, TOKENS, WARM = 4, 8, 4, 20


class _Layer(nn.Module):
    """A Llama layer's mix of products, norms and elementwise operators; as many operators as a region usually has."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)
        )

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self._norm(x, self.norms[0])
        q, k, v = (part(y).view(1, TOKENS, 2, WIDTH // 2).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (t * 0.5 + torch.cat((-t[..., 2:], t[..., :2]), -1) * 0.5 for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.o(mixed)
        y = self._norm(x, self.norms[1])
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class _Counter(TorchDispatchMode):
    """Counts operators: all that a mode sees, and those that run a kernel, which views do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":
            self.seen += 1
            self.kernels += not func.is_view
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Costs:
    """What one operator costs on this host, in seconds.

    Args:
        plain: torch's own time of a kernel in forward, autograd and views included: what a launch costs.
        recorded: what the tape adds to every operator that it sees, views included.
        replayed: what a replayed kernel costs besides ``plain``; 0 if it costs no more.
        kernels, operators: kernels, and operators that the tape saw, of one forward.
        replays: kernels that backward ran again.
    """

    plain: float
    recorded: float
    replayed: float
    kernels: int
    operators: int
    replays: int

    @property
    def recorded_ratio(self) -> float:
        """The tape's time for an operator, of a plain kernel."""
        return self.recorded / self.plain

    @property
    def replayed_ratio(self) -> float:
        """The same for a replayed operator."""
        return self.replayed / self.plain


def _count(model: nn.Module, x: Tensor) -> tuple[_Counter, _Counter]:
    forward, backward = _Counter(), _Counter()
    with forward:
        loss = model(x).sum()
    with backward:
        loss.backward()
    return forward, backward


def _timed(model: nn.Module, x: Tensor) -> tuple[float, float]:
    begun = time.perf_counter()
    loss = model(x).sum()
    middle = time.perf_counter()
    loss.backward()
    return middle - begun, time.perf_counter() - middle


def measure(rounds: int = 400) -> Costs:
    """Time plain and wrapped steps in turn; costs seconds. Each figure is a median over the rounds."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[_Layer() for _ in range(LAYERS)])
    wrapped = copy.deepcopy(plain)
    for layer in wrapped:
        checkpoint_wrapper(layer, recompute="replay")
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    times = []
    for number in range(-WARM, rounds):
        pair = (*_timed(plain, x), *_timed(wrapped, x))
        if number == -1:
            gc.collect()
        if number >= 0:
            times.append(pair)
    forward, backward = _count(plain, x)
    replays = _count(wrapped, x)[1].kernels - backward.kernels
    own = statistics.median(seconds for seconds, _, _, _ in times) / forward.kernels
    recorded = statistics.median(w - p for p, _, w, _ in times) / forward.seen
    again = statistics.median(w - p for _, p, _, w in times) / replays
    return Costs(own, recorded, max(0.0, again - own), forward.kernels, forward.seen, replays)


def main() -> int:
    """Measure and print both costs, their ratio to a plain operator, and what a description would store."""
    torch.set_num_threads(1)
    costs = measure()
    console = Console()
    console.print(f"plain kernel: {costs.plain * 1e6:.2f} us ({costs.kernels} in a forward)")
    for name, seconds, ratio in (
        ("host_recorded", costs.recorded, costs.recorded_ratio),
        ("host_replayed", costs.replayed, costs.replayed_ratio),
    ):
        console.print(f"{name}: {seconds * 1e6:.2f} us more, {ratio:.2f} of a plain kernel")
    console.print(f"operators seen: {costs.operators}, replayed: {costs.replays}")
    for device in Description.names():
        launch = Description.named(device).launch
        console.print(
            f"{device}: host_recorded {costs.recorded_ratio * launch:.2g} s, "
            f"host_replayed {costs.replayed_ratio * launch:.2g} s at a launch of {launch:.2g} s"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
