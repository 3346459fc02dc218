"""A gradient that has left the device is what it was to everyone who looks at ``parameter.grad``, or raises (O4)."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.errors import StateError, UnsupportedError
from lowtide.optim import cpu
from lowtide.optim.cpu import CpuOptimizer
from lowtide.optim.stand_in import LeftGradient

from .kit import OPTIMIZERS, assert_same_bits, backward, net, weights

cpu_optimizer = functools.partial(cpu.cpu_optimizer, grad_offload=True)

NAMES = ["adamw", "adamw-fused", "sgd"]


def pair(name: str) -> list[tuple[Any, Any]]:
    made = []
    for wraps in (False, True):
        model = net()
        # One by one, as on the host: a foreach step of a device has other kernels.
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        made.append((model, cpu_optimizer(optimizer) if wraps else optimizer))
    return made


def compare(pairs: list[tuple[Any, Any]]) -> None:
    (plain_model, plain), (model, optimizer) = pairs
    assert_same_bits(weights(plain_model), weights(model), "weights")
    if isinstance(plain, torch.optim.AdamW) and weights(model)[0].device.type != "cpu":
        return  # where step counts lie is not the same
    assert_same_bits(plain.state_dict()["state"], optimizer.state_dict()["state"], "state")


@pytest.mark.values
@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_the_clipping_of_torch_over_three_backwards_gives_its_bits(name: str, kind: float) -> None:
    pairs = pair(name)
    norms: list[list[Any]] = [[], []]
    for (model, optimizer), found in zip(pairs, norms, strict=True):
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(3):
                backward(model, 10 * step + micro)
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, kind))
            optimizer.step()
    assert all(norm > 0 for norm in norms[1])
    assert_same_bits(*norms)
    compare(pairs)


@pytest.mark.values
def test_clipping_by_value_gives_its_bits() -> None:
    pairs = pair("sgd")
    for model, optimizer in pairs:
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            nn.utils.clip_grad_value_(model.parameters(), 1e-4)
            optimizer.step()
    compare(pairs)


@pytest.mark.values
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("growth", [2.0, 3.0])
def test_a_gradient_scaler_that_skips_steps_gives_its_bits(name: str, growth: float) -> None:
    pairs = pair(name)
    where = weights(pairs[0][0])[0].device.type
    scales: list[list[float]] = [[], []]
    for (model, optimizer), found in zip(pairs, scales, strict=True):
        scaler = torch.amp.GradScaler(where, init_scale=16.0, growth_factor=growth, growth_interval=2)
        for step in range(7):
            optimizer.zero_grad()
            factor = float("inf") if step in {2, 4} else 1.0
            backward(model, step, factor, scale=scaler.scale)
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
    assert scales[0] == scales[1]
    assert min(scales[1]) < 16.0
    compare(pairs)


@pytest.mark.values
@pytest.mark.parametrize("to_none", [True, False])
def test_a_backward_that_the_model_itself_forgets_is_forgotten(*, to_none: bool) -> None:
    pairs = pair("sgd")
    for model, optimizer in pairs:
        for step in range(4):
            backward(model, 50 + step, 1e6)
            model.zero_grad(set_to_none=to_none)
            if step != 2:
                backward(model, step)
            optimizer.step()
            model.zero_grad(set_to_none=to_none)
    compare(pairs)


@pytest.mark.values
@pytest.mark.parametrize("own", [True, False])
def test_a_grad_that_is_set_to_none_or_by_hand_is_what_is_clipped_and_stepped(*, own: bool) -> None:
    pairs = pair("adamw")
    for model, optimizer in pairs:
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            if step % 2:
                model[2].weight.grad = None
            if step == 2:
                model[0].bias.grad = torch.full_like(model[0].bias, 0.5)
            if own and isinstance(optimizer, CpuOptimizer):
                optimizer.clip_grad_norm_(0.05)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    compare(pairs)


@pytest.mark.values
def test_gradients_can_be_read_edited_and_copied() -> None:
    pairs = pair("sgd")
    read = []
    for model, optimizer in pairs:
        optimizer.zero_grad()
        backward(model, 0)
        grad = model[0].weight.grad
        grad.mul_(0.5).add_(1.0).clamp_(max=1.001)
        grad[3].zero_() if not isinstance(grad, LeftGradient) else grad.copy_(zeroed(grad))
        read.append([grad.abs().max(), grad.clone(), torch.isfinite(grad).all().int(), copy.deepcopy(grad), grad.sum()])
        optimizer.step()
    assert_same_bits(*read)
    assert not isinstance(read[1][1], LeftGradient)
    compare(pairs)


def zeroed(grad: torch.Tensor) -> torch.Tensor:
    made = grad.clone()
    made[3].zero_()
    return made


@pytest.mark.values
def test_a_backward_with_a_graph_of_its_own_is_added_too() -> None:
    pairs = pair("sgd")
    for model, optimizer in pairs:
        backward(model, 0)
        x = torch.ones(2, 301)
        loss = model(x).square().mean()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the cycle, once a process
            loss.backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits(weights(pairs[0][0]), weights(pairs[1][0]))


def test_what_was_used_up_or_has_gone_with_its_optimizer_raises() -> None:
    model = net()
    optimizer: CpuOptimizer | None = cpu_optimizer(OPTIMIZERS["sgd"](list(model.parameters())))
    assert optimizer is not None
    backward(model, 0)
    kept = model[0].weight.grad
    assert isinstance(kept, LeftGradient)
    assert "parameter 0" in repr(kept)
    optimizer.step()
    with pytest.raises(StateError, match="used this gradient up"):
        kept.norm()
    backward(model, 1)
    with pytest.raises(UnsupportedError, match="cannot write"):
        torch.add(kept, 1.0, out=kept)
    del optimizer
    gc.collect()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(StateError, match="went with its optimizer"):
        kept.norm()
    backward(model, 2)
    assert type(model[0].weight.grad) is torch.Tensor


@pytest.mark.values
def test_a_norm_of_sixteen_bits_is_that_of_the_sum_in_float32() -> None:
    model = net(torch.bfloat16)
    optimizer = cpu_optimizer(OPTIMIZERS["sgd"](list(model.parameters())))
    for micro in range(3):
        backward(model, micro)
    value = optimizer._by_id[id(model[0].weight)].gradient.value()
    norm = torch.linalg.vector_norm(model[0].weight.grad)
    assert norm.dtype is torch.float32
    assert_same_bits(torch.linalg.vector_norm(value), norm.cpu())
    read = model[0].weight.grad.clone()
    assert_same_bits(value.to(torch.bfloat16).view(read.shape), read.cpu())


@pytest.mark.values
@pytest.mark.parametrize("steps", [True, False])
def test_another_optimizer_over_the_same_parameters_takes_their_gradients_over(*, steps: bool) -> None:
    plain_model, model = net(), net()
    first = cpu_optimizer(OPTIMIZERS["sgd"](list(model.parameters())))
    before = OPTIMIZERS["sgd"](list(plain_model.parameters()))
    for m, o in ((plain_model, before), (model, first)):
        backward(m, 0)
        if steps:
            o.step()
            o.zero_grad()
    plain, second = OPTIMIZERS["sgd"](list(plain_model.parameters())), OPTIMIZERS["sgd"](list(model.parameters()))
    second = cpu_optimizer(second)
    for m, o in ((plain_model, plain), (model, second)):
        backward(m, 1)
        o.step()
    assert_same_bits(weights(plain_model), weights(model))
    assert first.report().steps == int(steps)
