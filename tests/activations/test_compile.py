"""Wrapped layers under ``torch.compile``, and compiled layers under a wrapper. Backends that need no compiler."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import SwapManager, checkpoint_wrapper, swap_wrapper
from lowtide.errors import UnsupportedError

from .kit import alive, no_collector, results, row_of, same

N = 64
# A graph break inside of a wrapped call is said once by dynamo itself.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(N, 2 * N)
        self.down = nn.Linear(2 * N, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh().exp()) + x


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    SwapManager().configure(min_bytes=0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, N)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer())


def _trains_as(plain: nn.Module, other: Any, inner: nn.Module, x: Tensor, *, steps: int = 2) -> None:
    for _ in range(steps):
        plain.zero_grad()
        inner.zero_grad()
        assert same(results(plain, x), results(other, x))
        assert same([p.grad for p in plain.parameters()], [p.grad for p in inner.parameters()])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_model_of_wrapped_layers_compiles_into_one_graph(
    backend: str,
    kept: bool,  # noqa: FBT001
    x: Tensor,
) -> None:
    model = _model()
    plain = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)
    for layer in model:
        checkpoint_wrapper(layer, lowtide.save_ops("aten.addmm", "aten.mm") if kept else None)
    _trains_as(plain, torch.compile(model, backend=backend, fullgraph=True), model, x)


def test_a_wrapped_function_compiles_into_one_graph(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.exp() * x.tanh()).sin()

    wrapped = checkpoint_wrapper(fn)
    compiled = torch.compile(lambda x: wrapped(x) * 2, backend="aot_eager", fullgraph=True)
    assert same(results(lambda x: fn(x) * 2, x), results(compiled, x))


def test_evaluation_of_a_compiled_wrapped_model(x: Tensor) -> None:
    model = _model()
    want = model(x).detach()
    for layer in model:
        checkpoint_wrapper(layer)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), want)


@pytest.mark.parametrize("wrap", [swap_wrapper, lambda m: checkpoint_wrapper(m, swap_inputs=True)])
def test_a_swap_in_a_full_graph_raises_and_names_the_remedy(wrap: Any, x: Tensor) -> None:
    model = _model()
    wrap(model[1])
    lowtide.auto(model)
    with pytest.raises(Exception, match="cannot swap") as raised:
        torch.compile(model, backend="eager", fullgraph=True)(x)
    assert "recompute='call'" in str(raised.value)


def test_a_swapping_policy_in_a_full_graph_raises(x: Tensor) -> None:
    model = _model()
    checkpoint_wrapper(model[1], lowtide.swap_ops("aten.addmm", "aten.mm"))
    with pytest.raises(Exception, match="cannot swap"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "wrap",
    [swap_wrapper, lambda m: checkpoint_wrapper(m, lowtide.swap_ops("aten.addmm"), swap_inputs=True)],
    ids=["swap_wrapper", "swap_ops"],
)
def test_without_fullgraph_a_swapping_layer_breaks_the_graph_and_swaps(backend: str, wrap: Any, x: Tensor) -> None:
    plain, model = _model(), _model()
    for layer in model:
        wrap(layer)
    lowtide.auto(model)
    _trains_as(plain, torch.compile(model, backend=backend), model, x)
    assert SwapManager().traffic.out_bytes > 0
    assert SwapManager().lower_bytes() == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("order", ["compile then wrap", "module.compile"])
def test_a_compiled_layer_under_a_wrapper(backend: str, order: str, x: Tensor) -> None:
    plain, model = _model(), _model()
    layers = list(model)
    if order == "module.compile":
        for layer in layers:
            layer.compile(backend=backend)
    else:
        layers = [torch.compile(layer, backend=backend) for layer in layers]
    for layer in layers:
        checkpoint_wrapper(layer, swap_inputs=True, recompute="call")
    call = model if order == "module.compile" else nn.Sequential(*layers)
    lowtide.auto(call)
    _trains_as(plain, call, model, x)
    if order != "module.compile":
        assert [row_of(layer).calls for layer in layers] == [2, 2, 2]
        assert SwapManager().traffic.out_bytes > 0


def test_auto_runs_a_compiled_layer_again_and_the_report_says_why(x: Tensor) -> None:
    plain, model = _model(), _model()
    compiled = torch.compile(model[1], backend="aot_eager")
    checkpoint_wrapper(compiled)
    call = nn.Sequential(model[0], compiled, model[2])
    _trains_as(plain, call, model, x, steps=3)
    (row,) = lowtide.report(call).rows
    assert any("recompute='call'" in note for note in row.notes)
    assert row.kept_bytes == 4 * N * 4  # the input alone


def test_a_compiled_layer_inside_of_a_region(x: Tensor) -> None:
    plain, model = _model(), _model()
    inner = nn.Sequential(torch.compile(model[0], backend="aot_eager"), model[1])
    outer = nn.Sequential(checkpoint_wrapper(inner, recompute="replay"), model[2])
    _trains_as(plain, outer, model, x)


def test_a_compiled_region_leaves_nothing_behind(x: Tensor) -> None:
    model = _model()
    compiled = [torch.compile(layer, backend="aot_eager") for layer in model]
    for layer in compiled:
        checkpoint_wrapper(layer, recompute="replay")
    call = nn.Sequential(*compiled)
    call(x).sum().backward()
    with no_collector():
        before = alive()
        call(x).sum().backward()
        call(x)
        assert alive() == before


def test_the_refusal_is_our_own_error() -> None:
    from lowtide.activations.call_mode import lower_to_checkpoint

    layer = swap_wrapper(Layer())
    with pytest.raises(UnsupportedError, match=r"Compile the layer first"):
        lower_to_checkpoint(layer.forward.region, layer.forward.inner(), (torch.randn(1, N),), {})
