"""Where an optimizer is best stepped: on the device, its state moved there and back, or on the host (O4).

Law: the choice is a function of measured rates and counted bytes, and says what it came from. The formulas are those
of the two optimizers: a swapped step takes as long as the slowest of its two directions and its arithmetic, which
overlap; a step on the host brings gradients down first, then computes while parameters go up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide import device
from lowtide.errors import ConfigError, explain
from lowtide.optim.cpu import CpuOptimizer
from lowtide.optim.kinds import kind_of
from lowtide.optim.masters import choose
from lowtide.optim.swap import SwapOptimizer, swap_optimizer
from lowtide.optim.tensors import local_part
from lowtide.optim.times import best_seconds, link_rates
from lowtide.optim.worker import Share, Worker

__all__ = ["Demand", "Placement", "Rates", "demand_of", "measure", "offload_optimizer", "place"]

Tensor = torch.Tensor

# Of a matrix large enough that an operator's call does not count.
_SIDE = 2048


@dataclass(frozen=True)
class Rates:
    """What this machine does a second: bytes down and up the link, elements stepped on the device and on the host."""

    down: float
    up: float
    device: float
    host: float


@dataclass(frozen=True)
class Demand:
    """What one step has to do: elements, and the bytes that the two ways move."""

    elements: int
    state_bytes: int  # state and masters, of all elements
    grad_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class Placement:
    """Where the step goes, the seconds that it is expected to take in either place, and why."""

    where: str
    device_seconds: float
    host_seconds: float
    reason: str


def place(demand: Demand, rates: Rates, *, grad_offload: bool) -> Placement:
    """The faster of the two ways; on a tie the device, whose bits are the plain optimizer's.

    >>> demand = Demand(elements=10**9, state_bytes=12 * 10**9, grad_bytes=2 * 10**9, parameter_bytes=2 * 10**9)
    >>> place(demand, Rates(down=5e10, up=5e10, device=1e11, host=1e9), grad_offload=False).where
    'device'
    >>> place(demand, Rates(down=5e9, up=5e9, device=1e11, host=1e9), grad_offload=False).where
    'host'
    """
    moved = max(demand.state_bytes / rates.up, demand.state_bytes / rates.down)
    on_device = max(moved, demand.elements / rates.device)
    # Offloaded gradients have come down beside backward.
    down = 0.0 if grad_offload else demand.grad_bytes / rates.down
    on_host = down + max(demand.elements / rates.host, demand.parameter_bytes / rates.up)
    where = "host" if on_host < on_device else "device"
    reason = (
        f"the step is on the {where}: {on_device * 1e3:.1f} ms expected on the device, {on_host * 1e3:.1f} ms on the "
        f"host (link {rates.down / 1e9:.1f} GB/s down, {rates.up / 1e9:.1f} up; {rates.device / 1e9:.2f} and "
        f"{rates.host / 1e9:.2f} billion elements a second)"
    )
    return Placement(where, on_device, on_host, reason)


def demand_of(optimizer: torch.optim.Optimizer, master: str | None) -> Demand:
    """What a step of ``optimizer`` has to do, by the state that its class makes for a small tensor."""
    elements = state = grads = parameters = 0
    bytes_an_element: dict[torch.dtype, float] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = local_part(parameter)
            masters = choose(local.dtype, master, "exact")
            stepped = masters.stepped or local.dtype
            if stepped not in bytes_an_element:
                bytes_an_element[stepped] = _state_bytes(optimizer, stepped)
            n = local.numel()
            elements += n
            grads += n * local.element_size()
            parameters += n * local.element_size()
            state += int(n * (bytes_an_element[stepped] + (stepped.itemsize if masters.stepped else 0)))
    return Demand(elements, state, grads, parameters)


def measure(optimizer: torch.optim.Optimizer, where: torch.device, stepped: torch.dtype) -> Rates:
    """Time the link and steps of the optimizer's class, in a second or less; ``stepped`` is the type that it steps.

    Needs 128 MiB on the device and on the host, and a tensor of four million elements with its state on both.
    """
    down, up = link_rates(where)
    elements = _SIDE * _SIDE
    return Rates(
        down=down,
        up=up,
        device=elements / _step_seconds(optimizer, where, stepped),
        host=elements / _step_seconds(optimizer, torch.device("cpu"), stepped),
    )


def _step_seconds(optimizer: torch.optim.Optimizer, where: torch.device, dtype: torch.dtype) -> float:
    share = _share(where, dtype, _SIDE)
    with device.with_default_device(where):
        return best_seconds(where, lambda: Worker(optimizer).update([share]))


def _state_bytes(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> float:
    share = _share(torch.device("cpu"), dtype, 64)
    with device.with_default_device(torch.device("cpu")):
        Worker(optimizer).update([share])
    arrays = [value for value in share.state.values() if isinstance(value, Tensor) and value.dim()]
    return sum(value.numel() * value.element_size() for value in arrays) / share.target.numel()


def _share(where: torch.device, dtype: torch.dtype, side: int) -> Share:
    return Share(
        0, torch.zeros(side, side, dtype=dtype, device=where), torch.ones(side, side, dtype=dtype, device=where)
    )


def _placed(optimizer: torch.optim.Optimizer, master: str | None, *, grad_offload: bool) -> tuple[str, str]:
    """Where the step goes, and why."""
    kind_of(optimizer, elementwise=None, where="offload_optimizer")
    first = local_part(optimizer.param_groups[0]["params"][0])
    if not device.is_accelerator(first.device):
        return "device", "the step stays where the parameters are: without an accelerator, that is the host"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "device", "the step is on the device: capturable=True asks for that"
    stepped = choose(first.dtype, master, "exact").stepped or first.dtype
    rates = measure(optimizer, first.device, stepped)
    found = place(demand_of(optimizer, master), rates, grad_offload=grad_offload)
    return found.where, found.reason


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    step: str = "auto",
    master: str | None = "fp32",
    grad_offload: bool = False,
    overlap: bool = False,
) -> SwapOptimizer | CpuOptimizer:
    """Keep an optimizer's masters and state in host memory, and step on the device or on the host, as is faster (O4).

    Effect: what :func:`lowtide.swap_optimizer` or :func:`lowtide.cpu_optimizer` gives; ``report().notes`` of it says
    which, and why. Cost: with ``"auto"`` up to a second for timing the link and the optimizer's step in both places.

    Hazard: with ``"auto"`` the bits depend on the machine's speed: a step on the host has other kernels. Say ``step``
    to repeat a run. Every process decides for itself: say it where several shall do the same.

    Args:
        optimizer: an instance of a ``torch.optim`` optimizer, before or after its first step. Its state moves over.
        step: ``"device"``, ``"host"``, or ``"auto"``: the faster by measured rates. Without an accelerator, the device.
        master: ``"fp32"``: parameters of 16 bits are stepped through a float32 master. None: in their own type.
        grad_offload: whether gradients leave in backward for a step on the host. Where the step is on the device they
            stay, and the report says so.
        overlap: whether what a step does reaches into the backward before and the forward after it, as the two have it.

    Raises:
        ConfigError: an argument has a wrong value, or gradients are to leave for a step on the device.
        UnsupportedError, CapacityError, StateError: as the two.

    >>> import torch, lowtide
    >>> layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    >>> optimizer = lowtide.offload_optimizer(torch.optim.AdamW(layer.parameters()))
    >>> optimizer.report().notes
    ('the step stays where the parameters are: without an accelerator, that is the host',)
    """
    if step not in {"auto", "device", "host"}:
        raise _wrong("step has no such value", "'auto', 'device' or 'host'", repr(step), "Correct it.")
    if step == "device" and grad_offload:
        raise _wrong(
            "gradients leave for where they are used",
            "step='host' or 'auto'",
            "grad_offload=True with step='device'",
            "Leave grad_offload out, or step on the host.",
        )
    reason = None
    if step == "auto":
        step, reason = _placed(optimizer, master, grad_offload=grad_offload)
    made: SwapOptimizer | CpuOptimizer
    if step == "host":
        made = CpuOptimizer(optimizer, master=master, grad_offload=grad_offload, overlap=overlap)
    else:
        made = swap_optimizer(optimizer, master=master, overlap=overlap)
    if reason is not None:
        made.notes.append(reason)
        if grad_offload and step == "device":
            made.notes.append("gradients stay on the device, where they are used: grad_offload has no effect")
    return made


def _wrong(problem: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(explain(problem, expected=expected, got=got, where="offload_optimizer", remedy=remedy))
