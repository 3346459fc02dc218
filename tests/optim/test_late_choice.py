"""Which parameters are stepped before ``step()`` returns although it may go on: those that could be read unasked."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.optim.cpu import CpuOptimizer

from .kit import assert_same_bits, backward, net, weights
from .late_kit import Gate, adamw, cpu_optimizer, held_step


def _notes_and_weights(model: nn.Module, optimizer: CpuOptimizer, steps: int = 3) -> Any:
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    report = optimizer.report()
    return report.late_parameters, report.notes, weights(model)


@pytest.mark.values
def test_a_parameter_with_another_tensor_over_its_memory_is_stepped_at_once_and_counted(gate: Gate) -> None:
    ends = []
    for held in (None, gate):
        model = net()
        optimizer = adamw(model, overlap=held is not None)
        shadow, exported = model[0].weight.data, model[4].bias.untyped_storage()
        for step in range(3):
            backward(model, step)
            held_step(optimizer, held)
            optimizer.zero_grad()
        ends.append(shadow.clone())
        report = optimizer.report()
        optimizer.wait()
        del exported
    assert report.late_parameters == 4
    (note,) = report.notes
    assert note == (
        "step() waits for 2 parameters: another tensor lies over its memory (the first is parameter 0 of group 0)"
    )
    assert_same_bits(ends[0], ends[1])


@pytest.mark.cpu
@pytest.mark.parametrize("whose", ["process", "array"])
def test_memory_that_others_see_is_stepped_at_once_and_counted(gate: Gate, whose: str) -> None:
    model = net()
    array = model[4].bias.detach().numpy().copy()
    if whose == "process":
        model[4].share_memory()
    else:
        model[4].bias = nn.Parameter(torch.from_numpy(array))
    late_ones, notes, found = _notes_and_weights(model, optimizer := adamw(model))
    count = 2 if whose == "process" else 1
    assert late_ones == 6 - count
    assert f"waits for {count} parameters: its memory is also another process's, or an array's" in notes[0]
    _, _, expected = _notes_and_weights(plain := net(), adamw(plain, overlap=False))
    assert_same_bits(expected, found)
    assert whose == "process" or torch.equal(torch.from_numpy(array), found[5])
    optimizer.wait()


@pytest.mark.values
def test_parameters_of_other_classes_are_stepped_at_once_and_counted(gate: Gate) -> None:
    class Own(nn.Parameter):
        pass

    model = net()
    model[0].weight = Own(model[0].weight.detach().clone())
    optimizer = adamw(model)
    late_ones, notes, found = _notes_and_weights(model, optimizer)
    assert late_ones == 5
    assert "step() waits for 1 parameters: it is a Own, which has a class of its own" in notes[0]
    _, _, expected = _notes_and_weights(plain := net(), adamw(plain, overlap=False))
    assert_same_bits(expected, found)
    optimizer.wait()


class Counting(torch.optim.SGD):
    """Changes what is in its groups, as schedule-free classes do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class CountingLater(torch.optim.SGD):
    """The same from the second step on, and in place."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.calls = 0
        self.param_groups[0]["k"] = torch.zeros((), device="cpu")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.calls += 1
        if self.calls > 1:
            self.param_groups[0]["k"] += 1


@pytest.mark.cpu  # the classes count in host memory
@pytest.mark.parametrize("cls", [Counting, CountingLater])
def test_classes_whose_groups_change_in_a_step_step_at_once(cls: Any) -> None:
    ends = []
    for overlap in (False, True):
        model = net()
        optimizer = cpu_optimizer(cls(model.parameters(), lr=0.1), overlap=overlap)
        for step in range(4):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        report = optimizer.report()
        optimizer.wait()
        ends.append((weights(model), optimizer.param_groups[0]["k"]))
        if overlap:
            assert report.late_parameters == 0
            assert "its class changes what is in param_groups" in report.notes[-1]
    assert_same_bits(ends[0], ends[1])


COMPILED = """
import torch, lowtide
from torch import nn
def run(overlap, compiles_at):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5))
    call = model
    optimizer = lowtide.cpu_optimizer(torch.optim.AdamW(model.parameters()), overlap=overlap)
    found = []
    for step in range(6):
        if step == compiles_at:
            call = torch.compile(model, backend="eager")
        loss = call(torch.full((3, 30), 0.1 * step)).square().mean()
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found, optimizer.report()
for at in (0, 3):
    torch._dynamo.reset()
    plain, _ = run(False, at)
    torch._dynamo.reset()
    late, report = run(True, at)
    assert plain == late, (at, plain, late)
    assert report.late_parameters == 0, report
    assert "step() waits for 4 parameters: torch.compile has compiled something" in report.notes[0], report.notes
"""

FORKED = """
import os, torch, lowtide
torch.set_num_threads(1)
from torch import nn
from lowtide.optim.arriving import ArrivingParameter
model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(8)])
optimizer = lowtide.cpu_optimizer(torch.optim.AdamW(model.parameters()), overlap=True)
for _ in range(2):
    model(torch.ones(1, 600)).sum().backward()
    optimizer.step()
assert type(model[7].weight) is ArrivingParameter
child = os.fork()
if child == 0:
    model[7].weight.sum()
    for _ in range(2):
        model(torch.ones(1, 600)).sum().backward()
        optimizer.step()
    optimizer.wait()
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
optimizer.wait()
"""


@pytest.mark.cpu
@pytest.mark.parametrize("program", [COMPILED, FORKED], ids=["compiled", "forked"])
def test_in_a_process_of_its_own(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap has no such value"):
        adamw(net(), overlap=1)
