"""A step that goes on beside the loop: nobody reads a parameter before its update, and nobody waits for another's."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide._torch import without_torch_function
from lowtide.optim import late
from lowtide.optim.arriving import ArrivingParameter

from .kit import assert_same_bits, backward, net, weights
from .late_kit import Gate, adamw, cpu_optimizer, held_step, stepped, x_of

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

    assert gate.reached.wait(60)
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


def _gradients_of_a_function(model: nn.Module) -> Any:
    def loss(parameters: Any, x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, parameters, x).square().sum()
        return found

    return torch.func.grad(loss)(dict(model.named_parameters()), x_of(model))


class Saver(torch.autograd.Function):
    """Keeps a parameter of somebody else's for backward without a look at it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return grad * weight, None


def _saved_by_a_function(model: Any) -> Any:
    x = torch.ones(5, requires_grad=True)
    out = Saver.apply(x, model[4].bias)  # type: ignore[no-untyped-call]
    model(x_of(model))
    out.sum().backward()
    return x.grad


class Holder:
    """What a library passes to a function of its own, which asks torch whether a class wants to see it first."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


def _total(holder: Holder) -> Any:
    if torch.overrides.has_torch_function((holder.weight,)):
        return torch.overrides.handle_torch_function(_total, (holder.weight,), holder)
    return holder.weight.sum()


class Several(list):  # type: ignore[type-arg]
    """A list of somebody's own."""


@contextlib.contextmanager
def _swaps_on_conversion() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


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
    "a list of its own": lambda m: torch.cat(Several([m[0].bias, m[2].bias])),
    "an object of its own": lambda m: _total(Holder(m[2].bias)),
    "a Function that saves": _saved_by_a_function,
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


def test_parameters_may_be_exchanged_on_conversion(gate: Gate) -> None:
    model = net()
    optimizer = adamw(model, grad_offload=False)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        gate.close()
        optimizer.step()
    optimizer.zero_grad()
    with _swaps_on_conversion():
        model.double()
    assert next(model.parameters()).dtype is torch.float64
    optimizer.wait()


@pytest.mark.cpu  # these layers have no faster way elsewhere
@pytest.mark.parametrize("training", [False, True, None])
@pytest.mark.parametrize("make", [_encoder, _attention, _lstm])
def test_layers_with_a_faster_way_outside_of_training_take_it(
    gate: Gate, make: Callable[[], nn.Module], *, training: bool | None
) -> None:
    """Where ``training`` is None, the layer is frozen and in evaluation, and history is on."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, 16, generator=draw)

    def feed(model: nn.Module, step: int) -> None:
        _called(model, x + step).square().mean().backward()

    ends = []
    for held in (None, gate):
        model, optimizer = stepped(make, held, feed)
        if training is None:
            model.requires_grad_(False)
        with torch.no_grad() if training is False else contextlib.nullcontext():
            ends.append(_called(model.train(bool(training)), x))
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
        torch.jit.freeze(scripted.eval())(x_of(model))  # what has no parameters any more is let by
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
            held_step(optimizer, held)
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
            held_step(optimizer, held)
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
                held_step(optimizer, held)
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
