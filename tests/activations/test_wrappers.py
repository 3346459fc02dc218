"""Law 5: off means untouched. What a wrapped module or function still is, and that every wrap can be undone."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import CheckpointPolicy, SwapManager, checkpoint_wrapper, swap_wrapper, unwrap
from lowtide.activations.inplace import WrappedForward, attached
from lowtide.errors import WrapError

from .kit import no_collector, results, row_of, same

N = 6
# A swap that nobody schedules keeps its values and says so once.
pytestmark = pytest.mark.filterwarnings("ignore:.*nothing says when:lowtide.errors.LowtideWarning")


class Layer(nn.Module):
    """A layer with a parameter, a buffer and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.register_buffer("shift", torch.ones(N))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Shift, mix, squash."""
        return self.linear(x + self.shift).tanh().exp() * scale


def module_policy(ctx: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy that pickle finds by its name."""
    return CheckpointPolicy.PREFER_RECOMPUTE


WRAPS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": checkpoint_wrapper,
    "policy": lambda m: checkpoint_wrapper(m, lowtide.save_matmuls_and_attention(), swap_inputs=True),
    "swap": swap_wrapper,
}


@pytest.fixture(params=WRAPS)
def wrap(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return WRAPS[request.param]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, N)


# ---- a wrapped module is the module ------------------------------------------------------------------


def test_a_wrapped_module_is_the_same_object_with_the_same_names(wrap: Any) -> None:
    model = nn.Sequential(Layer(), Layer())
    before = (
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
        [name for name, _ in model.named_modules()],
        repr(model),
    )
    for layer in model:
        assert wrap(layer) is layer
        assert isinstance(layer, Layer) and type(layer) is Layer
    lowtide.auto(model)
    after = (
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
        [name for name, _ in model.named_modules()],
        repr(model),
    )
    assert after == before
    model.load_state_dict(nn.Sequential(Layer(), Layer()).state_dict())
    assert model[0].linear.weight is dict(model.named_parameters())["0.linear.weight"]


def test_its_signature_and_docstring_are_its_own(wrap: Any) -> None:
    layer = wrap(Layer())
    assert inspect.signature(layer.forward) == inspect.signature(Layer().forward)
    assert inspect.unwrap(layer.forward).__doc__ == Layer.forward.__doc__


@pytest.mark.values
def test_a_copy_is_bound_to_the_copy(wrap: Any, x: Tensor) -> None:
    layer = wrap(Layer())
    layer(x).sum().backward()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.linear.weight.zero_()
    plain = copy.deepcopy(unwrap(copy.deepcopy(twin)))
    assert torch.equal(twin(x), plain(x))
    assert not torch.equal(twin(x), layer(x))
    assert row_of(twin) is not row_of(layer)
    calls = row_of(layer).calls
    twin(x).sum().backward()
    assert row_of(layer).calls == calls
    assert attached(twin).module is twin


def test_a_copied_model_keeps_every_wrap(x: Tensor) -> None:
    model = nn.Sequential(checkpoint_wrapper(Layer()), swap_wrapper(Layer()), Layer())
    lowtide.auto(model)
    twin = copy.deepcopy(model)
    kinds = [None if attached(m) is None else attached(m).region.kind for m in twin]
    assert kinds == ["checkpoint", "swap", None]
    assert attached(twin).learns == 1
    assert same(results(model, x), results(twin, x))


@pytest.mark.parametrize("policy", [None, "ready-made", "function"])
def test_a_wrapped_module_is_pickled_with_its_wrap(policy: str | None, x: Tensor) -> None:
    policies: dict[str | None, Any] = {
        None: None,
        "ready-made": lowtide.save_ops(torch.ops.aten.addmm, "aten.mm"),
        "function": module_policy,
    }
    layer = checkpoint_wrapper(Layer(), policies[policy], recompute="replay", certify=2)
    back = pickle.loads(pickle.dumps(layer))  # noqa: S301 - our own bytes
    assert attached(back).region.settings()[2:] == attached(layer).region.settings()[2:]
    assert attached(back).module is back
    assert same(results(layer, x), results(back, x))
    if policy == "ready-made":
        results(layer, x)
        assert row_of(back).kept_bytes == row_of(layer).kept_bytes > 0


def test_it_dies_by_reference_counting(wrap: Any, x: Tensor) -> None:
    with no_collector():
        model = nn.Sequential(wrap(Layer()), wrap(Layer()))
        switch = lowtide.auto(model)
        model(x).sum().backward()
        dead = [weakref.ref(m) for m in (model, *model)]
        switch.undo()
        del model, switch
        assert [ref() for ref in dead] == [None] * 3


def test_a_function_in_a_chain_and_its_neighbours_die_too(x: Tensor) -> None:
    with no_collector():
        first, second = swap_wrapper(Layer()), swap_wrapper(Layer())
        SwapManager().set_forward_prefetch_layer(first, second)
        second(first(x)).sum().backward()
        dead = [weakref.ref(first), weakref.ref(second)]
        del first, second
        assert [ref() for ref in dead] == [None, None]


# ---- other people's patches and hooks --------------------------------------------------------------------


def test_a_forward_patched_on_the_class_later_is_seen(wrap: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = wrap(Layer())
    monkeypatch.setattr(Layer, "forward", lambda self, x: self.linear(x) * 7)
    assert torch.equal(layer(x), layer.linear(x) * 7)
    assert row_of(layer).calls == 1


def test_a_patch_of_the_instance_below_ours_stays_in_force(wrap: Any, x: Tensor) -> None:
    layer = Layer()
    plain = layer.forward
    layer.forward = lambda x: plain(x) + 1
    patch = layer.forward
    wrap(layer)
    assert torch.equal(layer(x), plain(x) + 1)
    assert row_of(layer).calls == 1
    assert unwrap(layer).forward is patch


def test_a_patch_of_the_instance_above_ours_works_and_survives_an_unwrap(wrap: Any, x: Tensor) -> None:
    layer = wrap(Layer())
    ours = layer.forward
    layer.forward = lambda x: ours(x) + 1
    patch = layer.forward
    want = Layer.forward(layer, x) + 1
    assert torch.equal(layer(x), want)
    unwrap(layer)
    assert layer.forward is patch
    assert torch.equal(layer(x), want)


def test_hooks_of_the_user_run_once_each_and_see_what_they_saw_before(wrap: Any, x: Tensor) -> None:
    seen: list[str] = []
    layer = Layer()
    layer.register_forward_pre_hook(lambda m, args: seen.append("before"))
    layer.register_forward_hook(lambda m, args, out: seen.append("after"))
    layer.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append("backward"))
    plain = copy.deepcopy(layer)
    want = results(plain, x)
    order = list(seen)
    seen.clear()
    assert same(want, results(wrap(layer), x))
    assert seen == order == ["before", "after", "backward"]


# ---- wrapping twice, unwrapping ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Layer, lambda: Layer().forward], ids=["module", "function"])
def test_the_same_wrap_twice_is_harmless_and_another_one_raises(kind: Any, x: Tensor) -> None:
    for wrap in (checkpoint_wrapper, swap_wrapper, lambda m: checkpoint_wrapper(m, lowtide.save_ops("aten.mm"))):
        once = wrap(kind())
        assert wrap(once) is once
        once(x).sum().backward()
        assert row_of(once).calls == 1
    layer = checkpoint_wrapper(kind())
    others: list[Callable[[Any], Any]] = [
        swap_wrapper,
        lambda m: checkpoint_wrapper(m, lowtide.save_ops("aten.mm")),
        lambda m: checkpoint_wrapper(m, swap_inputs=True),
        lambda m: checkpoint_wrapper(m, recompute="call"),
        lambda m: checkpoint_wrapper(m, certify=1),
    ]
    for other in others:
        with pytest.raises(WrapError, match=r"lowtide\.unwrap"):
            other(layer)
    layer(x).sum().backward()
    assert row_of(layer).calls == 1


def test_unwrap_gives_the_module_back_as_it_was(wrap: Any, x: Tensor) -> None:
    layer = Layer()
    before = dict(layer.__dict__)
    alive_graph = wrap(layer)(x).sum()
    assert unwrap(layer) is layer
    assert layer.__dict__ == before
    assert layer.forward.__func__ is Layer.forward
    alive_graph.backward()  # a graph that is alive runs backward as before
    assert unwrap(layer) is layer
    assert same(results(layer, x), results(checkpoint_wrapper(copy.deepcopy(layer)), x))


def test_unwrap_gives_the_function_back(wrap: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        """Squash."""
        return x.tanh()

    wrapped = wrap(fn)
    assert wrapped is not fn
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__qualname__) == (fn.__name__, fn.__doc__, fn.__qualname__)
    assert inspect.signature(wrapped) == inspect.signature(fn)
    assert unwrap(wrapped) is fn
    assert unwrap(fn) is fn


def test_unwrap_takes_a_layer_out_of_its_chain_and_its_learned_order(x: Tensor) -> None:
    manager = SwapManager()
    manager.configure(min_bytes=0)
    layers = [swap_wrapper(Layer()) for _ in range(3)]
    for first, second in itertools.pairwise(layers):
        manager.set_forward_prefetch_layer(first, second)
    unwrap(layers[1])
    assert not any(manager.is_chained(layer) for layer in layers)
    assert isinstance(layers[0].__dict__["forward"], WrappedForward)  # its own region stays
    layers[0](x).sum().backward()
    assert (row_of(layers[0]).swapped_bytes, row_of(layers[0]).refused["no schedule"].count > 0) == (0, True)
    model = nn.Sequential(*layers)
    lowtide.auto(model)
    unwrap(model)
    model(x).sum().backward()
    assert manager.traffic.out_bytes == 0


def test_undo_of_auto_leaves_no_trace_and_nests(x: Tensor) -> None:
    manager = SwapManager()
    manager.configure(min_bytes=0)
    model = nn.Sequential(*[swap_wrapper(Layer()) for _ in range(3)])
    before = dict(model.__dict__)
    first, second = lowtide.auto(model), lowtide.auto(model)
    first.undo()
    first.undo()
    model(x).sum().backward()
    moved = manager.traffic.out_bytes
    assert moved > 0
    second.undo()
    assert model.__dict__ == before
    with pytest.warns(lowtide.errors.LowtideWarning, match="nothing says when"):
        model(x).sum().backward()
    assert manager.traffic.out_bytes == moved


def test_a_callable_object_and_a_bound_method_can_be_wrapped(wrap: Any, x: Tensor) -> None:
    class Callable_:  # noqa: N801 - it is called, not named
        def __call__(self, x: Tensor) -> Tensor:
            return x.exp().tanh()

        def method(self, x: Tensor) -> Tensor:
            return x.exp().tanh()

    thing = Callable_()
    want = results(thing, x)
    assert same(want, results(wrap(thing), x))
    assert same(want, results(wrap(thing.method), x))


@pytest.mark.parametrize("thing", [nn.ModuleList(), 3, "layer"], ids=["a container", "a number", "a string"])
def test_what_cannot_be_called_cannot_be_wrapped(thing: Any) -> None:
    if isinstance(thing, nn.Module):
        checkpoint_wrapper(thing)  # a module like any other: calling it is what raises
        with pytest.raises(NotImplementedError):
            thing()
    else:
        with pytest.raises(WrapError, match="only modules and functions"):
            checkpoint_wrapper(thing)


# ---- a forward that is no plain method -----------------------------------------------------------------


class Static(nn.Module):
    """Called without itself."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin().exp()


class Partial(nn.Module):
    """A method with an argument filled in."""

    def scaled(self, x: Tensor, scale: float) -> Tensor:
        return x.sin().exp() * scale

    forward = functools.partialmethod(scaled, scale=3.0)


class Stateless(nn.Module):
    """A builtin, which binds nothing."""

    forward = torch.exp


class Child(Layer):
    """Its forward is that of its base."""


@pytest.mark.parametrize("kind", [Static, Partial, Stateless, Child])
def test_a_forward_that_is_no_plain_method_is_called_as_before(kind: type[nn.Module], wrap: Any, x: Tensor) -> None:
    torch.manual_seed(0)
    plain = kind()
    wrapped = wrap(copy.deepcopy(plain))
    assert same(results(wrapped, x), results(plain, x))
    unwrap(wrapped)
    assert "forward" not in wrapped.__dict__
