"""One model over two ranks, with swapped and recomputed layers: data, sharded, tensor, sequence and context parallel.

Laws (U16, N1): bits equal; backward recomputes the layer once; no collective runs twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest

from .world import World

pytestmark = pytest.mark.cpu  # gloo moves host memory
# What communicates in a backward without wrapping.
COLLECTIVES = {
    "ddp": {"allreduce_"},
    "ddp-unused": {"allreduce_"},
    "ddp-static": {"allreduce_"},
    "ddp-view": {"allreduce_"},
    "ddp-first": {"allreduce_"},
    "fsdp-wrap-first": {"_allgather_base_", "_reduce_scatter_base_"},
    "fsdp-shard-first": {"_allgather_base_", "_reduce_scatter_base_"},
    "fsdp-mixed": {"_allgather_base_", "_reduce_scatter_base_"},
    "tensor": {"all_reduce"},
    "fsdp-tensor": {"all_reduce", "_allgather_base_"},
    "sequence": {"all_gather_into_tensor", "reduce_scatter_tensor"},
    "megatron": {"allreduce_"},
    "ulysses": {"alltoall_base_"},
    "ulysses-operator": {"all_to_all_single"},
}
WRAPS = ["recompute", "auto", "swap", "inputs", "both"]
LAYERS, STEPS = 3, 2
# Collectives inside of layers, in Functions that nobody declared pure.
OPAQUE = {"tensor", "fsdp-tensor", "sequence", "megatron", "ulysses", "ulysses-operator"}

ONCE = list(itertools.product(COLLECTIVES, WRAPS))
LEAVE = list(itertools.product(COLLECTIVES, ("swap", "inputs", "both")))

Found = Callable[[str], list[dict[str, Any]]]


class Worlds(dict[int, World]):
    """Worlds by their number of ranks, started when they are first asked for."""

    def __missing__(self, size: int) -> World:
        self[size] = World(size)
        return self[size]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    started = Worlds()
    yield started
    for world in started.values():
        world.close()


@pytest.fixture(scope="module")
def trained(worlds: Worlds) -> Found:
    """What training found, by rank; each kind trains once."""
    return lru_cache(lambda name: worlds[4 if name == "fsdp-tensor" else 2].run("sharded.compare", name=name))


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_training_is_the_same_and_leaves_nothing(trained: Found, name: str, wrap: str) -> None:
    for found in trained(name):
        got = found[wrap]
        assert got["results"] > 0
        assert got["equal"]
        assert got["after"] == 0
        assert got["late"] == 0


@pytest.mark.parametrize(("name", "wrap"), ONCE)
def test_a_layer_is_recomputed_once_and_no_collective_is_replayed(trained: Found, name: str, wrap: str) -> None:
    for found in trained(name):
        assert COLLECTIVES[name] <= set(found["plain"]["collectives"])
        assert not found[wrap]["collectives"]
        again = found[wrap]["again"]
        attention = next((more for name, more in again.items() if "attention" in name), 0)
        assert again.get("gelu", 0) == (0 if wrap == "swap" else LAYERS)
        assert again.get("native_layer_norm", 0) == (0 if wrap == "swap" else 2 * LAYERS)
        assert attention == (0 if wrap in {"swap", "both"} else LAYERS)
        assert not {"gelu_backward", "native_layer_norm_backward"} & set(again)


@pytest.mark.parametrize(("name", "wrap"), LEAVE)
def test_all_layers_but_the_last_leave_and_no_weight_does(trained: Found, name: str, wrap: str) -> None:
    """The last stays; the one before it is on its way when backward asks for it, and so is not loaded."""
    for found in trained(name):
        got = found[wrap]
        assert got["in"] > 0
        assert got["out"] * (LAYERS - 2) == got["in"] * (LAYERS - 1)
        assert got["out"] % (STEPS * (LAYERS - 1)) == 0
        assert not any("somebody else" in reason for reason in got["refused"])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_a_collective_made_is_kept_and_counted(trained: Found, name: str) -> None:
    for found in trained(name):
        assert bool(found["recompute"]["refused"]) == (name in OPAQUE)
        assert found["recompute"]["recomputed"] > 0


def test_no_rank_decides_alone_to_run_a_collective_again(worlds: Worlds) -> None:
    """A rank with the larger batch would run the layer again, and the other would not: neither would ever end."""
    for told in worlds[2].run("sharded.uneven"):
        assert "communicates, so it must not run twice" in told
        assert "recompute='call'" not in told


def test_one_region_over_several_units_says_what_to_do(worlds: Worlds) -> None:
    for text in worlds[2].run("sharded.over_several_units"):
        assert "the storage of a tensor that the region needs was freed" in text
        assert "wrap each unit by itself" in text
