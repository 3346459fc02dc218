"""Links between the layers of a chunk: what stands for a kept input, when it may not, and what is left behind."""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lowtide import SwapManager, checkpoint_wrapper, save_ops, unwrap
from lowtide.activations.links import CANNOT_MAKE, NOT_OUTPUT, WRITTEN, Chunk, Place
from lowtide.activations.tape import Tape
from lowtide.activations.values import Node
from lowtide.errors import CertifyError, ModifiedError

from .kit import Operators, alive, no_collector, row_of

N = 32
BYTES = N * N * 4


class Layer(nn.Module):
    """Reads its input twice, draws random numbers, and ends with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, 2 * N), nn.Linear(2 * N, N)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = F.dropout(F.gelu(self.up(F.layer_norm(x, (N,)))), 0.2)
        h = self.down(h)
        return x.tanh() + (h if scale is None else h * scale)


Between = Callable[[int, Tensor], Tensor]


class Stack(nn.Module):
    """Layers one after the other, as a model's own code calls them, with something done ``between`` them."""

    def __init__(self, count: int, between: Between = lambda _index, x: x, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = self.between(index, x)
        return x


def chunk(layers: Sequence[nn.Module], **options: Any) -> None:
    """Make these layers one chunk."""
    one = Chunk()
    for index, layer in enumerate(layers):
        checkpoint_wrapper(layer, **{"recompute": "replay", **options})
        layer.forward.region.place = Place(one, index, len(layers))


def chunked(count: int, **options: Any) -> Stack:
    model = Stack(count, **options)
    chunk(model.layers)
    return model


def step(model: nn.Module, x: Tensor, steps: int = 2) -> list[Tensor]:
    """Outputs, gradients and the generator's state of some steps."""
    torch.manual_seed(5)
    seen: list[Tensor] = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        out.square().mean().backward()
        assert leaf.grad is not None
        seen += [out.detach().clone(), leaf.grad, torch.get_rng_state()]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return seen


def same(want: list[Tensor], got: list[Tensor]) -> bool:
    return len(want) == len(got) and all(torch.equal(w, g) for w, g in zip(want, got, strict=True))


def kept(model: Any) -> list[int]:
    return [row_of(layer).kept_bytes for layer in model.layers]


def reasons(model: Any) -> list[list[tuple[str, int]]]:
    return [[(why, r.bytes) for why, r in row_of(layer).refused.items()] for layer in model.layers]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, N)


# ---- what is kept ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_chunk_keeps_its_first_input_and_trains_the_same(x: Tensor, count: int) -> None:
    model = chunked(count)
    assert same(step(Stack(count), x), step(model, x))
    assert kept(model) == [BYTES] + [0] * (count - 1)
    assert reasons(model) == [[]] * count


def test_each_operator_of_a_chunk_runs_once_more_and_no_more(x: Tensor) -> None:
    def backward(model: nn.Module) -> Any:
        out = model(x.clone().requires_grad_())
        with Operators() as operators:
            out.sum().backward()
        return operators.counts

    plain, again = backward(Stack(4)), backward(chunked(4))
    with Operators() as forward:
        Stack(4)(x.clone().requires_grad_())
    extra = again - plain
    # The last layer's second projection and its sum are needed by nobody.
    for name, count in {"addmm": 7, "gelu": 4, "native_layer_norm": 4, "tanh": 4, "add": 3}.items():
        assert extra[name] == count
        assert forward.counts[name] in {count, count + 1}


def test_what_every_layer_is_given_besides_is_kept_once_and_is_no_reason_to_complain(x: Tensor) -> None:
    class Scaled(Stack):
        def forward(self, x: Tensor) -> Tensor:
            scale = torch.linspace(0, 1, N)
            for layer in self.layers:
                x = layer(x, scale=scale)
            return x

    model = Scaled(3)
    chunk(model.layers)
    assert same(step(Scaled(3), x), step(model, x))
    assert kept(model) == [BYTES + N * 4, N * 4, N * 4]
    assert reasons(model) == [[], [], []]


def test_views_and_containers_of_an_output_are_that_output(x: Tensor) -> None:
    class Pair(Layer):
        def forward(self, x: Any) -> Any:  # type: ignore[override]
            hidden = x["hidden"] if isinstance(x, dict) else x.view(N, N)
            return {"hidden": super().forward(hidden), "aux": hidden.sum()}

    class Pairs(Stack):
        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
                x = {"hidden": x["hidden"].view(2, -1).view(N, N), "aux": x["aux"]}
            return x["hidden"] + x["aux"]

    model = Pairs(3, layer=Pair)
    chunk(model.layers)
    assert same(step(Pairs(3, layer=Pair), x), step(model, x))
    assert kept(model) == [BYTES, 0, 0]


def test_autocast_and_frozen_layers_train_the_same(x: Tensor) -> None:
    class Cast(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                return super().forward(x).float()

    for frozen in (False, True):
        plain, model = Cast(4), Cast(4)
        chunk(model.layers)
        for one in (plain, model):
            one.layers[1].requires_grad_(not frozen)
        assert same(step(plain, x), step(model, x))
        assert kept(model)[1:] == [0, 0, 0]


def test_a_chunk_of_many_layers_is_no_deep_recursion(x: Tensor) -> None:
    class Thin(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * 1.01

    assert same(step(Stack(400, layer=Thin), x), step(chunked(400, layer=Thin), x))


# ---- what is not linked is kept, and counted -----------------------------------------------------------


def test_a_sum_that_the_model_makes_is_kept_and_counted(x: Tensor) -> None:
    def plus(_index: int, x: Tensor) -> Tensor:
        return x + 1

    model = chunked(3, between=plus)
    assert same(step(Stack(3, between=plus), x), step(model, x))
    assert kept(model) == [BYTES] * 3
    assert reasons(model) == [[], [(NOT_OUTPUT, BYTES)], [(NOT_OUTPUT, BYTES)]]


def test_a_write_between_the_layers_is_kept_and_counted(x: Tensor) -> None:
    def write(index: int, x: Tensor) -> Tensor:
        return x.mul_(1.5) if index == 0 else x

    model = chunked(3, between=write)
    assert same(step(Stack(3, between=write), x), step(model, x))
    assert kept(model) == [BYTES, BYTES, 0]
    assert reasons(model) == [[], [(WRITTEN, BYTES)], []]


def test_a_layer_that_overwrites_what_it_was_given_gives_the_next_one_a_kept_input(x: Tensor) -> None:
    class Writes(Layer):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            h = x * 2  # autograd needs nothing of x for this, but making h again does
            return super().forward(h).add_(x.mul_(0.5))

    class Passes(Layer):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x.add_(super().forward(x * 2))

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 1)

    for kind in (Writes, Passes):
        model = Model(3, layer=kind)
        chunk(model.layers)
        assert same(step(Model(3, layer=kind), x), step(model, x))
    # The input that was written may come back; what stands in its storage now is nobody's output.
    assert reasons(model)[1:] == [[(NOT_OUTPUT, BYTES)]] * 2


def test_an_output_that_its_tape_cannot_make_is_kept_and_counted(x: Tensor) -> None:
    model = Stack(2)
    one = Chunk()
    for index, layer in enumerate(model.layers):
        checkpoint_wrapper(layer, save_ops("aten.add"), recompute="replay")
        layer.forward.region.place = Place(one, index, 2)
    assert same(step(Stack(2), x), step(model, x))
    assert reasons(model)[1] == [(f"{CANNOT_MAKE}: a policy keeps it", BYTES)]


class Twice(torch.autograd.Function):
    """Not declared pure: its result is a leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_an_opaque_output_is_kept_and_counted(x: Tensor) -> None:
    class Opaque(Layer):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return Twice.apply(super().forward(x))

    model = chunked(2, layer=Opaque)
    assert same(step(Stack(2, layer=Opaque), x), step(model, x))
    assert reasons(model)[1] == [(f"{CANNOT_MAKE}: autograd.Function Twice is not declared pure", BYTES)]


ORDERS = {
    "backwards": [3, 2, 1, 0],
    "one twice": [0, 1, 1, 2, 3],
    "all twice": [0, 1, 2, 3, 0, 1, 2, 3],
    "one skipped": [0, 2, 3],
    "the first alone": [0, 0, 0],
}
KEPT = {"backwards": 4, "one twice": 2, "all twice": 2, "one skipped": 1, "the first alone": 3}


@pytest.mark.parametrize("order", ORDERS)
def test_layers_in_another_order_twice_or_skipped(order: str, x: Tensor) -> None:
    calls: list[int] = []

    class Order(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for index in ORDERS[order]:
                x = self.layers[index](x)
                if "forward" in self.layers[index].__dict__:
                    calls.append(row_of(self.layers[index]).kept_bytes)
            return x

    model = Order(4)
    chunk(model.layers)
    assert same(step(Order(4), x, 1), step(model, x, 1))
    # A link goes from a layer to one that stands before it in the chunk: so none is longer than the chunk.
    assert sum(calls) == KEPT[order] * BYTES


def test_two_chunks_and_another_models_layers_do_not_mix(x: Tensor) -> None:
    model = Stack(4)
    chunk(model.layers[:2])
    chunk(model.layers[2:])
    assert same(step(Stack(4), x), step(model, x))
    assert kept(model) == [BYTES, 0, BYTES, 0]


def test_a_layer_in_call_mode_says_that_its_chunk_ends_there(x: Tensor) -> None:
    model = Stack(3)
    chunk(model.layers, recompute="call")
    assert same(step(Stack(3), x), step(model, x))
    assert all("keeps its own input" in " ".join(row_of(layer).notes) for layer in model.layers)


def test_a_chunk_in_a_full_graph_raises_and_names_the_remedy(x: Tensor) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Loop()
    chunk(model.layers)
    with pytest.raises(Exception, match="keeps the input of every layer") as raised:
        torch.compile(model, backend="eager", fullgraph=True)(x)
    assert "full_recompute_num_layers=1" in str(raised.value)
    torch.compile(model, backend="eager")(x.clone().requires_grad_())  # breaks the graph there, and keeps one input
    assert kept(model) == [BYTES, 0]
    torch.compiler.reset()


# ---- graphs --------------------------------------------------------------------------------------------

ENDINGS: dict[str, Callable[[Tensor], None]] = {
    "backward": lambda loss: loss.backward(),
    "drop": lambda loss: None,
    "retain and backward": lambda loss: (loss.backward(retain_graph=True), loss.backward())[0],
    "retain and drop": lambda loss: loss.backward(retain_graph=True),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("between", [lambda _i, x: x, lambda _i, x: x + 1, lambda _i, x: x.mul_(2)])
def test_nothing_outlives_its_graph_by_reference_counting_alone(x: Tensor, ending: str, between: Between) -> None:
    model = chunked(4, between=between)
    with no_collector():
        before = alive()
        for _ in range(2):
            loss = model(x.clone().requires_grad_()).sum()
            ENDINGS[ending](loss)
            del loss
            assert alive() == before


def test_r16_values_and_tapes_of_a_chunk_die_as_backward_goes(x: Tensor) -> None:
    model = chunked(4)
    seen: list[int] = []
    before = alive(Tape)
    h = x.clone().requires_grad_()
    for layer in model.layers:
        h = layer(h)
        h.register_hook(lambda _: seen.append(alive(Tape) - before))
    with no_collector():
        h.sum().backward()
        assert seen == [4, 3, 2, 1]
        assert alive(Tape) == before
        # The output is still there: its graph keeps no recorded operator.
        assert alive(Node) == 0


def test_retained_graphs_give_the_same_gradients_again_and_cache_nothing(x: Tensor) -> None:
    model, leaf = chunked(4), x.clone().requires_grad_()
    out = model(leaf)
    first = torch.autograd.grad(out.sum(), [leaf, *model.parameters()], retain_graph=True)
    cached = [v for layer_tape in _tapes() for v in _values(layer_tape) if v.cache is not None]
    assert not cached
    second = torch.autograd.grad(out.sum(), [leaf, *model.parameters()])
    assert same(list(first), list(second))


def _tapes() -> list[Tape]:
    import gc

    return [thing for thing in gc.get_objects() if type(thing) is Tape]


def _values(tape: Tape) -> list[Any]:
    nodes = [node for node in tape.nodes if node is not None]
    return [*tape.packed, *tape.linked, *(v for node in nodes for v in node.inputs)]


def test_evaluation_and_exceptions_leave_nothing(x: Tensor) -> None:
    class Fails(Layer):
        fail = False

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            out = super().forward(x)
            if self.fail:
                raise OSError("half-way")
            return out

    model = chunked(3, layer=Fails)
    with no_collector():
        before = alive()
        with torch.no_grad():
            model(x)
        assert alive() == before
        model.layers[2].fail = True
        leaf = x.clone().requires_grad_()
        try:
            model(leaf)
        except OSError as error:
            error.__traceback__ = None
        assert alive() == before
        model.layers[2].fail = False
    assert same(step(Stack(3, layer=Fails), x), step(model, x))


def test_a_part_of_backward_without_retaining_then_the_rest(x: Tensor) -> None:
    def run(model: Stack) -> list[Tensor]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        hidden = [leaf]
        for layer in model.layers:
            hidden.append(layer(hidden[-1]))
        (grad,) = torch.autograd.grad(hidden[4].square().sum(), [hidden[2]])
        hidden[2].backward(grad)
        assert leaf.grad is not None
        return [grad, leaf.grad]

    assert same(run(Stack(4)), run(chunked(4)))


def test_a_detached_output_is_linked_and_outlives_the_backward_of_its_layer(x: Tensor) -> None:
    def run(model: Stack, *, early: bool) -> list[Tensor]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        first = model.layers[0](leaf)
        detached = first.detach().requires_grad_()
        second = None if early else model.layers[1](detached)
        first.square().sum().backward()
        if second is None:
            second = model.layers[1](detached)  # the tape before has run its backward: nothing to stand on
        second.square().sum().backward()
        assert leaf.grad is not None
        assert detached.grad is not None
        return [leaf.grad, detached.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    for early in (False, True):
        model = chunked(2)
        assert same(run(Stack(2), early=early), run(model, early=early))
        assert kept(model) == [BYTES, BYTES if early else 0]


def test_only_some_of_the_readers_of_a_linked_input_run(x: Tensor) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.sin() * 2, x.exp().cos()

    def run(first: nn.Module, second: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        h = first(leaf)
        one, two = second(h)
        (a,) = torch.autograd.grad(one.sum(), [h])  # frees what it read
        (b,) = torch.autograd.grad(two.sum(), [h])
        h.backward(a + b)
        assert leaf.grad is not None
        return [a, b, leaf.grad]

    torch.manual_seed(0)
    linear, two = nn.Sequential(nn.Linear(N, N), nn.Tanh()), Two()
    want = run(linear, two)
    chunk([linear, two])
    assert same(want, run(linear, two))


def test_second_derivatives_are_the_same(x: Tensor) -> None:
    def run(model: Stack) -> list[Tensor]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(leaf).square().sum(), [leaf], create_graph=True)
        grad.square().sum().backward()
        assert leaf.grad is not None
        return [grad.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert same(run(Stack(3)), run(chunked(3)))


def test_a_backward_in_two_halves_runs_every_operator_once(x: Tensor) -> None:
    """First the gradients of the inputs, later those of the weights, as pipeline schedules without bubbles have it."""

    def run(model: Stack, *, halves: bool) -> tuple[list[Tensor], Counter[str]]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        loss = model(leaf).square().sum()
        with Operators() as operators:
            if halves:
                (first,), groups = stage_backward_input([loss], None, [leaf], model.parameters())
                stage_backward_weight(model.parameters(), groups)
            else:
                loss.backward()
                first = leaf.grad
        assert first is not None
        return [first, *(p.grad for p in model.parameters() if p.grad is not None)], operators.counts

    (want, plain), (got, counts) = run(Stack(3), halves=True), run(chunked(3), halves=True)
    assert same(want, got)
    (_, bare), (whole, once) = run(Stack(3), halves=False), run(chunked(3), halves=False)
    assert same(want, whole)
    for name in ("addmm", "gelu", "native_layer_norm", "tanh"):
        assert counts[name] - plain[name] == once[name] - bare[name]
    assert once["gelu"] == 3


def test_micro_batches_in_any_order(x: Tensor) -> None:
    def run(model: Stack) -> list[Tensor]:
        torch.manual_seed(1)
        hidden = [x.clone().requires_grad_(), (x * 2).requires_grad_()]
        leaves = list(hidden)
        for layer in model.layers:  # layer by layer over both
            hidden = [layer(h) for h in hidden]
        hidden[1].sum().backward()
        hidden[0].sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    model = chunked(3)
    assert same(run(Stack(3)), run(model))
    assert kept(model) == [BYTES, 0, 0]


# ---- hazards -------------------------------------------------------------------------------------------


def test_a_write_that_no_version_shows_and_that_begins_late_is_found_by_certify(x: Tensor) -> None:
    calls = 0

    def unseen(index: int, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 7:  # the fourth pass over two layers
            x.data.mul_(2)
        return x

    model = Stack(2, between=unseen)
    chunk(model.layers, certify=4)
    for _ in range(3):
        model(x.clone().requires_grad_()).sum().backward()
    with pytest.raises(CertifyError):
        model(x.clone().requires_grad_()).sum().backward()


def test_a_weight_written_before_backward_raises(x: Tensor) -> None:
    model = chunked(3)
    out = model(x.clone().requires_grad_())
    with torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    with pytest.raises((ModifiedError, RuntimeError), match="modified by an inplace operation"):
        out.sum().backward()


# ---- copies, and taking it off --------------------------------------------------------------------------


def test_copies_form_chunks_of_their_own(x: Tensor) -> None:
    model = chunked(3)
    buffer = io.BytesIO()
    torch.save(model.layers, buffer)
    buffer.seek(0)
    for layers in (copy.deepcopy(model.layers), torch.load(buffer, weights_only=False)):
        other = Stack(3)
        other.layers = layers
        assert same(step(Stack(3), x), step(other, x))
        assert kept(other) == [BYTES, 0, 0]
        places = [layer.forward.region.place for layer in layers]
        assert len({id(place.chunk) for place in places}) == 1
        assert places[0].chunk is not model.layers[0].forward.region.place.chunk


def test_an_unwrapped_layer_breaks_the_chunk_in_two(x: Tensor) -> None:
    model = chunked(3)
    unwrap(model.layers[1])
    assert same(step(Stack(3), x), step(model, x))
    assert reasons_of(model.layers[2]) == [(NOT_OUTPUT, BYTES)]


def reasons_of(layer: Any) -> list[tuple[str, int]]:
    return [(why, r.bytes) for why, r in row_of(layer).refused.items()]


def test_taking_it_off_leaves_living_graphs_as_they_are(x: Tensor) -> None:
    def run(model: Stack, *, off: bool) -> list[Tensor]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        if off:
            for layer in model.layers:
                unwrap(layer)
        out.sum().backward()
        assert leaf.grad is not None
        return [leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert same(run(Stack(3), off=False), run(chunked(3), off=True))


def test_a_region_around_the_whole_model_takes_over(x: Tensor) -> None:
    model = chunked(3)
    checkpoint_wrapper(model, recompute="replay")
    assert same(step(Stack(3), x), step(model, x))
    assert row_of(model).kept_bytes == BYTES


def test_a_learned_order_moves_the_first_input_alone(x: Tensor) -> None:
    from lowtide import auto

    SwapManager().configure(min_bytes=0)
    model = Stack(6)
    for first in (0, 3):
        chunk(model.layers[first : first + 3], swap_inputs=True)
    switch = auto(model)
    assert same(step(Stack(6), x), step(model, x))
    switch.undo()
    assert SwapManager().lower_bytes() == 0
