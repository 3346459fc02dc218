"""The schedule alone: events in, actions out (rules S1-S5)."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.schedule import Action, Batch, Schedule, Verb, VisitState


def _names(actions: list[Action]) -> list[tuple[str, int]]:
    return [(a.verb.value, a.visit) for a in actions]


def _forward(
    schedule: Schedule, count: int, nbytes: int = 10, *, chained: bool = False, batch: Batch | None = None
) -> list[list[tuple[str, int]]]:
    log = []
    for index in range(count):
        visit, actions = schedule.begin_forward(batch)
        last = index == count - 1
        actions += schedule.end_forward(visit, nbytes, successor=chained and not last, tail=chained and last)
        log.append(_names(actions))
    return log


def test_learned_order_launches_a_visit_when_the_next_begins_and_never_the_last() -> None:
    schedule = Schedule()
    assert _forward(schedule, 3) == [
        [],
        [("launch_offload", 0)],
        [("wait_offload", 0), ("launch_offload", 1)],
    ]
    assert schedule.state_of(2) is VisitState.RESIDENT


def test_chain_launches_at_the_end_releases_one_later_and_keeps_the_tail() -> None:
    schedule = Schedule()
    assert _forward(schedule, 3, chained=True) == [
        [("launch_offload", 0)],
        [("launch_offload", 1)],
        [("wait_offload", 0)],
    ]
    assert schedule.state_of(2) is VisitState.RESIDENT


def test_backward_loads_what_it_needs_and_one_ahead() -> None:
    schedule = Schedule()
    _forward(schedule, 4)
    assert _names(schedule.begin_backward(3)) == []  # the one before was on its way, and stays
    assert schedule.state_of(2) is VisitState.COMING
    assert _names(schedule.begin_backward(2)) == [("launch_load", 1)]
    assert _names(schedule.begin_backward(1)) == [("launch_load", 0)]
    assert _names(schedule.begin_backward(0)) == []
    assert _names(schedule.begin_backward(0)) == []


def _micro_batches(schedule: Schedule, numbers: range, layers: int, *, owner: object = "model") -> None:
    for number in numbers:
        _forward(schedule, layers, batch=Batch(owner, number))


def _backward(schedule: Schedule, visits: range) -> list[tuple[str, int]]:
    log = []
    for visit in reversed(visits):
        log += _names(schedule.begin_backward(visit))
        schedule.forget(visit)
    return log


def test_of_several_micro_batches_the_oldest_keeps_its_last_visit_and_the_next_is_fetched_in_time() -> None:
    schedule = Schedule()
    _micro_batches(schedule, range(3), 3)
    states = [schedule.state_of(visit) for visit in range(9)]
    away, stays = VisitState.AWAY, VisitState.RESIDENT
    assert states[:6] == [away, away, stays, away, away, away]
    # Backward of the first of a micro-batch loads the last of the next.
    assert _backward(schedule, range(3)) == [("launch_load", 1), ("launch_load", 0), ("launch_load", 5)]
    _micro_batches(schedule, range(3, 4), 3)  # a forward in between, as in 1F1B
    assert _backward(schedule, range(3, 6)) == [("launch_load", 4), ("launch_load", 3), ("launch_load", 8)]


def test_models_do_not_fetch_for_each_other() -> None:
    schedule = Schedule()
    _micro_batches(schedule, range(2), 2, owner="first")
    _micro_batches(schedule, range(2, 4), 2, owner="second")
    assert [schedule.state_of(visit) for visit in (1, 5)] == [VisitState.RESIDENT] * 2
    assert _backward(schedule, range(2)) == [("launch_load", 0), ("launch_load", 3)]


def test_backwards_in_the_other_order_load_everything_once() -> None:
    schedule = Schedule()
    _micro_batches(schedule, range(3), 2)
    log = [step for first in (4, 2, 0) for step in _backward(schedule, range(first, first + 2))]
    assert len(log) == len(set(log))
    assert len(schedule) == 0


def test_prefetch_distance() -> None:
    schedule = Schedule(prefetch=2)
    _forward(schedule, 4)
    assert _names(schedule.begin_backward(3)) == [("launch_load", 1)]
    assert _names(schedule.begin_backward(2)) == [("launch_load", 0)]


def test_what_has_no_bytes_does_not_use_up_the_prefetch() -> None:
    schedule = Schedule()
    for nbytes in (10, 10, 0, 10, 0):
        visit, _ = schedule.begin_forward()
        schedule.end_forward(visit, nbytes)
    schedule.begin_forward()
    schedule.begin_forward()
    assert _names(schedule.begin_backward(3)) == [("launch_load", 3), ("launch_load", 1)]


def test_the_bound_releases_the_oldest_first_and_stops_the_prefetch() -> None:
    schedule = Schedule(in_flight_bytes=15, prefetch=3)
    visits = [schedule.begin_forward()[0] for _ in range(1)]
    log = _names(schedule.end_forward(visits[0], 10, successor=True))
    # The next unit begins and ends inside of the first one's successor without ending it: two may leave at once.
    second, _ = schedule.begin_forward()
    third, actions = schedule.begin_forward()
    schedule.end_forward(third, 10, successor=True)
    assert log == [("launch_offload", 0)]
    assert _names(actions) == [("wait_offload", 0)]
    assert _names(schedule.end_forward(second, 10, successor=True)) == [
        ("wait_offload", third),
        ("launch_offload", second),
    ]


def test_a_dead_visit_is_skipped_and_its_neighbours_stay_linked() -> None:
    schedule = Schedule()
    _forward(schedule, 4)
    schedule.forget(2)
    assert _names(schedule.begin_backward(3)) == [("launch_load", 1)]
    assert len(schedule) == 3


def test_nothing_is_launched_after_backward_has_been_there() -> None:
    schedule = Schedule()
    visit, _ = schedule.begin_forward()
    schedule.end_forward(visit, 10)
    schedule.begin_backward(visit)
    _, actions = schedule.begin_forward()
    assert actions == []


def test_a_visit_without_bytes_never_moves() -> None:
    schedule = Schedule()
    assert _forward(schedule, 3, nbytes=0) == [[], [], []]


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    bound=st.integers(1, 100),
    prefetch=st.integers(0, 4),
    chained=st.booleans(),
    per_batch=st.integers(0, 4),
    order=st.randoms(use_true_random=False),
)
def test_every_visit_moves_through_legal_states_whatever_the_order(
    *, sizes: list[int], bound: int, prefetch: int, chained: bool, per_batch: int, order: random.Random
) -> None:
    """No load without a release, no release without a launch, each at most once; no visit is left behind."""
    schedule = Schedule(prefetch=prefetch, in_flight_bytes=bound)
    where = dict.fromkeys(range(len(sizes)), "device")

    def apply(actions: list[Action]) -> None:
        legal = {
            Verb.LAUNCH_OFFLOAD: ("device", "leaving"),
            Verb.WAIT_OFFLOAD: ("leaving", "away"),
            Verb.LAUNCH_LOAD: ("away", "coming"),
        }
        for action in actions:
            before, after = legal[action.verb]
            assert where[action.visit] == before
            where[action.visit] = after

    for index, nbytes in enumerate(sizes):
        visit, actions = schedule.begin_forward(Batch("model", index // per_batch) if per_batch else None)
        apply(actions)
        last = index == len(sizes) - 1
        apply(schedule.end_forward(visit, nbytes, successor=chained and not last, tail=chained and last))
    backward = list(range(len(sizes)))
    order.shuffle(backward)
    for visit in backward:
        apply(schedule.begin_backward(visit))
        assert where[visit] in {"device", "coming", "leaving"}
        schedule.forget(visit)
    assert len(schedule) == 0
