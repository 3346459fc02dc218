"""How a step that goes on beside the loop ends: well, badly, dropped, interrupted; and whose thread it is in."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import StateError
from lowtide.optim import arriving, beside, late
from lowtide.optim.arriving import ArrivingParameter
from lowtide.optim.cpu import CpuOptimizer

from .kit import OPTIMIZERS, assert_same_bits, backward, net, weights
from .late_kit import Gate, adamw, cpu_optimizer, held_step, stepped, x_of

# ---- ends ------------------------------------------------------------------------------------------


def _stepped_once() -> nn.Module:
    model = net(torch.bfloat16)
    optimizer = adamw(model, overlap=False)
    backward(model, 0)
    optimizer.step()
    return model


class Brings(torch.autograd.Function):
    """Brings a parameter a gradient without a look at its elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, grad.new_ones(ctx.shape)


@pytest.mark.values
@pytest.mark.parametrize("forgets", [False, True])
def test_a_step_that_fails_says_so_to_whoever_uses_what_it_did_not_reach_and_goes_on(
    gate: Gate, *, forgets: bool
) -> None:
    def begun(*, overlap: bool) -> Any:
        model = net(torch.bfloat16)
        optimizer = adamw(model, overlap=overlap)
        for step in range(2):
            backward(model, step)
            if overlap and step == 1:
                gate.close()
                gate.fails = "parameter 2 of group 0"
            optimizer.step()
        return model, optimizer

    expected_model, expected = begun(overlap=False)
    model, optimizer = begun(overlap=True)
    before = weights(_stepped_once())
    assert gate.reached.wait(60)
    if forgets:
        optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(StateError, match="failed"):
            model[2].weight.sum()
    with pytest.raises(StateError, match="MemoryError: no room"):
        model(x_of(model).bfloat16())
    model[0].weight.sum()  # this one was reached
    out = Brings.apply(torch.ones(3, dtype=torch.bfloat16, requires_grad=True), model[2].bias)  # type: ignore[no-untyped-call]
    with pytest.raises(StateError, match="failed"):
        out.sum().backward()
    with pytest.raises(StateError, match=r"wait\(\)"):
        optimizer.wait()
    optimizer.wait()  # it has said so
    gate.fails = None
    if forgets:
        # The first was under way when the third was asked for, which failed.
        assert_same_bits(weights(expected_model)[:1], weights(model)[:1])
        assert_same_bits(before[1:], weights(model)[1:])
    else:
        optimizer.step()
        assert_same_bits(weights(expected_model), weights(model))
        assert_same_bits(expected.state_dict(), optimizer.state_dict())


@pytest.mark.values
def test_waiting_that_is_interrupted_can_be_done_again(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    expected_model, expected = stepped(net, None)
    model, optimizer = stepped(net, gate)
    with monkeypatch.context() as patch:
        patch.setattr(late._Batch, "error", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.wait()
    assert not gate.is_open
    assert type(model[4].weight) is ArrivingParameter
    assert_same_bits(weights(expected_model), weights(model))
    assert_same_bits(expected.state_dict(), optimizer.state_dict())


def _interrupted(self: Any) -> None:
    raise KeyboardInterrupt


def test_an_optimizer_that_is_dropped_while_its_step_goes_on_has_stepped_and_nothing_keeps_its_memory(
    gate: Gate,
) -> None:
    expected = weights(stepped(net, None)[0])
    model, optimizer = stepped(net, gate)
    master = weakref.ref(optimizer._rows[0].master)
    ghost = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ghost() is None
    assert_same_bits(expected, weights(model))
    model(x_of(model))  # and the hook of all modules goes with its end
    gc.collect()
    assert master() is None


def test_a_model_that_nobody_reads_again_is_freed(gate: Gate) -> None:
    model, optimizer = stepped(net, gate)
    gate.opened.set()
    optimizer._late._going_on[0].join()
    ghosts = [weakref.ref(p) for p in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        optimizer.wait()
        del model, optimizer
        assert [ghost() for ghost in ghosts] == [None] * 6
    finally:
        gc.enable()


@pytest.mark.values
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_that_is_called_again_steps_nothing_twice(gate: Gate, *, offload: bool, overlap: bool) -> None:
    ends = []
    for fails in (False, True):
        model = net(torch.bfloat16)
        optimizer = adamw(model, grad_offload=offload, overlap=overlap)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            if fails and step == 1:
                gate.fails = "parameter 2 of group 0"
                row = optimizer._rows[2]
                plain, row.share = row.share, functools.partial(_no_room, overlap, row.share)  # type: ignore[method-assign]
                for _ in range(2):
                    with pytest.raises((StateError, MemoryError)):
                        _stepped_to_its_end(optimizer)
                gate.fails, row.share = None, plain  # type: ignore[method-assign]
            optimizer.step()
        optimizer.wait()
        ends.append((weights(model), optimizer.state_dict()))
    assert_same_bits(ends[0], ends[1])


def _stepped_to_its_end(optimizer: CpuOptimizer) -> None:
    optimizer.step()
    optimizer.wait()


def _no_room(overlap: bool, share: Callable[[], Any]) -> Any:  # noqa: FBT001
    if overlap:
        return share()  # the gate raises
    raise MemoryError


@pytest.mark.values
def test_what_was_reached_before_a_failure_has_arrived_when_the_failure_is_told(gate: Gate) -> None:
    model = net()
    optimizer = adamw(model)
    backward(model, 0)
    optimizer.step()
    backward(model, 1)
    gate.close()
    gate.fails = "parameter 1 of group 0"
    optimizer.step()
    assert gate.reached.wait(60)
    optimizer._late._going_on[0].want(4)  # out of turn: before the one that fails
    with pytest.raises(StateError):
        optimizer.wait()
    assert gate.order[:2] == [["parameter 0 of group 0"], ["parameter 4 of group 0"]]
    model(x_of(model)).sum()  # on the simulated device a race would be seen


def test_a_failure_is_told_where_a_parameter_is_used_and_by_no_other_module(gate: Gate) -> None:
    model = net()
    optimizer = adamw(model)
    backward(model, 0)
    optimizer.step()
    backward(model, 1)
    gate.fails = "parameter 2 of group 0"
    optimizer.step()
    optimizer._late._going_on[0].join()
    nn.Linear(3, 3)(torch.ones(1, 3))
    with pytest.raises(StateError, match="MemoryError"):
        optimizer.zero_grad(set_to_none=False)
    with pytest.raises(StateError, match="MemoryError"):
        model(x_of(model))
    with pytest.raises(StateError, match="MemoryError"):
        optimizer.wait()


@pytest.mark.values
@pytest.mark.parametrize("offload", [False, True])
def test_of_two_optimizers_over_the_same_parameters_each_ends_its_own_step(gate: Gate, *, offload: bool) -> None:
    ends = []
    for held in (None, gate):
        model = net()
        made = [adamw(model, grad_offload=False, overlap=held is not None) for _ in range(2)]
        for step in range(4):
            model.zero_grad()
            backward(model, step)
            held_step(made[0], held)
            made[1].step()
            if held is not None:
                held.close()
                made[0].wait() if offload else made[0].state_dict()
        ends.append(model(x_of(model)))
        for one in made:
            one.wait()
    assert_same_bits(ends[0], ends[1])


def test_an_arrival_ends_no_other_one() -> None:
    class Never:
        def wait(self) -> None:
            raise AssertionError

    parameter, first, second = nn.Parameter(torch.ones(2)), Never(), Never()
    arriving.expect(parameter, first)
    arriving.expect(parameter, second)
    arriving.end_arrival(parameter, first)
    assert type(parameter) is ArrivingParameter
    arriving.end_arrival(parameter, second)
    assert type(parameter) is nn.Parameter
    assert not vars(parameter)


@pytest.mark.values
def test_where_no_thread_can_be_started_nothing_has_changed(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for held in (None, gate):
        model = net()
        optimizer = adamw(model, overlap=held is not None)
        for step in range(3):
            backward(model, step)
            if held is not None and step == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(beside.ThreadPoolExecutor, "submit", _no_thread)
                    with pytest.raises(RuntimeError, match="can't start new thread"):
                        optimizer.step()
                assert all(type(p) is nn.Parameter for p in model.parameters())
            optimizer.step()
        ends.append((weights(model), optimizer.state_dict()))
    assert_same_bits(ends[0], ends[1])


def _no_thread(*_: Any) -> Any:
    raise RuntimeError("can't start new thread")


@pytest.mark.values
def test_where_the_begin_is_interrupted_the_step_can_be_made_again(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for held in (None, gate):
        model = net()
        optimizer = adamw(model, overlap=held is not None)
        for step in range(3):
            backward(model, step)
            if held is not None and step == 1:
                left = iter(range(3))

                def expects(*args: Any, left: Iterator[int] = left) -> None:
                    if next(left, None) is None:
                        raise KeyboardInterrupt
                    arriving.expect(*args)

                with monkeypatch.context() as patch:
                    patch.setattr(late, "expect", expects)
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.step()
                assert all(type(p) is nn.Parameter for p in model.parameters())
            optimizer.step()
        ends.append((weights(model), optimizer.state_dict()))
    assert_same_bits(ends[0], ends[1])


def test_nothing_is_stepped_before_every_parameter_waits(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = adamw(model)
    stepped_early = []

    def expects(*args: Any) -> None:
        arriving.expect(*args)
        stepped_early.append(gate.reached.wait(0.05))

    monkeypatch.setattr(late, "expect", expects)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    optimizer.wait()
    assert stepped_early == [False] * 6
    assert gate.reached.is_set()


class Learned(torch.optim.SGD):
    """Asks a module in its step, as learned optimizers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.scale = nn.Linear(1, 1, bias=False, device="cpu")
        nn.init.constant_(self.scale.weight, 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    factor = self.scale(torch.ones(1, device="cpu")).item()
                    parameter.add_(parameter.grad, alpha=-group["lr"] * factor)


@pytest.mark.values
def test_a_class_may_have_modules_of_its_own(gate: Gate) -> None:
    ends = []
    for held in (None, gate):
        model = net()
        optimizer = cpu_optimizer(Learned(model.parameters(), lr=0.1), overlap=held is not None)
        for step in range(3):
            backward(model, step)
            optimizer.step()
        assert held is None or optimizer.report().late_parameters == 6
        ends.append(weights(model))
        optimizer.wait()
    assert_same_bits(ends[0], ends[1])


@pytest.mark.parametrize("asks", ["parameter", "optimizer"])
def test_a_finalizer_on_the_step_s_thread_is_told_and_the_step_goes_on(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    expected = weights(stepped(net, None)[0])
    told: list[BaseException] = []
    model, optimizer = stepped(net, gate)
    assert gate.reached.wait(60)
    plain = late.step_rows

    def collects(rows: Any, worker: Any) -> None:
        plain(rows, worker)
        try:  # what a __del__ would do
            model[4].bias.sum() if asks == "parameter" else optimizer.wait()
        except StateError as error:
            told.append(error)

    monkeypatch.setattr(late, "step_rows", collects)
    optimizer.wait()
    assert told
    assert all("a step waits for itself" in str(error) for error in told)
    assert_same_bits(expected, weights(model))


# ---- the thread is not the caller's --------------------------------------------------------------------


@pytest.mark.values
def test_under_autocast_a_step_is_made_at_once_and_counted() -> None:
    ends = []
    for overlap in (False, True):
        model = net()
        optimizer = cpu_optimizer(OPTIMIZERS["adafactor"](list(model.parameters())), overlap=overlap)
        for step in range(3):
            backward(model, step)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                optimizer.step()
            optimizer.zero_grad()
        ends.append((weights(model), optimizer.state_dict()))
    assert_same_bits(ends[0], ends[1])
    assert "step() waits for 6 parameters: it was called under autocast" in optimizer.report().notes[0]


@pytest.mark.values
@pytest.mark.parametrize("flushes", [False, True])
def test_denormal_numbers_are_treated_as_where_the_step_was_called(*, flushes: bool) -> None:
    if not torch.set_flush_denormal(flushes):
        pytest.skip("this processor cannot")
    try:
        ends = []
        for overlap in (False, True):
            model = net()
            inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
            optimizer = cpu_optimizer(inner, overlap=overlap)
            for step in range(3):
                backward(model, step, 1e-37)
                optimizer.step()
                optimizer.zero_grad()
            ends.append((weights(model), optimizer.state_dict()))
        assert_same_bits(ends[0], ends[1])
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.values
def test_hyperparameters_within_others_are_those_of_the_moment_too(gate: Gate) -> None:
    ends = []
    for held in (None, gate):
        model = net()
        betas = (torch.tensor(0.9, device="cpu"), torch.tensor(0.99, device="cpu"))
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, betas=betas, foreach=False)  # type: ignore[arg-type]
        optimizer = cpu_optimizer(inner, overlap=held is not None)
        for step in range(3):
            backward(model, step)
            held_step(optimizer, held)
            betas[0].mul_(0.9)
            optimizer.zero_grad()
        ends.append(weights(model))
        optimizer.wait()
    assert_same_bits(ends[0], ends[1])


@pytest.mark.values
@pytest.mark.parametrize("name", ["sgd-fused", "adamw-fused", "adagrad", "nadam", "adafactor"])
def test_every_class_of_torch_that_keeps_to_its_groups_may_be_late(name: str) -> None:
    model = net()
    optimizer = cpu_optimizer(OPTIMIZERS[name](list(model.parameters())))
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.report().late_parameters == 6
    assert optimizer.report().notes == ()
    optimizer.wait()


def test_a_learning_rate_that_was_made_for_inference_can_be_stepped_with() -> None:
    with torch.inference_mode():
        rate = torch.tensor(0.01, device="cpu")
    for wraps in (lowtide.swap_optimizer, cpu_optimizer):
        model = net()
        optimizer = wraps(
            torch.optim.AdamW(model.parameters(), lr=rate.clone() if wraps is None else rate, foreach=False)
        )
        for step in range(2):
            backward(model, step)
            optimizer.step()
        if wraps is cpu_optimizer:
            optimizer.wait()
