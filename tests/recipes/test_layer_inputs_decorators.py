"""The five decorators, in the words of their source, and a schedule that overlaps forward and backward (L4-L7)."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.activations.kit import no_collector
from tests.recipes.layer_inputs_kit import (
    INPUT_BYTES,
    WIDTH,
    Block,
    Stack,
    alive,
    batch,
    build,
    gradients,
    inputs_away,
    no_managers,
    same,
    stats,
    steps,
)
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import SwapManager, checkpoint_wrapper
from lowtide.errors import CapacityError, ScheduleError
from lowtide.recipes.layer_inputs import (
    SwapLayerInputManager,
    swap_layer_input_fboverlap_1f1b_wrapper,
    swap_layer_input_fboverlap_backward_wrapper,
    swap_layer_input_fboverlap_forward_wrapper,
    swap_layer_input_forward_wrapper,
    swap_layer_input_init_wrapper,
    swap_layer_inputs,
)


class Registered(Block):
    """A block that is registered, and whose own forward is the original."""

    @swap_layer_input_init_wrapper
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)


class Layer(Registered):
    """A block as a user of the decorators writes it."""

    @swap_layer_input_forward_wrapper
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


def managers(tag: str = "default") -> Any:
    return SwapLayerInputManager.manager_map[tag]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    if not no_managers():
        gc.collect()
    SwapLayerInputManager.manager_map.clear()
    yield
    if SwapManager().lower_bytes() or not no_managers():
        gc.collect()  # locals of a class body and its classes are a cycle
    assert SwapManager().lower_bytes() == 0
    assert no_managers()


@pytest.mark.parametrize("recompute", [True, False])
def test_decorated_layers_train_the_same_and_move_from_the_first_step_on(recompute: bool) -> None:  # noqa: FBT001
    want = steps(build(5, recompute=False))
    model = build(5, Layer, recompute=recompute)
    assert [manager.layer_idx for manager in managers()] == list(range(5))
    assert [layer.swap_manager.is_last for layer in model.layers] == [False] * 4 + [True]
    loss = model(batch()).sum()
    assert inputs_away() == 4
    assert alive(managers()) == [1] * 5
    loss.backward()
    assert same(want, steps(model))
    assert SwapManager().traffic.out_bytes == 3 * 4 * INPUT_BYTES
    assert SwapManager().traffic.late_loads == 0
    assert alive(managers()) == [0] * 5


def test_the_decorators_do_the_same_as_the_verb() -> None:
    seen = []
    for make in (Block, Layer):
        SwapManager().reset()
        model = build(5, make)
        if make is Block:
            swap_layer_inputs(list(model.layers))
        values = steps(model)
        row = lowtide.report(model).rows
        traffic = dataclasses.replace(SwapManager().traffic, waits=0)  # how often the file was not done yet is luck
        seen.append((values, traffic, [(r.kept_bytes, r.swapped_bytes, r.recomputed_bytes) for r in row]))
    assert same(seen[0][0], seen[1][0])
    assert seen[0][1:] == seen[1][1:]


def test_the_verb_on_decorated_layers_takes_their_place() -> None:
    model = build(3, Layer)
    switch = swap_layer_inputs(list(model.layers))
    loss = model(batch()).sum()
    assert inputs_away() == 2
    assert alive(managers()) == [0] * 3
    assert alive(switch.managers) == [1] * 3
    loss.backward()
    switch.undo()
    loss = model(batch()).sum()
    assert alive(managers()) == [1] * 3
    loss.backward()


def test_the_input_is_marked_and_a_mark_that_says_no_is_honoured() -> None:
    layers = [Layer(), Layer()]
    x, y = batch().requires_grad_(), batch().requires_grad_()
    layers[0](x)
    assert x.swap_this_tensor is True  # type: ignore[attr-defined]
    y.swap_this_tensor = False  # type: ignore[attr-defined]
    out = layers[0](hidden_states=y)
    assert y.swap_this_tensor is False  # type: ignore[attr-defined]
    assert inputs_away() == 0
    out.sum().backward()


def test_a_layer_without_a_manager_runs_its_original_forward() -> None:
    class Bare(Block):
        @swap_layer_input_forward_wrapper
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states)

    model = build(3, Bare, recompute=False)
    assert same(steps(build(3, recompute=False)), steps(model))
    assert SwapManager().traffic.out_bytes == 0
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_a_decorated_base_and_a_decorated_subclass_register_a_layer_once() -> None:
    class Sub(Layer):
        @swap_layer_input_init_wrapper
        def __init__(self) -> None:
            super().__init__()

    layers = [Sub(), Sub()]
    assert [manager.layer for manager in managers()] == layers


def test_a_layer_of_multi_token_prediction_is_not_registered() -> None:
    class Prediction(Layer):
        @swap_layer_input_init_wrapper
        def __init__(self) -> None:
            super().__init__()  # registers it
            self.is_mtp = True  # and here it is recognised

    class Early(nn.Module):
        @swap_layer_input_init_wrapper
        def __init__(self) -> None:
            super().__init__()
            self.is_mtp = True
            self.layer = Layer()  # the layer that it calls is registered

    layers = [Layer(), Layer(), Prediction(), Early()]
    assert [manager.layer for manager in managers()] == [layers[0], layers[1], layers[3].layer]
    assert not hasattr(layers[2], "swap_manager")
    assert not hasattr(layers[3], "swap_manager")


@pytest.mark.parametrize("recompute", [True, False])
def test_a_layer_that_is_called_twice_is_served(recompute: bool) -> None:  # noqa: FBT001
    class Predicting(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return self.layers[-1](x.roll(1, 0)) + x

    torch.manual_seed(5)
    want = steps(Predicting(3))
    torch.manual_seed(5)
    model = Predicting(3, Layer)
    if recompute:
        for layer in model.layers:
            checkpoint_wrapper(layer, recompute="replay")
    loss = model(batch()).sum()
    assert alive(managers()) == [1, 1, 2]
    loss.backward()
    assert same(want, steps(model))


def test_tags_are_chains_of_their_own() -> None:
    class Tagged(Layer):
        module_tag = "other"

    layers = [Layer(), Tagged(), Layer(), Tagged()]
    assert [manager.layer for manager in managers()] == [layers[0], layers[2]]
    assert [manager.layer for manager in managers("other")] == [layers[1], layers[3]]
    x = batch().requires_grad_()
    for layer in layers:
        x = layer(x * 1.0)
    assert inputs_away() == 2
    x.sum().backward()


def test_layers_that_are_built_later_join_and_those_that_are_gone_leave() -> None:
    first = build(3, Layer)
    first(batch()).sum().backward()
    second = build(2, Layer)
    loss = second(batch()).sum()
    assert [manager.layer_idx for manager in managers()] == list(range(5))
    assert inputs_away() == 1
    loss.backward()
    with no_collector():
        gone = weakref.ref(first.layers[0].swap_manager)
        del first
        assert gone() is None
    assert [manager.layer for manager in managers()] == list(second.layers)
    loss = second(batch()).sum()
    assert inputs_away() == 1
    loss.backward()


def test_copies_and_pickles_are_further_layers_of_the_tag() -> None:
    model = build(2, Registered, recompute=False)
    copied = copy.deepcopy(model)
    assert [manager.layer for manager in managers()] == [*model.layers, *copied.layers]
    assert list(copied.state_dict()) == list(model.state_dict())
    data = pickle.dumps(Block())
    assert data
    assert copied.layers[0].swap_manager is not model.layers[0].swap_manager


def test_settings_of_a_tag() -> None:
    SwapLayerInputManager.configure(prefetch=3)
    model = build(6, Layer)
    out = model(batch())
    seen: list[list[list[str]]] = []
    out.register_hook(lambda _: seen.append(stats(managers())))
    out.sum().backward()
    assert seen[0][:4] == [["host"], ["host"], ["h2d"], ["h2d"]]
    with pytest.raises(ScheduleError, match="prefetch is no count"):
        SwapLayerInputManager.configure(prefetch=-1)
    SwapLayerInputManager.configure(micro_batches=3)
    SwapManager().configure(host_bytes=5 * 3 * INPUT_BYTES - 1)
    with pytest.raises(CapacityError, match=rf"\(6 - 1\) x {INPUT_BYTES} x 3"):
        model(batch())


def test_a_chain_of_the_user_s_own_is_refused_not_broken() -> None:
    layers, other = [Layer(), Layer()], Block()
    SwapManager().set_forward_prefetch_layer(layers[1], other)
    with pytest.raises(ScheduleError, match="another chain"):
        layers[0](batch())
    assert SwapManager().neighbours(layers[1]) == (None, other)


def test_evaluation_leaves_nothing_and_does_not_shift_the_queue() -> None:
    want = steps(build(4, recompute=False))
    model = build(4, Layer)
    with torch.no_grad():
        model(batch(3))
    assert alive(managers()) == [0] * 4
    assert same(want, steps(model))
    with torch.no_grad():
        model(batch(3))
    assert inputs_away() == 0


def test_torch_s_checkpoint_around_a_decorated_forward_counts_as_held_elsewhere() -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True)
            return x

    torch.manual_seed(5)
    want = steps(Checkpointed(3))
    torch.manual_seed(5)
    model = Checkpointed(3, Layer)
    assert same(want, steps(model))
    assert [row.held_elsewhere_bytes for row in lowtide.report(model).rows] == [INPUT_BYTES] * 3


@pytest.mark.cpu
def test_layers_that_live_until_the_interpreter_ends_end_in_silence() -> None:
    program = """
import torch
from lowtide.recipes import layer_inputs as recipe
class Layer(torch.nn.Linear):
    __init__ = recipe.swap_layer_input_init_wrapper(torch.nn.Linear.__init__)
    forward = recipe.swap_layer_input_forward_wrapper(torch.nn.Linear.forward)
model = torch.nn.Sequential(*[Layer(256, 256) for _ in range(3)])
named = [torch.nn.Linear(4, 4) for _ in range(3)]
switch = recipe.swap_layer_inputs(named)
out = model(torch.randn(256, 256))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---- forward and backward in one call (L7) ------------------------------------------------------------------------


@dataclass
class LayerGraph:
    """What one layer's forward leaves for its backward: places in the graph, and neither its input nor its output."""

    layer: nn.Module
    output: GradientEdge
    edge: GradientEdge | None
    kept: Tensor | None = None


def _layer_forward(layer: nn.Module, hidden_states: Tensor, *, keep: bool = False) -> tuple[Tensor, LayerGraph]:
    output = Block.forward(layer, hidden_states)  # type: ignore[arg-type]
    edge = get_gradient_edge(hidden_states) if hidden_states.requires_grad else None
    return output, LayerGraph(layer, get_gradient_edge(output), edge, hidden_states if keep else None)


def _layer_backward(output_grad: Tensor, graph: LayerGraph) -> Tensor | None:
    parameters = list(graph.layer.parameters())
    wanted: list[Any] = [*parameters, *([graph.edge] if graph.edge is not None else [])]
    found = torch.autograd.grad(graph.output, wanted, output_grad)
    for parameter, grad in zip(parameters, found, strict=False):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    return found[len(parameters)] if graph.edge is not None else None


def _both(
    fwd_layer: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    bwd_layer_output_grad: Tensor | None = None,
    bwd_layer_graph: LayerGraph | None = None,
) -> tuple[tuple[Tensor, LayerGraph], Tensor | None]:
    assert bwd_layer_graph is not None
    assert bwd_layer_output_grad is not None
    # A real one cuts both into pieces and lets the communication of one run beside the compute of the other.
    grad = _layer_backward(bwd_layer_output_grad, bwd_layer_graph)
    return _layer_forward(fwd_layer, hidden_states), grad


def _overlapped(first: nn.Module, layers: Any, calls: Any, count: int = 3) -> list[Tensor]:
    """One micro-batch's forward beside the one before's backward, layer by layer; losses and gradients."""
    forward, both, backward = calls
    graphs: list[LayerGraph] = []
    losses: list[Tensor] = []
    grad: Tensor | None = None
    for index in range(count):
        x = first(batch(index)).detach()
        ready: list[LayerGraph] = []
        for position, layer in enumerate(layers):
            if not graphs:
                x, graph = forward(layer, x)
            elif position % 2:
                (x, graph), grad = both(layer, x, None, grad, graphs.pop())
            else:
                (x, graph), grad = both(layer, x, bwd_layer_output_grad=grad, bwd_layer_graph=graphs.pop())
            ready.append(graph)
            del graph
        loss_input = x.detach().requires_grad_()
        loss = loss_input.square().mean()
        (grad,) = torch.autograd.grad(loss, loss_input)
        losses.append(loss.detach())
        graphs = ready
        del x, loss_input, loss, ready
    while graphs:
        grad = backward(grad, graphs.pop())
    return [*losses, *(p.grad for layer in layers for p in layer.parameters())]


DECORATED = (
    swap_layer_input_fboverlap_forward_wrapper(_layer_forward),
    swap_layer_input_fboverlap_1f1b_wrapper(_both),
    swap_layer_input_fboverlap_backward_wrapper(_layer_backward),
)


def test_forward_and_backward_in_one_call_train_the_same_and_both_layers_move() -> None:
    torch.manual_seed(5)
    first = nn.Linear(WIDTH, WIDTH)
    plain, layers = nn.ModuleList(Block() for _ in range(5)), nn.ModuleList(Registered() for _ in range(5))
    layers.load_state_dict(plain.state_dict())
    want = _overlapped(first, plain, (_layer_forward, _both, _layer_backward))
    assert same(want, _overlapped(first, layers, DECORATED))
    assert alive(managers()) == [0] * 5
    assert inputs_away() == 0
    traffic = SwapManager().traffic
    assert traffic.out_bytes == 3 * 4 * INPUT_BYTES
    assert traffic.late_loads == 0
    rows = {row.name: row for row in lowtide.report(layers).rows}
    assert sum(row.held_elsewhere_bytes for row in rows.values()) == 0


def test_a_layer_graph_that_holds_the_input_counts_as_held_elsewhere_with_the_remedy() -> None:
    layers = [Registered() for _ in range(4)]
    x = batch().requires_grad_() * 1.0
    graphs = []
    for layer in layers:
        x, graph = DECORATED[0](layer, x, keep=True)
        graphs.append(graph)
    rows = lowtide.report(nn.ModuleList(layers)).rows
    assert [row.held_elsewhere_bytes for row in rows] == [INPUT_BYTES, INPUT_BYTES, 0, 0]
    assert any("drop the other reference" in note for note in lowtide.report(nn.ModuleList(layers)).notes)
    grad: Tensor | None = torch.ones_like(x)
    while graphs:
        grad = DECORATED[2](grad, graphs.pop())


def test_the_backward_wrapper_loads_for_the_oldest_micro_batch_first() -> None:
    layers = [Registered() for _ in range(4)]
    queue: list[list[LayerGraph]] = []
    for index in range(2):
        x = batch(index).requires_grad_() * 1.0
        graphs = []
        for layer in layers:
            x, graph = DECORATED[0](layer, x)
            graphs.append(graph)
        queue.append(graphs)
    del x, graph, graphs
    assert stats(managers())[1] == ["host", "host"]
    seen: list[list[str]] = []

    def look(grad: Tensor, graph: LayerGraph) -> Tensor | None:
        seen.extend(stats(managers())[1:3])
        return _layer_backward(grad, graph)

    grad = swap_layer_input_fboverlap_backward_wrapper(look)(torch.ones(256, WIDTH), queue[0].pop())
    # Backward of the older one is in the last layer: the one before comes back, and the younger one's stays away.
    assert seen[1][0] in {"h2d", "device", "d2h"}
    assert seen[1][1] in {"d2h", "host"}
    for graphs in queue:
        while graphs:
            grad = DECORATED[2](grad, graphs.pop())
        grad = torch.ones(256, WIDTH)


def _cut_forward(layer: nn.Module, hidden_states: Tensor) -> tuple[Tensor, LayerGraph]:
    """As schedules do it whose layers are graphs of their own: no hook on the output can tell when backward comes."""
    cut = hidden_states.detach().requires_grad_()
    output = Block.forward(layer, cut)  # type: ignore[arg-type]
    return output.detach(), LayerGraph(layer, get_gradient_edge(output), get_gradient_edge(cut))


def test_what_the_layer_before_needs_is_on_its_way_while_the_forward_layer_runs() -> None:
    layers = [Registered() for _ in range(5)]
    x = batch()
    graphs = []
    for layer in layers:
        x, graph = swap_layer_input_fboverlap_forward_wrapper(_cut_forward)(layer, x)
        graphs.append(graph)
    assert stats(managers())[:3] == [["host"]] * 3
    seen: list[list[str]] = []

    @swap_layer_input_fboverlap_1f1b_wrapper
    def forward_first(fwd_layer: nn.Module, hidden_states: Tensor, mask: None, grad: Tensor, graph: LayerGraph) -> Any:
        out = _cut_forward(fwd_layer, hidden_states)
        seen.append([one[0] for one in stats(managers())[:3]])
        return out, _layer_backward(grad, graph)

    grad: Tensor | None = torch.ones_like(x)
    y = batch(1)
    later = []
    del x, graph
    while graphs:
        (y, graph), grad = forward_first(layers[4 - len(graphs) + 1], y, None, grad, graphs.pop())
        later.append(graph)
        del graph
    # Backward of layer 4, then 3, 2: one ahead of it each time, before it has begun.
    assert [states[position] for states, position in ((seen[1], 2), (seen[2], 1), (seen[3], 0))] == ["h2d"] * 3
    grad = torch.ones_like(y)
    while later:
        grad = DECORATED[2](grad, later.pop())


def test_an_overlap_call_without_a_backward_layer_is_a_forward() -> None:
    calls: list[Any] = []

    @swap_layer_input_fboverlap_1f1b_wrapper
    def forward(layer: nn.Module, hidden_states: Tensor, *rest: Any, **named: Any) -> Tensor:
        calls.append((rest, named))
        return Block.forward(layer, hidden_states)  # type: ignore[arg-type]

    layers = [Registered(), Registered()]
    x = batch().requires_grad_() * 1.0
    y = forward(layers[1], forward(layers[0], hidden_states=x, bwd_layer_graph=None), None, None, None)
    assert inputs_away() == 1
    y.sum().backward()
    assert calls == [((), {"bwd_layer_graph": None}), ((None, None, None), {})]


def test_micro_batches_in_one_forward_one_backward_order() -> None:
    def run(model: Stack) -> list[Tensor]:
        waiting: list[Tensor] = []
        losses = []
        for index in range(5):
            waiting.append(model(batch(index)).square().mean())
            losses.append(waiting[-1].detach().clone())
            if len(waiting) > 2:
                waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()
        return [*losses, *gradients(model)]

    want = run(build(4, recompute=False))
    assert same(want, run(build(4, Layer)))
    assert alive(managers()) == [0] * 4 if managers() else True
