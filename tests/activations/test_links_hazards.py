"""Links between the layers of a chunk: writes that move no version, subclasses, streams, and what a report must say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from lowtide import checkpoint_wrapper, pure
from lowtide.activations import links
from lowtide.activations.certify import checksum
from lowtide.activations.links import CANNOT_MAKE, ELSEWHERE, GONE, NOT_OUTPUT, TOO_DEAR, UNSEEN, WRITTEN
from lowtide.errors import ModifiedError

from .kit import alive, recompute, results
from .kit import same as same_results
from .test_links import BYTES, Between, Layer, N, Stack, Twice, chunk, chunked, kept, reasons, reasons_of, same, step


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, N)


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- writes that a region sees and that move no version ------------------------------------------------


def _through_data(x: Tensor) -> None:
    x.data.mul_(0.5)


def _by_a_collective(x: Tensor) -> None:
    dist.scatter(x.detach(), [torch.full((N, N), 0.3)])


UNVERSIONED: dict[str, Callable[[Tensor], None]] = {"data": _through_data, "collective": _by_a_collective}


class Writes(Layer):
    """Overwrites its input first, or after it has read it, or last and passes it on."""

    when = ""
    write: Callable[[Tensor], None]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        write = type(self).write
        if self.when == "first":
            write(x)
            return super().forward(x)
        if self.when == "between":
            before = x * 2
            write(x)
            return super().forward(x) + before
        write(x)
        return x


@pytest.mark.cpu
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("how", UNVERSIONED)
@pytest.mark.parametrize("when", ["first", "between"])
def test_a_layer_that_writes_to_its_input_without_a_version_reads_what_it_wrote(how: str, when: str, x: Tensor) -> None:
    kind = type("Kind", (Writes,), {"when": when, "write": staticmethod(UNVERSIONED[how])})

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 1)

    model = Model(3, layer=kind)
    chunk(model.layers)
    assert same(step(Model(3, layer=kind), x), step(model, x))
    assert all(bytes_kept >= BYTES for bytes_kept in kept(model))
    assert all(reasons(model)[1:])


@pytest.mark.cpu
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("how", UNVERSIONED)
@pytest.mark.parametrize("in_chunk", [True, False])
def test_what_a_layer_overwrites_and_passes_on_is_no_output_any_more(how: str, in_chunk: bool, x: Tensor) -> None:  # noqa: FBT001
    kind = type("Kind", (Writes,), {"when": "last", "write": staticmethod(UNVERSIONED[how])})

    def build() -> Stack:
        model = Stack(4)
        model.layers[1] = kind()
        return model

    model = build()
    chunk(model.layers if in_chunk else [model.layers[0], *model.layers[2:]])
    if not in_chunk:
        checkpoint_wrapper(model.layers[1], recompute="replay")
    assert same(step(build(), x), step(model, x))
    assert reasons_of(model.layers[2]) == [(WRITTEN, BYTES)]


# ---- writes that nobody sees ---------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("how", UNVERSIONED)
@pytest.mark.parametrize("passes", [1, 4])
def test_a_write_between_the_layers_that_moves_no_version_is_kept_and_counted(how: str, passes: int, x: Tensor) -> None:
    """In every step, and where one is missing in between: it was found once, so it is looked for on."""

    def between(index: int, x: Tensor) -> Tensor:
        if index == 1 and next(calls) != 3:
            UNVERSIONED[how](x)
        return x

    calls = iter(range(100))
    want = step(Stack(3, between=between), x, steps=passes + 2)
    calls = iter(range(100))
    model = chunked(3, between=between)
    assert same(want, step(model, x, steps=passes + 2))
    assert reasons(model) == [[], [], [(UNSEEN, BYTES)]]
    assert kept(model) == [BYTES, 0, BYTES]


@pytest.mark.parametrize("frozen", [0, 1])
def test_bytes_are_compared_in_the_first_passes_alone(frozen: int, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(links, "checksum", lambda tensor: taken.append(tensor.shape) or checksum(tensor))
    model = chunked(3)
    counts = []
    for _ in range(4):
        taken.clear()
        model.zero_grad()
        for layer in model.layers[:frozen]:
            layer.requires_grad_(False)  # without a gradient it offers nothing, and a pass begins behind it
        model(x).sum().backward()
        counts.append(len(taken))
    each = 4 - 2 * frozen  # two outputs or one, each when it is made and when it is read
    assert counts == [each, each, 0, 0]


# ---- tensor subclasses: a write through one moves its own version only -----------------------------------


def _as_it_is(_index: int, x: Tensor) -> Tensor:
    return x


def _in_place(_index: int, x: Tensor) -> Tensor:
    return x.mul_(1.5)


def _in_place_sum(_index: int, x: Tensor) -> Tensor:
    x += 1.0
    return x


def _through_a_view(_index: int, x: Tensor) -> Tensor:
    view = x.view(2, -1)
    view.mul_(1.5)
    return view.view(N, N)


def _through_an_alias(_index: int, x: Tensor) -> Tensor:
    x.detach().mul_(1.5)
    return x


def _the_subclass_is_gone(_index: int, x: Tensor) -> Tensor:
    return x.mul_(1.5).redistribute(placements=[Shard(0)])  # another subclass over the same bytes


THROUGH = {
    _as_it_is: None,
    _in_place: WRITTEN,
    _in_place_sum: WRITTEN,
    _through_a_view: WRITTEN,
    _through_an_alias: WRITTEN,
    _the_subclass_is_gone: GONE,
}


class Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, 2 * N), nn.Linear(2 * N, N)

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() + self.down(self.up(x).relu())


@pytest.mark.cpu
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("between", THROUGH)
def test_a_write_to_a_distributed_tensor_between_the_layers_is_kept_and_counted(between: Between, x: Tensor) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def build() -> Stack:
        model = Stack(3, between=between, layer=Sharded)
        distribute_module(model, mesh)
        return model

    def run(model: Stack) -> list[Tensor]:
        leaf = distribute_tensor(x.clone(), mesh, [Replicate()]).requires_grad_()
        out: Any = model(leaf)
        out.square().mean().backward()
        found: list[Any] = [out.detach(), leaf.grad, *(p.grad for p in model.parameters())]
        return [one.to_local().clone() for one in found if one is not None]

    model = build()
    chunk(model.layers)
    assert same(run(build()), run(model))
    why = THROUGH[between]
    assert reasons(model)[1:] == [[(why, BYTES)] if why else []] * 2


# ---- outputs ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Late:
    hidden: Tensor
    later: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class Round:
    hidden: Tensor
    me: Any = None


@pytest.mark.parametrize("kind", [Late, Round])
def test_a_dataclass_with_an_unset_field_or_a_way_back_to_itself_is_an_output(kind: Any, x: Tensor) -> None:
    class Gives(Layer):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            out = kind(super().forward(x))
            if kind is Round:
                out.me = [out]
            return out

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).hidden
            return x

    model = Model(3, layer=Gives)
    chunk(model.layers)
    assert same(step(Model(3, layer=Gives), x), step(model, x))
    assert kept(model) == [BYTES, 0, 0]


# ---- the report --------------------------------------------------------------------------------------------


def test_an_input_that_is_kept_is_counted_although_something_smaller_is_linked(x: Tensor) -> None:
    class Pair(Layer):
        def forward(self, pair: Any) -> Any:  # type: ignore[override]
            hidden, aux = pair
            return super().forward(hidden), aux.sin()

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            aux = x.mean()
            for layer in self.layers:
                x, aux = layer((x, aux))
                x = x + 1  # the hidden states are the model's own, the other is the layer's
            return x * aux

    model = Model(3, layer=Pair)
    chunk(model.layers)
    assert same(step(Model(3, layer=Pair), x), step(model, x))
    assert reasons(model) == [[], [(NOT_OUTPUT, BYTES)], [(NOT_OUTPUT, BYTES)]]


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_layers_without_gradients_keep_nothing_and_say_so(frozen: int, x: Tensor) -> None:
    def build() -> Stack:
        model = Stack(4)
        model.layers[:frozen].requires_grad_(requires_grad=False)
        return model

    def run(model: Stack) -> list[Tensor]:
        torch.manual_seed(1)
        model(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model = build()
    chunk(model.layers)
    assert same(run(build()), run(model))
    assert kept(model) == [BYTES if index == frozen else 0 for index in range(4)]


class Opaque(nn.Module):
    """Ends with what no backward needs, made from a result that cannot be made twice and is ``wide`` times an input."""

    wide = 1

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, self.wide * N), nn.Linear(self.wide * N, N)
        self.down.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Twice.apply(self.up(x)))


@pytest.mark.parametrize("wide", [1, 4])
def test_a_chunk_never_keeps_more_than_its_layers_would_alone(wide: int, x: Tensor) -> None:
    kind = type("Kind", (Opaque,), {"wide": wide})
    alone, model = Stack(4, layer=kind), Stack(4, layer=kind)
    for layer in alone.layers:
        checkpoint_wrapper(layer, recompute="replay")
    chunk(model.layers)
    want = step(Stack(4, layer=kind), x)
    assert same(want, step(alone, x))
    assert same(want, step(model, x))
    assert sum(kept(model)) <= sum(kept(alone))
    if wide > 1:
        assert reasons(model)[1:] == [[(f"{CANNOT_MAKE}: {TOO_DEAR}", BYTES)]] * 3


# ---- graphs --------------------------------------------------------------------------------------------------


def test_any_number_of_graphs_on_one_output_leaves_nothing_behind(x: Tensor) -> None:
    model = chunked(2)
    first = model.layers[0](x.clone().requires_grad_())

    def more() -> None:
        model.layers[1](first.detach().requires_grad_()).sum().backward(retain_graph=True)

    more()
    (tape,) = [one for one in _tapes() if one.offers]
    before = alive(), len(tape.packed)
    for _ in range(5):
        more()
    assert (alive(), len(tape.packed)) == before


def _tapes() -> list[Any]:
    import gc

    from lowtide.activations.tape import Tape

    return [thing for thing in gc.get_objects() if type(thing) is Tape]


def test_a_state_that_makes_an_output_and_is_written_before_backward_raises_and_names_the_remedy(x: Tensor) -> None:
    class State(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(N, N))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            self.state.copy_(x.detach())
            return super().forward(x) + self.state

    model = chunked(2, layer=State)
    out = model(x.clone().requires_grad_()) + model(x.clone().requires_grad_())
    with pytest.raises(ModifiedError, match="full_recompute_num_layers=1"):
        out.sum().backward()


@pure
class Swish(torch.autograd.Function):
    """Reads what it saved twice, as a backward with a property or a loop does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = x.sigmoid()
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return grad * gate * (1 + again * (1 - gate)) + 0 * x


def test_a_pure_function_may_read_its_saved_tensors_twice(x: Tensor) -> None:
    """Not about links: its input was dropped when the other saved tensor had been made from it."""
    swish: Callable[..., Any] = Swish.apply
    assert same_results(results(swish, x), results(recompute(swish), x))


# ---- streams ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif("not config.getoption('--device') == 'sim'")
def test_layers_on_two_streams_are_not_linked(x: Tensor) -> None:
    def run(model: Stack) -> list[Tensor]:
        torch.manual_seed(5)
        main = torch.accelerator.current_stream()
        streams = [torch.Stream(x.device), torch.Stream(x.device)]
        leaf = hidden = x.clone().requires_grad_()
        last = main
        for index, layer in enumerate(model.layers):
            stream = streams[index % 2]
            stream.wait_stream(last)
            with stream:
                out = layer(hidden)
                hidden.record_stream(stream)  # type: ignore[arg-type]
            hidden, last = out, stream
        main.wait_stream(last)
        hidden.square().mean().backward()
        for stream in streams:
            main.wait_stream(stream)
        assert leaf.grad is not None
        return [leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    model = chunked(4)
    assert same(run(Stack(4)), run(model))
    assert [reasons_of(layer) for layer in model.layers] == [
        [],
        [(ELSEWHERE, BYTES)],
        [(ELSEWHERE, BYTES)],
        [(ELSEWHERE, BYTES)],
    ]
