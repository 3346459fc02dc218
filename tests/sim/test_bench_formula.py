"""Closed forms of a step: numbers worked out by hand, and the recurrence that they solve."""

from __future__ import annotations

import itertools

import pytest

from lowtide.bench.sim_formula import Layers, Link, hideable_bytes, stall_backward, stall_forward, step_seconds, walk

LINK = Link(1.0, 1.0)


def test_without_copies_a_step_is_the_sum_of_its_layers() -> None:
    layers = Layers(5, 2.0, 4.0, 1.0)
    assert layers.busy == 5 * 7
    assert step_seconds(layers, LINK, 0.0) == walk(layers, LINK, 0.0) == 35


def test_copies_that_fit_under_a_layer_cost_nothing() -> None:
    layers = Layers(5, 2.0, 4.0, 1.0)
    assert step_seconds(layers, LINK, 2.0) == walk(layers, LINK, 2.0) == layers.busy


def test_forward_of_four_layers_waits_for_two_copies() -> None:
    # Layer 2 begins when layer 0's bytes have left: 1 + 3; layer 3 when layer 1's have: 1 + 6. It ends at 8, not at 4.
    assert stall_forward(Layers(4, 1.0, 2.0), LINK, 3.0) == 4


def test_backward_of_four_layers_waits_for_three_copies_of_which_each_has_a_layer_above_it() -> None:
    # Each of three layers waits 3 s for its bytes, while 2 s of the layer behind it run.
    assert stall_backward(Layers(4, 1.0, 2.0), LINK, 3.0) == 3
    # Where memory is full the first load begins only when the last layer has ended: 9 s of copies under two layers.
    assert stall_backward(Layers(4, 1.0, 2.0), LINK, 3.0, full=True) == 5
    # And one copy is exposed even if a layer takes longer than it.
    assert stall_backward(Layers(4, 1.0, 5.0), LINK, 3.0, full=True) == 3


def test_one_layer_moves_nothing_and_two_move_one() -> None:
    assert step_seconds(Layers(1, 1.0, 2.0), LINK, 9.0) == walk(Layers(1, 1.0, 2.0), LINK, 9.0) == 3
    assert step_seconds(Layers(2, 1.0, 2.0), LINK, 9.0) == walk(Layers(2, 1.0, 2.0), LINK, 9.0) == 6 + 7


def test_the_directions_have_rates_of_their_own() -> None:
    layers = Layers(4, 1.0, 2.0)
    assert step_seconds(layers, Link(1.0, 100.0), 3.0) == 12 + 4
    assert step_seconds(layers, Link(100.0, 1.0), 3.0) == 12 + 3


def test_latency_comes_on_top_of_the_bytes_and_only_where_something_moves() -> None:
    link = Link(2.0, 4.0, 0.5)
    assert (link.seconds_out(3.0), link.seconds_in(3.0)) == (2.0, 1.25)
    assert (link.seconds_out(0.0), link.seconds_in(0.0)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (Link(10.0, 10.0), 10.0),  # forward's second binds
        (Link(10.0, 2.0), 5.0),  # the way back binds, although it has 2.5 s
        (Link(10.0, 10.0, 0.25), 7.5),
        (Link(10.0, 10.0, 5.0), 0.0),
    ],
)
def test_the_bytes_that_are_free_are_those_of_the_tighter_direction(link: Link, expected: float) -> None:
    layers = Layers(6, 1.0, 2.0, 0.5)
    assert hideable_bytes(layers, link) == expected
    assert step_seconds(layers, link, expected) == walk(layers, link, expected) == layers.busy


@pytest.mark.parametrize("buffers", [2, 3, 4])
@pytest.mark.parametrize("copy", [0.5, 1.0, 1.5, 4.0])
def test_more_buffers_shorten_the_wait_as_the_closed_form_says(buffers: int, copy: float) -> None:
    layers, quick_back = Layers(9, 1.0, 2.0), Link(1.0, 1e9)
    walked = walk(layers, quick_back, copy, buffers=buffers) - layers.busy
    assert walked == pytest.approx(stall_forward(layers, quick_back, copy, buffers=buffers), abs=1e-6)


SIZES = itertools.product([1, 2, 3, 4, 32], [1.0, 2.5], [0.0, 0.75], [0.25, 1.0, 2.0, 7.0], [1.0, 3.0])


@pytest.mark.parametrize(("count", "forward", "recompute", "nbytes", "inward"), list(SIZES))
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("stays", [1, 2])
@pytest.mark.parametrize("lead", [0.0, 0.5])
def test_the_closed_form_is_what_walking_the_layers_gives(
    count: int, forward: float, recompute: float, nbytes: float, inward: float, *, lead: float, stays: int, full: bool
) -> None:
    layers, link = Layers(count, forward, 2 * forward, recompute, lead), Link(1.0, inward)
    # All figures are multiples of 1/12, but for thirds: what is compared differs by rounding only.
    assert step_seconds(layers, link, nbytes, stays=stays, full=full) == pytest.approx(
        walk(layers, link, nbytes, stays=stays, full=full), rel=1e-12
    )


def test_what_is_read_late_in_backward_has_that_much_longer_to_come_back_once() -> None:
    # Three copies of 3 s begin with the last layer's backward; three layers of 2 s run before the first one's begins,
    # of which 0.5 s go by before it reads.
    assert stall_backward(Layers(4, 1.0, 2.0, lead=0.5), LINK, 3.0) == 2.5
    # Two layers stay: two copies, which begin with the second of them.
    assert stall_backward(Layers(4, 1.0, 2.0), LINK, 3.0, stays=2) == 2
    assert stall_backward(Layers(2, 1.0, 2.0), LINK, 3.0, stays=2) == 0
