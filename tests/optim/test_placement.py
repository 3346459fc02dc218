"""Where an optimizer is stepped follows from counted bytes and measured rates, and is said (O4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lowtide
from lowtide import CpuOptimizer, SwapOptimizer, device
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.optim import placement
from lowtide.optim.placement import Demand, Rates, demand_of, measure, place

from .kit import OPTIMIZERS, assert_same_bits, backward, net, weights

N = 10**9
ADAMW_BF16 = Demand(elements=N, state_bytes=12 * N, grad_bytes=2 * N, parameter_bytes=2 * N)


def rates(**changes: float) -> Rates:
    return Rates(**({"down": 20e9, "up": 25e9, "device": 50e9, "host": 2e9} | changes))


@pytest.mark.parametrize("grad_offload", [False, True])
def test_the_seconds_are_those_of_the_formulas(*, grad_offload: bool) -> None:
    found = place(ADAMW_BF16, rates(), grad_offload=grad_offload)
    assert found.device_seconds == 12 * N / 20e9
    assert found.host_seconds == (0 if grad_offload else 2 * N / 20e9) + N / 2e9
    assert found.where == ("host" if grad_offload else "device")
    assert "600.0 ms expected on the device" in found.reason


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({}, "device"),
        ({"down": 5e9, "up": 5e9}, "host"),
        ({"host": 20e9}, "host"),
        ({"device": 0.1e9}, "host"),
        ({"up": 100e9, "down": 12 / 6 * 10e9, "host": N / (0.5) / 1}, "device"),  # both take 600 ms
    ],
)
def test_the_faster_one_is_taken_and_the_device_on_a_tie(changes: dict[str, float], where: str) -> None:
    assert place(ADAMW_BF16, rates(**changes), grad_offload=False).where == where


@pytest.mark.parametrize(
    ("name", "dtype", "master", "state"),
    [
        ("adamw", torch.float32, "fp32", 8),
        ("adamw", torch.bfloat16, "fp32", 12),
        ("adamw", torch.bfloat16, None, 4),
        ("adamw-amsgrad", torch.bfloat16, "fp32", 16),
        ("sgd", torch.float32, None, 4),
    ],
)
def test_the_bytes_are_those_of_the_class(name: str, dtype: torch.dtype, master: str | None, state: int) -> None:
    model = net(dtype)
    n = sum(p.numel() for p in model.parameters())
    size = dtype.itemsize
    found = demand_of(OPTIMIZERS[name](list(model.parameters())), master)
    assert found == Demand(n, state * n, size * n, size * n)


def test_measuring_leaves_the_optimizer_as_it_was() -> None:
    model = net()
    where = device.training_device()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    if device.is_accelerator(where):
        found = measure(optimizer, where, torch.float32)
        assert all(value > 0 for value in vars(found).values())
    demand_of(optimizer, "fp32")
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


@pytest.mark.cpu
def test_without_an_accelerator_the_step_stays_with_the_parameters_and_says_so() -> None:
    optimizer = lowtide.offload_optimizer(OPTIMIZERS["adamw"](list(net().parameters())), grad_offload=True)
    assert isinstance(optimizer, SwapOptimizer)
    notes = optimizer.report().notes
    assert "without an accelerator" in notes[0]
    assert "grad_offload has no effect" in notes[1]


@pytest.mark.sim
@pytest.mark.values
@pytest.mark.parametrize(("host", "expected"), [(1e12, CpuOptimizer), (1.0, SwapOptimizer)])
def test_under_an_accelerator_the_rates_decide(
    monkeypatch: pytest.MonkeyPatch, host: float, expected: type[Any]
) -> None:
    where = device.training_device()
    monkeypatch.setattr(placement, "measure", lambda *_: rates(host=host))
    model, twin = net(torch.bfloat16).to(where), net(torch.bfloat16).to(where)
    optimizer = lowtide.offload_optimizer(OPTIMIZERS["sgd"](list(model.parameters())), grad_offload=True)
    assert type(optimizer) is expected
    assert "ms expected on the device" in str(optimizer.report())
    same = lowtide.offload_optimizer(
        OPTIMIZERS["sgd"](list(twin.parameters())), step="host" if expected is CpuOptimizer else "device"
    )
    for m, o in ((model, optimizer), (twin, same)):
        for step in range(3):
            o.zero_grad()
            backward(m, step)
            o.step()
    assert_same_bits(weights(model), weights(twin))


@pytest.mark.sim
def test_a_capturable_optimizer_stays_on_the_device() -> None:
    model = net().to(device.training_device())
    optimizer = lowtide.offload_optimizer(torch.optim.AdamW(model.parameters(), capturable=True))
    assert isinstance(optimizer, SwapOptimizer)
    assert "capturable" in optimizer.report().notes[0]


def test_wrong_requests_are_refused() -> None:
    model = net()
    make = OPTIMIZERS["adamw"]
    with pytest.raises(ConfigError, match="'auto', 'device' or 'host'"):
        lowtide.offload_optimizer(make(list(model.parameters())), step="gpu")
    with pytest.raises(ConfigError, match="grad_offload=True with step='device'"):
        lowtide.offload_optimizer(make(list(model.parameters())), step="device", grad_offload=True)
    with pytest.raises(UnsupportedError, match="closure"):
        lowtide.offload_optimizer(torch.optim.LBFGS(model.parameters()))
