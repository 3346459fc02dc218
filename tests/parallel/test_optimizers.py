"""Wrapped optimizers over shards and replicas (O3, O4), and checkpoints, which other worlds and plain ones load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .world import World

pytestmark = pytest.mark.cpu  # gloo moves host memory


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    made = {size: World(size) for size in (1, 2)}
    yield made
    for world in made.values():
        world.close()


@pytest.mark.parametrize("way", ["swapped", "offloaded", "late"])
def test_steps_over_shards_have_the_plain_bits(worlds: dict[int, World], way: str) -> None:
    assert worlds[2].run("optimizers.fully_sharded", way=way) == [{"weights": True, "state": True}] * 2


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("way", ["swapped", "offloaded", "late"])
def test_steps_over_replicas_have_the_plain_bits(worlds: dict[int, World], way: str, *, views: bool) -> None:
    found = worlds[2].run("optimizers.replicated", way=way, views=views)
    assert found == [{"norms": True, "weights": True, "state": True}] * 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_by_two_plain_and_swapped(
    worlds: dict[int, World], tmp_path: Path, *, asynchronous: bool
) -> None:
    worlds[2].run("optimizers.save", folder=str(tmp_path), asynchronous=asynchronous)
    for size, world in worlds.items():
        plain = world.run("optimizers.load", folder=str(tmp_path), wraps=False)
        swapped = world.run("optimizers.load", folder=str(tmp_path), wraps=True)
        assert len(plain) == size
        assert swapped == plain, size
