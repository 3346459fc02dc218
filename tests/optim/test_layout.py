"""Where the state's bytes lie: every element once, arrays aligned and apart, segments that pin without waste."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.optim.layout import ALIGNMENT, LARGEST, STEPPED, Array, Demand, Layout, plan
from lowtide.residency.pool import size_class

FLOAT, HALF, BYTE = torch.float32, torch.bfloat16, torch.uint8
KINDS = [
    (Array("exp_avg", FLOAT), Array("exp_avg_sq", FLOAT)),
    (Array("master", FLOAT), Array("momentum", HALF)),
    (Array("residual", torch.int16), Array("sum", torch.int64, torch.Size((1,))), Array("ties", BYTE, bits=True)),
    (Array("row", FLOAT, torch.Size((3, 5))),),
    (),
]
demands = st.lists(
    st.tuples(st.integers(0, 3_000_000), st.sampled_from(KINDS), st.booleans()), min_size=1, max_size=6
).map(lambda rows: [Demand(i, n, arrays, cut) for i, (n, arrays, cut) in enumerate(rows)])


def check(layout: Layout, wanted: list[Demand]) -> None:
    pieces = sorted(
        ((p.parameter, p.start, p.stop) for segment in layout.segments for p in segment.pieces), key=lambda p: p[:2]
    )
    for demand in wanted:
        own = [(start, stop) for parameter, start, stop in pieces if parameter == demand.parameter]
        assert own[0][0] == 0
        assert own[-1][1] == demand.numel
        assert all(a[1] == b[0] for a, b in pairwise(own)), "a gap or an overlap"
        assert demand.cut or len(own) == 1
    for segment in layout.segments:
        end = 0
        for piece in segment.pieces:
            assert [e.array for e in piece.entries] == list(wanted[piece.parameter].arrays)
            for entry in piece.entries:
                assert entry.offset == end
                assert entry.offset % ALIGNMENT == 0
                assert entry.length == entry.array.length(piece.numel)
                end += entry.array.nbytes(piece.numel)
        assert segment.nbytes == end


@given(demands, st.integers(1, 40), st.booleans())
def test_every_element_lies_in_one_place(wanted: list[Demand], swap_times: int, moves: bool) -> None:  # noqa: FBT001
    check(plan(wanted, swap_times=swap_times, moves=moves), wanted)


@given(demands, st.integers(1, 1 << 26))
def test_a_bucket_may_be_given_in_bytes(wanted: list[Demand], bucket_bytes: int) -> None:
    layout = plan(wanted, bucket_bytes=bucket_bytes)
    check(layout, wanted)
    assert layout.bucket_bytes == bucket_bytes
    assert layout.window_bytes >= 2 * bucket_bytes


def test_a_larger_number_of_times_means_smaller_buckets() -> None:
    wanted = [Demand(i, 1 << 22, KINDS[0]) for i in range(8)]
    sizes = [plan(wanted, swap_times=times).bucket_bytes for times in (1, 4, 16, 64)]
    assert sizes == [(8 << 22) * 8 // times for times in (1, 4, 16, 64)]


def test_segments_of_a_large_model_waste_little_where_host_memory_comes_in_powers_of_two() -> None:
    """The shapes of a model of seven billion parameters; what is pinned is rounded up, buffer by buffer."""
    layer = [4096 * 4096] * 4 + [4096 * 11008] * 3 + [4096] * 2
    wanted = [Demand(i, n, KINDS[2] + KINDS[0]) for i, n in enumerate(layer * 8 + [32000 * 4096] * 2)]
    layout = plan(wanted, swap_times=16)
    taken = sum(1 << (size_class(s.nbytes) - 1).bit_length() for s in layout.segments)
    assert taken <= 1.02 * layout.nbytes
    assert max(s.nbytes for s in layout.segments) <= LARGEST
    assert layout.nbytes <= 1.001 * sum(d.numel for d in wanted) * 10.125


def test_where_nothing_moves_segments_are_as_long_as_a_step_likes_them() -> None:
    """No number of buckets cuts them, and a parameter that fits is not cut at all."""
    wanted = [
        Demand(0, 1 << 20, KINDS[0]),
        Demand(1, 10_000, KINDS[0]),
        Demand(2, 5 << 20, KINDS[0]),
        Demand(3, 12_000, KINDS[0]),
    ]
    layout = plan(wanted, swap_times=1000, moves=False)
    check(layout, wanted)
    assert all(segment.nbytes <= STEPPED for segment in layout.segments)
    own = [[piece.parameter for piece in segment.pieces] for segment in layout.segments]
    assert own == [[0], [2], [2], [2], [1, 3]]
