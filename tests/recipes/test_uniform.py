"""Whole layers in chunks (F5): of n layers the first one's input is kept, and all of them recompute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import SwapManager
from lowtide.activations.inplace import attached
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.measure import memory_curve
from lowtide.recipes.apply import Applied, apply
from lowtide.recipes.config import MemoryConfig
from lowtide.residency.group import Storage
from lowtide.residency.swap_tensor import SwapTensor

from .kit import BATCH, FLOAT, HIDDEN, SEQUENCE, Mcore, allocated, bits, build, held, ops, plain, same

INPUT = allocated(BATCH * SEQUENCE, (HIDDEN * FLOAT,))

PATCHES = allocated(BATCH * (8 * 8 + 1), (HIDDEN * FLOAT,))


def uniform(model: nn.Module, size: int, **more: Any) -> Applied:
    return apply(model, MemoryConfig(recompute_method="uniform", full_recompute_num_layers=size, **more))


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return Mcore(layers)


def kept(model: nn.Module) -> list[int]:
    return [row.kept_bytes for row in lowtide.report(model).rows]


# A model's name, and how many tensors two layers a chunk, and three, keep less than one. T5's first layers also give
# the others a table of relative positions, as large as an input: one in the encoder and two in the decoder.
MODELS = {"mcore": (1, 2), "llama": (1, 2), "gpt2-dropout": (1, 2), "vit": (1, 2), "t5-dropout": (2, 7), "bert": (1, 2)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_train_the_same_and_keep_an_input_each(name: str, size: int) -> None:
    if name != "mcore":
        pytest.importorskip("transformers")
    single, model = build(name), build(name)
    uniform(single, 1)
    uniform(model, size)
    assert same(plain(name).bits, bits(model))
    assert held(single) - held(model) == MODELS[name][size - 2] * (PATCHES if name == "vit" else INPUT)
    assert not [reason for row in lowtide.report(model).rows for reason in row.refused]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7])
def test_kept_between_forward_and_backward_is_an_input_a_chunk(size: int) -> None:
    layers, chunks = 7, -(-7 // size)
    model, one = deep(layers), deep(1)
    uniform(model, size)
    uniform(one, 1)
    bits(model, 1)
    width = BATCH * SEQUENCE * HIDDEN * FLOAT
    assert kept(model) == [width if index % size == 0 else 0 for index in range(layers)]
    assert held(model) - held(one) == (chunks - 1) * INPUT


def _peak(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        model(x).square().mean().backward()

    for _ in range(2):
        step()  # from now on gradients are there, and bytes between the layers of a chunk are not compared
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        step()
        return torch.accelerator.max_memory_allocated() - before
    return memory_curve(step, warmup=1).peak_bytes


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12])
def test_the_peak_of_backward_is_one_chunk_and_the_inputs_of_those_before_it(size: int) -> None:
    layers = 12
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    model = deep(layers)
    uniform(model, size)
    sizes = [min(size, layers - first) for first in range(0, layers, size)]
    alone = {count: _peak(deep(count), x) for count in set(sizes)}
    # Where the input of a layer is made again, the last bias's gradient of a plain stack is not there yet.
    bias = allocated(1, (HIDDEN * FLOAT,))
    want = max(number * INPUT + alone[count] for number, count in enumerate(sizes))
    assert _peak(model, x) == want - bias


@pytest.mark.parametrize("size", [1, 2, 4])
def test_backward_runs_one_forward_more(size: int) -> None:
    layers = 4
    model = deep(layers)
    bare = ops(deep(layers))
    uniform(model, size)
    extra = ops(model) - bare
    # Four products a layer; the last one of a chunk, and the sum behind it, feed nothing that backward reads.
    assert extra["addmm"] + extra["mm"] == 4 * layers - layers // size
    assert extra["native_layer_norm"] == 2 * layers
    assert extra["gelu"] == layers


# ---- what moves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["chain", "auto"])
def test_the_first_input_of_each_chunk_moves_and_no_other(schedule: str) -> None:
    SwapManager().configure(min_bytes=0)
    stays, moves = deep(9), deep(9)
    uniform(stays, 3)
    applied = uniform(moves, 3, swap_inputs=True, swap_schedule=schedule)
    assert same(bits(stays), bits(moves))
    swapped = [row.swapped_bytes for row in lowtide.report(moves).rows]
    width = BATCH * SEQUENCE * HIDDEN * FLOAT
    # The last chunk's stays: backward reads it first.
    assert swapped == [width, 0, 0, width, 0, 0, 0, 0, 0]
    assert not [reason for row in lowtide.report(moves).rows for reason in row.refused]
    assert [row.answers[0] for row in applied.rows[:3]] == [
        "recompute the layer, its inputs move",
        "recompute the layer and its input",
        "recompute the layer and its input",
    ]
    applied.undo()
    assert SwapManager().lower_bytes() == 0


@pytest.mark.parametrize("schedule", ["chain", "auto"])
def test_an_input_that_comes_back_is_asked_for_a_chunk_ahead(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SwapManager().configure(min_bytes=0)
    model = deep(12)
    uniform(model, 3, swap_inputs=True, swap_schedule=schedule)
    events: list[str] = []
    launch, back = Storage.launch_load, SwapTensor.bring_back

    def launches(self: Storage, copy_stream: Any = None) -> None:
        events.append(f"load {self.tensors[0].name}")
        launch(self, copy_stream)

    def brings(self: SwapTensor, where: str) -> Tensor:
        events.append(f"read {self.name}")
        return back(self, where)

    monkeypatch.setattr(Storage, "launch_load", launches)
    monkeypatch.setattr(SwapTensor, "bring_back", brings)
    bits(model, 1)
    # Each chunk's input begins to come back when backward of the chunk behind it begins, and no later. That of the last
    # stays, and so does that of the one before it, which is on its way when forward ends.
    assert list(dict.fromkeys(events)) == [
        "read layers.9",
        "load layers.3",
        "read layers.6",
        "load layers.0",
        "read layers.3",
        "read layers.0",
    ]


def test_one_chunk_alone_is_no_chain() -> None:
    with pytest.raises(ConfigError, match=r"expected two chunks of layers or more, got one, layers\.0"):
        uniform(Mcore(3), 3, swap_inputs=True)
    applied = uniform(Mcore(3), 3, swap_inputs=True, swap_schedule="none")
    applied.undo()


# ---- the numbers -------------------------------------------------------------------------------------


def places(model: nn.Module) -> list[tuple[int, int]]:
    found = [attached(layer) for layer in model.modules()]
    regions = [one.region for one in found if one is not None and one.region is not None]
    return [(one.place.index, one.place.count) for one in regions if one.place is not None]


def test_the_last_chunk_may_be_smaller() -> None:
    model = Mcore(7)
    applied = uniform(model, 3)
    assert places(model) == [(0, 3), (1, 3), (2, 3), (0, 3), (1, 3), (2, 3), (0, 1)]
    applied.undo()
    assert places(model) == []
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_encoder_and_decoder_share_no_chunk() -> None:
    pytest.importorskip("transformers")
    model = build("t5-gated")
    uniform(model, 2)
    assert places(model) == [(0, 2), (1, 2), (0, 1)] * 2


def test_more_layers_a_chunk_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a chunk of more layers than there are: expected at most 4 .*got 5"):
        uniform(Mcore(4), 5)


def test_the_bare_count_means_layers_a_chunk_too() -> None:
    model = Mcore(4)
    apply(model, MemoryConfig(recompute_method="uniform", recompute_num_layers=2))
    assert places(model) == [(0, 2), (1, 2)] * 2


# ---- around it ---------------------------------------------------------------------------------------


def _plus(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + args[0]


def _in_place(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out.mul_(1.5)


@pytest.mark.parametrize(
    ("between", "reason"), [(_plus, "not the very output of an earlier layer"), (_in_place, "was written to after")]
)
def test_what_the_model_does_between_its_layers_is_kept_and_reported(
    between: Callable[..., Tensor], reason: str
) -> None:
    def hooked() -> nn.Module:
        model = deep(4)
        for layer in model.layers:
            layer.register_forward_hook(between)
        return model

    want, model = bits(hooked()), hooked()
    uniform(model, 2)
    assert same(want, bits(model))
    width = BATCH * SEQUENCE * HIDDEN * FLOAT
    assert kept(model) == [width] * 4
    for index, row in enumerate(lowtide.report(model).rows):
        assert [r.bytes for why, r in row.refused.items() if reason in why] == ([width] if index % 2 else [])
    assert reason in str(lowtide.report(model)).replace("\n", " ")


def test_a_copy_trains_the_same_in_chunks_of_its_own() -> None:
    model = deep(4)
    applied = uniform(model, 2)
    other = copy.deepcopy(model)
    applied.undo()
    assert same(bits(deep(4)), bits(other))
    width = BATCH * SEQUENCE * HIDDEN * FLOAT
    assert kept(other) == [width, 0, width, 0]


def test_undo_while_a_graph_is_alive() -> None:
    def run(*, off: bool) -> list[Tensor]:
        model = deep(4)
        applied = uniform(model, 4)
        loss = model(torch.ones(BATCH, SEQUENCE, HIDDEN)).square().mean()
        if off:
            applied.undo()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert same(run(off=False), run(off=True))


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _gradients(model: nn.Module, parallel: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    parallel(torch.randn(BATCH, SEQUENCE, HIDDEN)).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [getattr(grad, "to_local", grad.clone)().clone() for grad in found]


@pytest.mark.cpu
@pytest.mark.usefixtures("one_process")
def test_data_parallel_layers_in_chunks() -> None:
    model = deep(4)
    uniform(model, 2)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    want = deep(4)
    assert same(_gradients(want, want), _gradients(model, wrapped))
    assert kept(model)[1::2] == [0, 0]


def _sharded(*, reshard: bool) -> nn.Module:
    model = deep(4)
    uniform(model, 2)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


@pytest.mark.cpu
@pytest.mark.usefixtures("one_process")
def test_sharded_layers_in_chunks_must_stay_gathered() -> None:
    model, want = _sharded(reshard=False), deep(4)
    assert same(_gradients(want, want), _gradients(model, model))
    assert kept(model)[1::2] == [0, 0]
    model = _sharded(reshard=True)
    with pytest.raises(UnsupportedError, match=r"was freed.*reshard_after_forward=False.*full_recompute_num_layers=1"):
        _gradients(model, model)
