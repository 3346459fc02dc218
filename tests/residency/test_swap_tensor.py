"""The state machine of one tensor, and what moves together."""

from __future__ import annotations

import gc

import pytest
import torch

from lowtide import Storage, SwapGroup, SwapManager, SwapState, SwapTensor
from lowtide.errors import CapacityError, ModifiedError, ScheduleError, StateError, TierError
from lowtide.residency.swap_tensor import launch_load, launch_offload


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(
        a.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8),
        b.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8),
    )


VIEWS = {
    "dense": lambda: torch.randn(5, 7),
    "transposed": lambda: torch.randn(5, 7).t(),
    "expanded": lambda: torch.randn(1, 7).expand(5, 7),
    "slice of a bigger buffer": lambda: torch.randn(100, 7)[10:15, ::2],
    "conjugate": lambda: torch.randn(5, 7, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(5, 7, dtype=torch.complex64).conj().imag,
    "bfloat16": lambda: torch.randn(5, 7).bfloat16(),
    "bool": lambda: torch.randn(5, 7) > 0,
    "no dimensions": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "reinterpreted": lambda: torch.randn(8).view(torch.int16)[1:5],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_round_trip_gives_the_same_bits_layout_and_lazy_bits(name: str) -> None:
    tensor = VIEWS[name]()
    expected = tensor.clone()
    swap = SwapTensor(tensor)
    layout = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
    swap.async_offload()
    assert swap.state is SwapState.D2H
    swap.wait_offload()
    assert swap.state is SwapState.HOST
    swap.async_load()
    assert swap.state is SwapState.H2D
    swap.wait_load()
    assert swap.state is SwapState.DEVICE
    back = swap.get_val()
    assert (back.size(), back.stride(), back.storage_offset(), back.is_conj(), back.is_neg()) == layout
    assert _same_bits(back, expected)


@pytest.mark.cpu
def test_the_whole_storage_moves_once_and_the_device_bytes_are_freed() -> None:
    tensor = torch.randn(1000, 1000)[3:4]
    swap = SwapTensor(tensor)
    reference = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    assert swap.nbytes == 4_000_000
    del tensor
    swap.async_offload()
    swap.wait_offload()
    assert reference.expired()
    assert SwapManager().lower_bytes() == 4_000_000
    swap.async_load()
    swap.wait_load()
    assert SwapManager().lower_bytes() == 0


def test_bytes_that_somebody_else_holds_are_not_freed_and_it_says_so() -> None:
    tensor = torch.randn(10)
    before = tensor.clone()
    swap = SwapTensor(tensor)
    swap.async_offload()
    swap.wait_offload()
    assert swap.held_elsewhere
    assert torch.equal(tensor, before)


def test_repeated_calls_are_harmless() -> None:
    swap = SwapTensor(torch.randn(4))
    for _ in range(2):
        swap.async_offload()
    for _ in range(2):
        swap.wait_offload()
    for _ in range(2):
        swap.async_load()
    for _ in range(2):
        swap.wait_load()
    swap.wait_offload()
    assert swap.state is SwapState.DEVICE


def _at(state: SwapState) -> SwapTensor:
    swap = SwapTensor(torch.randn(4))
    for wanted, verb in (
        (SwapState.D2H, swap.async_offload),
        (SwapState.HOST, swap.wait_offload),
        (SwapState.H2D, swap.async_load),
    ):
        if swap.state is state:
            break
        verb()
        assert swap.state is wanted
    return swap


@pytest.mark.parametrize(
    ("state", "verb", "missing"),
    [
        (SwapState.DEVICE, "wait_offload", "async_offload"),
        (SwapState.DEVICE, "async_load", "async_offload and wait_offload"),
        (SwapState.D2H, "async_load", "wait_offload"),
        (SwapState.D2H, "wait_load", "async_load"),
        (SwapState.HOST, "wait_load", "async_load"),
        (SwapState.HOST, "get_val", "async_load and wait_load"),
        (SwapState.H2D, "get_val", "wait_load"),
        (SwapState.H2D, "async_offload", "wait_load"),
    ],
)
def test_a_wrong_call_raises_names_the_missing_one_and_changes_nothing(
    state: SwapState, verb: str, missing: str
) -> None:
    swap = _at(state)
    with pytest.raises(StateError, match=f"Call {missing} first"):
        getattr(swap, verb)()
    assert swap.state is state


@pytest.mark.cpu  # on an accelerator this is a race besides, which fails any test
def test_a_write_while_it_leaves_is_noticed_when_it_is_back() -> None:
    source = torch.randn(300, 300)
    tensor = SwapTensor(source)
    tensor.async_offload()
    source.add_(1)
    tensor.wait_offload()
    tensor.async_load()
    tensor.wait_load()
    with pytest.raises(ModifiedError, match=r"expected version 0, got version 1 of a \(300, 300\)"):
        tensor.get_val()


def test_a_change_after_it_was_handed_over_is_noticed() -> None:
    tensor = torch.randn(4)
    swap = SwapTensor(tensor)
    tensor.add_(1)
    with pytest.raises(ModifiedError, match="modified by an inplace operation"):
        swap.async_offload()


def test_dropping_it_in_any_state_gives_the_lower_bytes_back() -> None:
    for state in SwapState:
        swap = _at(state)
        del swap
        gc.collect()
        assert SwapManager().lower_bytes() == 0, state


def test_aliases_share_one_copy() -> None:
    manager = SwapManager()
    base = torch.randn(64, 64)
    first = manager.adopt(base, "a")
    second = manager.adopt(base.t(), "b")
    assert first is second
    other = manager.adopt(base.clone(), "c")
    assert other is not first
    base.add_(1)
    assert manager.adopt(base, "d") is not first


@pytest.mark.cpu
def test_a_tensor_that_is_named_twice_moves_once() -> None:
    storage = Storage("layer")
    swap = SwapTensor(torch.randn(100))
    storage.swap(swap)
    storage.swap(swap)
    launch_offload([swap, swap])
    storage.launch_offload()
    storage.wait_offload()
    assert SwapManager().lower_bytes() == SwapManager().traffic.out_bytes == 400
    launch_load([swap, swap])
    storage.wait_load()
    assert SwapManager().lower_bytes() == 0
    assert SwapManager().traffic.in_bytes == 400


def test_a_budget_that_is_too_small_says_how_much_is_needed_and_keeps_the_tensor() -> None:
    SwapManager().configure(host_bytes=4096)
    tensor = torch.randn(2048)
    swap = SwapTensor(tensor)
    with pytest.raises(CapacityError, match="8192"):
        swap.async_offload()
    assert swap.state is SwapState.DEVICE
    assert torch.equal(swap.get_val(), tensor)


@pytest.mark.cpu
def test_a_missing_directory_says_so_and_keeps_the_tensor(tmp_path: object) -> None:
    SwapManager().configure(file_dir=str(tmp_path) + "/missing")
    swap = SwapTensor(torch.randn(1000))
    with pytest.raises(TierError, match="missing"):
        swap.async_offload()
    assert swap.state is SwapState.DEVICE


class TestGroup:
    def _filled(self) -> tuple[SwapGroup, Storage, list[torch.Tensor]]:
        tensors = [torch.randn(100), torch.randn(50, 3).t()]
        storage = Storage("layer")
        for tensor in tensors:
            storage.swap(SwapTensor(tensor))
        group = SwapGroup("g")
        group.add(storage)
        return group, storage, [t.clone() for t in tensors]

    def test_a_cycle_brings_every_tensor_back(self) -> None:
        group, storage, expected = self._filled()
        group.launch_offload()
        group.wait_offload()
        assert {t.state for t in storage.tensors} == {SwapState.HOST}
        group.launch_load()
        group.wait_load()
        assert all(torch.equal(t.get_val(), e) for t, e in zip(storage.tensors, expected, strict=True))

    @pytest.mark.parametrize(
        ("call", "missing"),
        [
            ("wait_offload", "launch_offload"),
            ("launch_load", "launch_offload and wait_offload"),
            ("wait_load", "launch_offload, wait_offload and launch_load"),
        ],
    )
    def test_a_wrong_call_names_the_missing_one(self, call: str, missing: str) -> None:
        group, _storage, _ = self._filled()
        with pytest.raises(StateError, match=f"Call {missing} for 'g' first"):
            getattr(group, call)()

    def test_a_group_that_was_never_filled_raises(self) -> None:
        with pytest.raises(ScheduleError, match="never filled"):
            SwapGroup("empty").launch_offload()
        with pytest.raises(ScheduleError, match="never filled"):
            SwapManager().launch_offload("nobody")

    @pytest.mark.cpu
    def test_a_group_does_not_keep_its_tensors_alive(self) -> None:
        group, storage, _ = self._filled()
        group.launch_offload()
        group.wait_offload()
        assert SwapManager().lower_bytes() == 1000
        del storage
        gc.collect()
        assert SwapManager().lower_bytes() == 0
        group.launch_load()  # nothing is left of that graph: nothing to do


class TestChain:
    def test_a_cycle_raises(self) -> None:
        a, b, c, alone = (torch.nn.Linear(1, 1) for _ in range(4))
        manager = SwapManager()
        manager.set_forward_prefetch_layer(a, b)
        manager.set_forward_prefetch_layer(b, c)
        with pytest.raises(ScheduleError, match="cycle"):
            manager.set_forward_prefetch_layer(c, a)
        with pytest.raises(ScheduleError, match="cycle"):
            manager.set_forward_prefetch_layer(alone, alone)

    def test_a_second_neighbour_raises_and_the_same_edge_twice_is_harmless(self) -> None:
        a, b, c = (torch.nn.Linear(1, 1) for _ in range(3))
        manager = SwapManager()
        manager.set_forward_prefetch_layer(a, b)
        manager.set_forward_prefetch_layer(a, b)
        with pytest.raises(ScheduleError, match="successor"):
            manager.set_forward_prefetch_layer(a, c)
        with pytest.raises(ScheduleError, match="predecessor"):
            manager.set_forward_prefetch_layer(c, b)
