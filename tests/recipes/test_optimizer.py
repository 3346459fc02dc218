"""The optimizer's part of a configuration: swapped state, a residual instead of masters, or both (O1-O3, P1)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import CpuOptimizer, MemoryConfig, SwapOptimizer
from lowtide.demo.model import GPT, Shape
from lowtide.errors import CapacityError, ConfigError
from lowtide.integrations.session import TrainingCallback

LAYERS = 3


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(LAYERS))).to(
        dtype
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        data = torch.randn(5, 64, generator=torch.Generator().manual_seed(step), device="cpu")
        parameter = next(model.parameters())
        loss = model(data.to(parameter.device, parameter.dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses


@pytest.mark.parametrize(
    "fields",
    [
        {"swap_optimizer": True},
        {"swap_optimizer": True, "swap_optimizer_times": 3, "recompute_activation_function": True},
        {"swap_optimizer": True, "full_recompute_num_layers": LAYERS, "swap_inputs": True},
    ],
)
def test_layers_and_optimizer_of_one_configuration_train_with_the_same_bits(fields: dict[str, Any]) -> None:
    plain, model = build(), build()
    expected = train(plain, torch.optim.AdamW(plain.parameters()))
    inner = torch.optim.AdamW(model.parameters())
    applied = lowtide.apply(model, MemoryConfig(**fields), inner)
    assert isinstance(applied.optimizer, SwapOptimizer)
    assert "segments move" in str(applied)
    assert all(torch.equal(a, b) for a, b in zip(expected, train(model, applied.optimizer), strict=True))
    applied.undo()
    train(model, inner)  # the plain optimizer again, with its state


@pytest.mark.parametrize("swap", [False, True])
def test_a_residual_stays_or_moves_with_the_state(swap: bool) -> None:  # noqa: FBT001 - a parameter of the test
    model = build(torch.bfloat16)
    config = MemoryConfig(reuse_fp32_param=True, swap_optimizer=swap)
    applied = lowtide.apply(model, config, torch.optim.AdamW(model.parameters()))
    assert isinstance(applied.optimizer, SwapOptimizer)
    train(model, applied.optimizer)
    seen = applied.optimizer.report()
    assert (seen.moving_bytes > 0) is swap
    assert "master_param" in applied.optimizer.state_dict()["state"][0]


def test_a_residual_by_hand_gives_the_bits_of_separate_masters() -> None:
    model = build(torch.bfloat16)
    twin = copy.deepcopy(model)
    kept = lowtide.reuse_fp32_param(model, torch.optim.AdamW(model.parameters()))
    full = lowtide.swap_optimizer(torch.optim.AdamW(twin.parameters()), master="fp32")
    for a, b in zip(train(model, kept), train(twin, full), strict=True):
        assert torch.equal(a, b)


def test_what_asks_for_nothing_of_the_optimizer_gives_it_back() -> None:
    model = build()
    inner = torch.optim.AdamW(model.parameters())
    assert lowtide.apply(model, MemoryConfig(recompute_activation_function=True), inner).optimizer is inner


def test_a_model_without_layers_has_an_optimizer_all_the_same() -> None:
    model = nn.Linear(64, 64)
    applied = lowtide.apply(model, MemoryConfig(swap_optimizer=True), torch.optim.AdamW(model.parameters()))
    assert applied.rows == ()
    assert isinstance(applied.optimizer, SwapOptimizer)


def test_what_cannot_be_met_is_refused_before_a_layer_is_wrapped() -> None:
    model = build()
    inner = torch.optim.AdamW(model.parameters())
    both = MemoryConfig(swap_optimizer=True, recompute_activation_function=True)
    with pytest.raises(ConfigError, match=r"expected lowtide.apply\(model, config, optimizer\)"):
        lowtide.apply(model, both)
    with pytest.raises(ConfigError, match="no parameter is bfloat16"):
        lowtide.apply(model, MemoryConfig(reuse_fp32_param=True, recompute_activation_function=True), inner)
    with pytest.raises(ConfigError, match="another model"):
        lowtide.apply(build(torch.bfloat16), MemoryConfig(reuse_fp32_param=True, swap_optimizer=True), inner)
    half = build(torch.float16)
    with pytest.raises(ConfigError, match="no parameter is bfloat16"):
        lowtide.apply(half, MemoryConfig(reuse_fp32_param=True), torch.optim.AdamW(half.parameters()))
    lowtide.SwapManager().configure(host_bytes=1000)
    with pytest.raises(CapacityError, match="no room for the optimizer's state"):
        lowtide.apply(model, both, inner)
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(ConfigError, match="swap_optimizer_times would have no effect"):
        MemoryConfig(swap_optimizer_times=4, recompute_norm=True).validate()
    train(model, inner)


def test_a_trainers_callback_says_where_the_optimizer_goes() -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(optimizers="):
        TrainingCallback(swap_optimizer=True)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("grad_offload", [False, True])
@pytest.mark.parametrize("where", ["host", "auto"])
def test_a_step_on_the_host_or_where_it_is_faster_is_part_of_a_configuration(
    where: str, *, grad_offload: bool, overlap: bool
) -> None:
    plain, model = build(), build()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = MemoryConfig(
        optimizer_offload=where, grad_offload=grad_offload, optimizer_overlap=overlap, full_recompute_num_layers=1
    )
    applied = lowtide.apply(model, config, inner)
    assert isinstance(applied.optimizer, (SwapOptimizer, CpuOptimizer))
    assert (" parameters in host memory" in str(applied)) is isinstance(applied.optimizer, CpuOptimizer)
    assert where == "auto" or isinstance(applied.optimizer, CpuOptimizer)
    assert all(torch.equal(a, b) for a, b in zip(expected, train(model, applied.optimizer), strict=True))
    applied.undo()
    train(model, inner)


@pytest.mark.parametrize(
    "fields",
    [
        {"full_recompute_num_layers": 2},
        {"recompute_activation_function": True},
        {"swap_attention": True},
        {"swap_attention": True, "recompute_norm": True},
        {"recompute_method": "uniform", "full_recompute_num_layers": 2},
        {"full_recompute_num_layers": 4, "swap_layer_input": True},
    ],
)
def test_a_step_goes_on_beside_layers_of_every_treatment(fields: dict[str, Any]) -> None:
    ends = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = GPT(Shape(layers=4, heads=2, width=32, context=32, vocabulary=16)).to(torch.get_default_device())
        inner = torch.optim.AdamW(model.parameters())
        config = MemoryConfig(optimizer_offload="host", grad_offload=True, optimizer_overlap=overlap, **fields)
        optimizer = lowtide.apply(model, config, inner).optimizer
        assert isinstance(optimizer, CpuOptimizer)
        for step in range(3):
            draw = torch.Generator("cpu").manual_seed(step)
            tokens = torch.randint(0, 16, (2, 32), generator=draw, device="cpu").to(torch.get_default_device())
            for _ in range(2):
                model(tokens).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        report = optimizer.report()
        assert report.late_parameters == (report.parameters if overlap else 0), report.notes
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grad_offload": True, "recompute_norm": True}, "grad_offload would have no effect"),
        ({"optimizer_overlap": True, "reuse_fp32_param": True}, "optimizer_overlap would have no effect"),
        ({"optimizer_offload": "host", "swap_optimizer": True}, "two answers"),
        ({"optimizer_offload": "auto", "reuse_fp32_param": True}, "two answers"),
        ({"optimizer_offload": "cpu"}, "'auto' or 'host'"),
    ],
)
def test_answers_for_the_optimizer_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryConfig(**fields).validate()
