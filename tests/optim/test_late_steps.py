"""A step that goes on beside the loop: nobody reads a parameter before its update, and nobody waits for another's."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide._torch import without_torch_function
from lowtide.errors import ConfigError, StateError
from lowtide.optim import cpu, late
from lowtide.optim.arriving import ArrivingParameter
from lowtide.optim.cpu import CpuOptimizer

from .kit import assert_same_bits, backward, net, weights

cpu_optimizer = functools.partial(cpu.cpu_optimizer, grad_offload=True, overlap=True)
hooks_of_modules = nn.modules.module._global_forward_pre_hooks


class Gate:
    """Steps that go on stand still until somebody waits, however long that takes: who does not wait reads old bits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.order: list[list[str]] = []
        self.fails: str | None = None
        plain = late.step_rows

        def step_rows(rows: Any, worker: Any) -> None:
            assert self.opened.wait(60)
            self.order.append([row.name for row in rows])
            if self.fails in self.order[-1]:
                raise MemoryError("no room")
            plain(rows, worker)

        patch.setattr(late, "step_rows", step_rows)
        for name in ("want", "join"):
            patch.setattr(late._LateStep, name, self._opening(getattr(late._LateStep, name)))

    def _opening(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any) -> Any:
            found = method(*args) if method.__name__ == "want" else None
            self.opened.set()
            return found if method.__name__ == "want" else method(*args)

        return opened

    @property
    def is_open(self) -> bool:
        return self.opened.is_set()

    def close(self) -> None:
        self.opened.clear()
        self.order.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(late, "LATE_BYTES", 1)  # every parameter by itself
    made = Gate(monkeypatch)
    made.opened.set()
    yield made
    made.opened.set()


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
    assert not hooks_of_modules, "a hook of all modules has outlived its step"


def adamw(model: nn.Module, **options: Any) -> CpuOptimizer:
    return cpu_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), **options)


def stepped(make: Callable[[], nn.Module], gate: Gate | None, feed: Callable[[nn.Module, int], Any] = backward) -> Any:
    """A model after two steps, of which the last goes on and stands still if there is a gate; and its optimizer."""
    model = make()
    optimizer = adamw(model, overlap=gate is not None)
    for step in range(2):
        feed(model, step)
        if gate is not None and step == 1:
            gate.close()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


# ---- who waits, and who does not -------------------------------------------------------------------


def test_a_step_returns_before_the_host_has_stepped_and_questions_about_parameters_do_not_wait(gate: Gate) -> None:
    model, optimizer = stepped(net, gate)
    model.zero_grad()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        assert type(parameter) is ArrivingParameter
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is None
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.numel() == parameter.shape.numel() == torch.numel(parameter)
        assert parameter.size() == parameter.shape
        assert len(parameter) == parameter.shape[0]
        assert (parameter.dim(), parameter.ndim) == (len(parameter.shape),) * 2
        assert (parameter.dtype, parameter.device.type) == (torch.float32, parameter.device.type)
        assert parameter.is_floating_point()
        assert parameter.stride() is not None
        hash(parameter)
        parameter.requires_grad_()
        parameter.grad = torch.zeros(parameter.shape)
        parameter.grad = None
    assert optimizer.report().late_parameters == 6
    assert model.train() is model
    assert list(dict(model.named_parameters())) == [f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]
    assert not gate.is_open
    optimizer.wait()
    assert gate.is_open
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not any("_arrival" in vars(p) for p in model.parameters())


def test_what_is_used_first_is_stepped_next_and_alone_is_waited_for(gate: Gate) -> None:
    model, optimizer = stepped(net, gate)
    done = threading.Event()
    plain = late.step_rows

    def two_then_stop(rows: Any, worker: Any) -> None:
        # The first was under way already, the second is what is asked for.
        assert len(gate.order) < 2 or done.wait(60)
        plain(rows, worker)

    late.step_rows = two_then_stop  # the gate's own patch is taken off at the end
    model[4].weight.sum()
    assert gate.order == [["parameter 0 of group 0"], ["parameter 4 of group 0"]]
    arriving = [type(p) is ArrivingParameter for p in model.parameters()]
    assert arriving == [True, True, True, True, False, True]
    done.set()
    optimizer.wait()
    assert sorted(gate.order) == [[f"parameter {i} of group 0"] for i in range(6)]


class Extension(torch.autograd.Function):
    """Reads its arguments as kernels of others do: no function of torch is called with them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with without_torch_function():
            ctx.save_for_backward(weight)
            return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return grad @ weight, None


class Norm(nn.Module):
    """A layer that gives its own parameters to such a kernel."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return Extension.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def _bytes_at(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), 4 * tensor.numel())


def _saved(model: nn.Module) -> Any:
    box = io.BytesIO()
    torch.save(model[2].weight, box)
    box.seek(0)
    return torch.load(box, weights_only=True, map_location="cpu").detach()


def x_of(model: nn.Module, columns: int = 301) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(5)
    return torch.randn(3, columns, generator=draw, device="cpu").to(next(model.parameters()).device)


def _gradients_of_a_function(model: nn.Module) -> Any:
    def loss(parameters: Any, x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, parameters, x).square().sum()
        return found

    return torch.func.grad(loss)(dict(model.named_parameters()), x_of(model))


READERS: dict[str, Callable[[Any], Any]] = {
    "a forward": lambda m: m(x_of(m)),
    "a forward in evaluation": lambda m: torch.no_grad()(m.eval())(x_of(m)),
    "a functional": lambda m: F.linear(x_of(m), m[0].weight, m[0].bias),
    "a functional with lists": lambda m: torch._foreach_norm([m[0].weight, m[0].bias]),
    "a keyword": lambda m: torch.add(torch.ones(1), other=m[4].bias),
    "an operator": lambda m: torch.ops.aten.mul.Tensor(m[4].bias, 2.0),
    "a packet of operators": lambda m: torch.ops.aten.mul(m[4].bias, 2.0),
    "a method": lambda m: m[0].weight.sum(),
    "an operation": lambda m: 3.0 * m[4].bias - m[4].bias,
    "an index": lambda m: m[0].weight[3],
    "an iteration": lambda m: list(m[4].weight),
    "a view": lambda m: m[0].weight.view(-1),
    "detach": lambda m: m[2].weight.detach(),
    "data": lambda m: m[2].weight.data,
    "tolist": lambda m: m[4].bias.tolist(),
    "repr": lambda m: repr(m[4].bias),
    "an item": lambda m: m[4].bias[0].item(),
    "vmap": lambda m: torch.vmap(m[0])(x_of(m)),
    "functional_call": lambda m: torch.func.functional_call(m[0], dict(m[0].named_parameters()), x_of(m)),
    "gradients of a function": _gradients_of_a_function,
    "state_dict": lambda m: dict(m.state_dict()),
    "deepcopy of the model": lambda m: weights(copy.deepcopy(m)),
    "deepcopy of a parameter": lambda m: copy.deepcopy(m[0].weight).detach(),
    "copy of a parameter": lambda m: copy.copy(m[0].weight).detach(),
    "pickle": lambda m: pickle.loads(pickle.dumps(m[0].weight)).detach(),  # noqa: S301
    "torch.save": _saved,
    "a vector of all": lambda m: nn.utils.parameters_to_vector(m[0].parameters()),
    "another type": lambda m: weights(m.to(torch.bfloat16)),
    "a new parameter": lambda m: nn.Parameter(m[0].weight.data).detach(),
    "a kernel of others in a layer": lambda m: Norm(m[0])(x_of(m)),
    "a Function": lambda m: Extension.apply(x_of(m), m[0].weight * 1.0),
    "a copy into another": lambda m: torch.zeros(5).copy_(m[4].bias.detach()),
    "out of a parameter": lambda m: torch.mul(m[4].bias.detach(), 2.0, out=torch.zeros(5)),
    "a gradient": lambda m: torch.autograd.grad(m(x_of(m)).sum(), m[4].weight),
}
ON_THE_CPU: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda m: torch.from_numpy(m[0].weight.detach().numpy().copy()),
    "dlpack": lambda m: torch.from_dlpack(m[0].weight.detach()).clone(),
    "an address": lambda m: _bytes_at(m[4].bias),
}


@pytest.mark.values
@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_a_parameter_waits_for_its_step(gate: Gate, name: str) -> None:
    found = []
    for held in (None, gate):
        model, optimizer = stepped(net, held)
        found.append(READERS[name](model))
        optimizer.wait()
    assert_same_bits(found[0], found[1], name)


def test_a_parameter_made_of_one_raises_rather_than_to_show_old_bits(gate: Gate) -> None:
    model, optimizer = stepped(net, gate)
    with pytest.raises(RuntimeError, match="Creating a Parameter"):
        nn.Parameter(model[0].weight)
    assert nn.Parameter(model[0].weight).shape == (257, 301)
    optimizer.wait()


@pytest.mark.cpu
@pytest.mark.parametrize("name", ON_THE_CPU)
def test_whoever_reads_host_memory_waits_for_its_step(gate: Gate, name: str) -> None:
    found = []
    for held in (None, gate):
        model, optimizer = stepped(net, held)
        found.append(ON_THE_CPU[name](model))
        optimizer.wait()
    assert_same_bits(found[0], found[1], name)


@torch.no_grad()
def _renormalise(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.renorm_(2, 0, 0.5) if parameter.dim() > 1 else parameter.clamp_(max=0.01)


@torch.no_grad()
def _swap_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def _load(model: nn.Module) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


WRITERS: dict[str, Callable[[Any], Any]] = {
    "in place": _renormalise,
    "through data": lambda m: [p.data.mul_(0.5) for p in m.parameters()],
    "over data": _swap_data,
    "load_state_dict": _load,
    "anew": lambda m: [nn.init.ones_(p) for p in m.parameters()],
    "one element": lambda m: m[4].bias.data.__setitem__(2, 7.0),
    "foreach": lambda m: torch.no_grad()(torch._foreach_mul_)(list(m.parameters()), 0.5),
}


@pytest.mark.values
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_to_a_parameter_comes_after_its_step_and_wins_over_its_master(gate: Gate, name: str) -> None:
    ends = []
    for held in (None, gate):
        model, optimizer = stepped(functools.partial(net, torch.bfloat16), held)
        WRITERS[name](model)
        for step in range(2, 4):
            backward(model, step)
            optimizer.step()
        ends.append((weights(model), optimizer.state_dict()))
    assert_same_bits(ends[0], ends[1], name)


def _encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)


def _attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 2, batch_first=True)


def _lstm() -> nn.Module:
    torch.manual_seed(0)
    return nn.LSTM(16, 16, batch_first=True)


def _called(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, nn.MultiheadAttention):
        return model(x, x, x)[0]  # type: ignore[no-any-return]
    found = model(x)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.cpu  # these layers have no faster way elsewhere
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [_encoder, _attention, _lstm])
def test_layers_with_a_faster_way_outside_of_training_take_it(
    gate: Gate, make: Callable[[], nn.Module], *, training: bool
) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, 16, generator=draw)

    def feed(model: nn.Module, step: int) -> None:
        _called(model, x + step).square().mean().backward()

    ends = []
    for held in (None, gate):
        model, optimizer = stepped(make, held, feed)
        with contextlib.nullcontext() if training else torch.no_grad():
            ends.append(_called(model.train(training), x))
        optimizer.wait()
    assert_same_bits(ends[0], ends[1])


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_a_scripted_module_waits_for_all_it_holds(gate: Gate) -> None:
    ends = []
    for held in (None, gate):
        model = net()
        scripted = torch.jit.script(model)
        optimizer = adamw(model, overlap=held is not None)
        for step in range(2):
            backward(model, step)
            if held is not None and step:
                held.close()
            optimizer.step()
        ends.append(scripted(x_of(model)))
        optimizer.wait()
    assert_same_bits(ends[0], ends[1])


def test_a_module_whose_forward_replays_a_captured_graph_waits_for_all_it_holds(gate: Gate) -> None:
    model, optimizer = stepped(net, gate)

    def replay(x: Tensor) -> Tensor:
        return x

    replay.__module__ = "torch.cuda.graphs"
    model.forward = replay
    model(torch.ones(1))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    optimizer.wait()


@pytest.mark.values
def test_several_threads_may_wait_at_once(gate: Gate) -> None:
    expected = [p.sum() for p in stepped(net, None)[0].parameters()]
    model, optimizer = stepped(net, gate)
    found: dict[int, list[Tensor]] = {}

    def read(number: int) -> None:
        found[number] = [p.sum() for p in model.parameters()]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.wait()
    for sums in found.values():
        assert_same_bits(expected, sums)


# ---- what a step is made of ------------------------------------------------------------------------


@pytest.mark.values
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_step_has_the_hyperparameters_of_the_moment_when_it_was_called(gate: Gate, kind: str) -> None:
    ends = []
    for held in (None, gate):
        model = net()
        rate: Any = torch.tensor(0.01, device="cpu") if kind == "tensor" else 0.01
        inner = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False, capturable=False)
        optimizer = cpu_optimizer(inner, overlap=held is not None)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            backward(model, step)
            if held is not None:
                held.close()
            optimizer.step()
            schedule.step()
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            optimizer.zero_grad()
        ends.append((weights(model), optimizer.state_dict()))
    assert_same_bits(ends[0], ends[1])


@pytest.mark.values
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_come_while_a_step_goes_on_are_the_next_ones(gate: Gate, *, to_none: bool) -> None:
    ends = []
    for held in (None, gate):
        model = net()
        optimizer = adamw(model, overlap=held is not None)
        for step in range(3):
            backward(model, step)
            if held is not None:
                held.close()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            # By hand, and by a backward that does not read what it is the gradient of.
            model[4].bias.grad = torch.ones(5)
            torch.zeros(63).add(model[2].bias).sum().backward()
            optimizer.step()
        ends.append((weights(model), optimizer.state_dict()))
    assert_same_bits(ends[0], ends[1])


def test_a_graph_that_was_kept_over_a_step_is_refused_as_ever(gate: Gate) -> None:
    model, optimizer = stepped(net, gate)
    optimizer.wait()
    loss = model(x_of(model)).sum()
    loss.backward(retain_graph=True)
    gate.close()
    optimizer.step()
    assert optimizer.report().late_parameters >= 3  # weights are also in the graph, as views
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.wait()
    gc.collect()


@pytest.mark.values
def test_two_optimizers_of_one_process_go_on_side_by_side(gate: Gate) -> None:
    ends = []
    for held in (None, gate):
        models = [net(seed=seed) for seed in range(2)]
        optimizers = [adamw(model, overlap=held is not None) for model in models]
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(model, step)
                if held is not None:
                    held.close()
                optimizer.step()
                optimizer.zero_grad()
        ends.append([weights(model) for model in models])
        for optimizer in optimizers:
            optimizer.wait()
    assert_same_bits(ends[0], ends[1])


@pytest.mark.values
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "unwrap", "state", "add_param_group", "load"])
def test_whoever_asks_the_optimizer_waits(gate: Gate, way: str) -> None:
    ends = []
    for held in (None, gate):
        model, optimizer = stepped(functools.partial(net, torch.bfloat16), held)
        if way == "state_dict":
            found: Any = optimizer.state_dict()
        elif way == "deepcopy":
            found = copy.deepcopy(optimizer).state_dict()
        elif way == "pickle":
            found = pickle.loads(pickle.dumps(optimizer)).state_dict()  # noqa: S301
        elif way == "unwrap":
            found = optimizer.unwrap().state_dict()
        elif way == "state":
            found = [optimizer.state[p] for p in model.parameters()]
        elif way == "add_param_group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]})
            found = optimizer.state_dict()["state"]
        else:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            backward(model, 5)
            optimizer.step()
            found = weights(model)
        ends.append((found, weights(model)))
        if way != "unwrap":
            optimizer.wait()
    assert_same_bits(ends[0], ends[1], way)


# ---- what is not late, and why -------------------------------------------------------------------------


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
            if held is not None:
                held.close()
            optimizer.step()
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


# ---- ends ------------------------------------------------------------------------------------------


def _stepped_once() -> nn.Module:
    model = net(torch.bfloat16)
    optimizer = adamw(model, overlap=False)
    backward(model, 0)
    optimizer.step()
    return model


def _backward_fails(model: Any) -> None:
    """Whoever brings a gradient for what was not reached hears of it, too."""
    with pytest.raises(StateError, match="failed"):
        torch.zeros(63, dtype=torch.bfloat16).add(model[2].bias).sum().backward()


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
    if forgets:
        optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(StateError, match="failed"):
            model[2].weight.sum()
    with pytest.raises(StateError, match="MemoryError: no room"):
        model(x_of(model).bfloat16())
    model[0].weight.sum()  # this one was reached
    _backward_fails(model)
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
        patch.setattr(late._Batch, "wait", _interrupted)
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


def test_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap has no such value"):
        adamw(net(), overlap=1)
