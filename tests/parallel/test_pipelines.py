"""Pipeline schedules of torch, and one written by hand, with swapped and recomputed layers in every stage (U8, U16).

Laws: bits equal; what lies on the lower tier is in proportion to the micro-batches in flight, not to their number, and
gone after the step; a region recomputes once and its copies load once, also where backward comes in two halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .world import World

pytestmark = pytest.mark.cpu  # gloo moves host memory
V_SHAPED = ["ZBV", "DualPipeV"]
# Their ranks hold neighbouring stages. To prepare, torch 2.10 has a rank send to itself; gloo waits for that in vain.
_HANGS = pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="torch's own V-shaped schedules hang on gloo")
SCHEDULES = [
    *("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"),
    *(pytest.param(name, marks=_HANGS) for name in V_SHAPED),
]
SPLITS = {"InterleavedZeroBubble", "ZBV", "DualPipeV"}
# Forwards that wait for their backward in a rank of two; GPipe has all of them.
IN_FLIGHT = {
    "1F1B": (2, 1),
    "Interleaved1F1B": (5, 3),
    "InterleavedZeroBubble": (4, 3),
    "ZBV": (4, 4),
    "DualPipeV": (5, 5),
}
LAYERS = 2
# Bytes that one block moves: a matrix (16, 8) in float32 has 512.
ROWS, MATRIX = 16, 16 * 8 * 4
MOVED = {
    "swap": 7 * MATRIX
    + 2 * 4 * ROWS,  # two inputs, the wide one before and after its activation, noise; two statistics
    "inputs": MATRIX,
    "both": 3 * MATRIX,  # the input, and the wide product
}


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    world = World(2)
    yield world
    world.close()


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    world = World(4)
    yield world
    world.close()


def check(got: dict[str, Any], wrap: str) -> None:
    """The laws that hold for every schedule and wrap."""
    assert got["results"] > 0
    assert got["equal"]
    assert not any(got["after"])
    nbytes = MOVED.get(wrap, 0)
    regions = got["depth"] * LAYERS
    for peak in got["peaks"]:
        # S1: the last region to run stays; S5: so may, of each stage, the last one of the oldest micro-batch.
        assert (regions - 1 - got["stages"]) * nbytes <= peak <= (regions - 1) * nbytes
    assert got["in"] <= got["out"]
    assert (got["out"] > 0) == (nbytes > 0)
    assert got["late"] == 0
    again = dict(got["again"])
    again.pop("detach", None)
    if wrap == "swap":
        assert not again
        return
    once = LAYERS * got["chunks"]
    assert again["gelu"] == again["native_layer_norm"] == once
    assert again.get("addmm", 0) == (0 if wrap == "both" else once)
    assert not {"mm", "gelu_backward", "native_layer_norm_backward"} & set(again)


@pytest.mark.parametrize("wrap", ["recompute", *MOVED])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_train_alike_and_keep_what_is_in_flight(pair: World, schedule: str, wrap: str) -> None:
    for rank, got in enumerate(pair.run("pipelines.compare", schedule=schedule, wrap=wrap)):
        check(got, wrap)
        assert (got["split"] > 0) == (schedule in SPLITS)
        assert got["depth"] == IN_FLIGHT.get(schedule, (4, 4))[rank]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks_train_alike_and_keep_what_is_in_flight(four: World, schedule: str) -> None:
    batches = 8 if schedule == "DualPipeV" else 4
    ranks = four.run("pipelines.compare", schedule=schedule, wrap="both", batches=batches)
    for got in ranks:
        check(got, "both")
    if schedule == "1F1B":
        assert [got["depth"] for got in ranks] == [4, 3, 2, 1]


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_twice_the_micro_batches_swap_no_more_at_a_time(pair: World, schedule: str) -> None:
    for got, depth in zip(
        pair.run("pipelines.compare", schedule=schedule, wrap="inputs", batches=8), IN_FLIGHT[schedule], strict=True
    ):
        assert got["depth"] == depth
        check(got, "inputs")


def test_gpipe_moves_all_regions_but_the_first_and_the_last_that_backward_needs(pair: World) -> None:
    for got in pair.run("pipelines.compare", schedule="GPipe", wrap="inputs", batches=8):
        assert got["depth"] == 8
        check(got, "inputs")
        assert got["peaks"] == [(8 * LAYERS - 2) * MATRIX] * 2


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", pytest.param("ZBV", marks=_HANGS)])
def test_an_evaluation_between_two_steps_changes_nothing(pair: World, schedule: str) -> None:
    for got in pair.run("pipelines.compare", schedule=schedule, wrap="both", steps=3, evaluate=True):
        check(got, "both")


def test_a_stage_input_that_the_schedule_keeps_is_counted_as_held_elsewhere(pair: World) -> None:
    """The buffers that a stage receives into live as long as the stage, and the first stage's batch is the user's."""
    for got in pair.run("pipelines.compare", schedule="GPipe", wrap="inputs", first=0, layers=3):
        assert got["equal"]
        assert not any(got["after"])
        assert len(got["held"]) == 1  # of three layers only the first
        assert got["held"][0] >= MATRIX


@pytest.mark.parametrize("wrap", ["recompute", *MOVED])
def test_a_loop_written_by_hand_drives_one_group_per_micro_batch(four: World, wrap: str) -> None:
    batches, steps = 6, 2
    for rank, got in enumerate(four.run("pipelines.by_hand", wrap=wrap, batches=batches, steps=steps)):
        assert got["results"] > 0
        assert got["equal"]
        assert got["after"] == 0
        warm = 4 - rank  # micro-batches in flight
        assert got["peaks"] == [warm * LAYERS * MOVED.get(wrap, 0)] * steps
        assert got["in"] == got["out"] == steps * batches * LAYERS * MOVED.get(wrap, 0)
        assert got["late"] == 0
