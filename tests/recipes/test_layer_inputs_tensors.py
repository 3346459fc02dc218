"""``SwapTensors`` by hand, ``is_valid_for_swap``, and what the system says of its memory (L2, L3, L9)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide import SwapManager
from lowtide.errors import CapacityError, ModifiedError, StateError, WrapError
from lowtide.recipes.layer_inputs import SwapTensors, is_valid_for_swap
from lowtide.recipes.layer_inputs_room import check_room, needed_bytes
from lowtide.residency.room import available_host_bytes


def _values(count: int = 4096) -> Tensor:
    return torch.arange(float(count))


def _away(tensors: SwapTensors) -> None:
    tensors.swap_to_host()
    tensors.wait_d2h()


def test_what_is_valid_for_swap() -> None:
    marked, unmarked = _values(), _values()
    marked.swap_this_tensor = True  # type: ignore[attr-defined]
    unmarked.swap_this_tensor = False  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(_values())
    assert is_valid_for_swap(_values())
    assert is_valid_for_swap(marked)
    assert is_valid_for_swap(_values()[3:7])
    assert not is_valid_for_swap(unmarked)
    assert not is_valid_for_swap(parameter)
    assert not is_valid_for_swap(parameter[:4])
    assert not is_valid_for_swap(parameter.view(2, -1).t())
    assert not is_valid_for_swap(torch.empty(0))
    assert not is_valid_for_swap(torch.empty(4, device="meta"))
    assert not is_valid_for_swap(torch.eye(3, device="cpu").to_sparse())
    assert not is_valid_for_swap(None)
    assert not is_valid_for_swap(3.0)


def test_a_check_of_one_s_own_decides_last_and_is_not_asked_for_what_is_invalid() -> None:
    asked: list[int] = []

    def large(tensor: Tensor) -> bool:
        asked.append(tensor.numel())
        return tensor.numel() > 100

    assert is_valid_for_swap(_values(), large)
    assert not is_valid_for_swap(_values(10), large)
    assert not is_valid_for_swap(torch.nn.Parameter(_values()), large)
    assert asked == [4096, 10]


def test_the_states_in_order_and_the_bits_come_back() -> None:
    values = [_values(), torch.randn(64, 32).t(), torch.randint(0, 9, (2000,))]
    want = [value.clone() for value in values]
    tensors = SwapTensors(values)
    assert tensors.stat == "device"
    assert tensors.nbytes == sum(value.untyped_storage().nbytes() for value in want)
    tensors.swap_to_host()
    assert tensors.stat == "d2h"
    del values
    tensors.wait_d2h()
    assert tensors.stat == "host"
    assert not tensors.held_elsewhere
    assert SwapManager().lower_bytes() >= tensors.nbytes
    tensors.swap_to_device()
    assert tensors.stat == "h2d"
    tensors.wait_h2d()
    assert tensors.stat == "device"
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(want, tensors.tensors, strict=True))
    assert SwapManager().lower_bytes() == 0


def test_repeated_calls_are_harmless() -> None:
    tensors = SwapTensors(_values())
    for verb in (tensors.swap_to_host, tensors.wait_d2h, tensors.swap_to_device, tensors.wait_h2d):
        verb()
        state = tensors.stat
        verb()
        assert tensors.stat == state
    assert SwapManager().traffic.out_bytes == SwapManager().traffic.in_bytes == 4096 * 4
    # Another round.
    _away(tensors)
    tensors.swap_to_device()
    tensors.wait_h2d()
    assert torch.equal(tensors.tensors[0], _values())


WRONG: list[tuple[list[str], str, str]] = [
    ([], "wait_d2h", "Call swap_to_host first"),
    ([], "swap_to_device", "Call swap_to_host and wait_d2h first"),
    ([], "wait_h2d", "Call swap_to_host, wait_d2h and swap_to_device first"),
    (["swap_to_host"], "swap_to_device", "Call wait_d2h first"),
    (["swap_to_host"], "wait_h2d", "Call wait_d2h and swap_to_device first"),
    (["swap_to_host", "wait_d2h"], "wait_h2d", "Call swap_to_device first"),
    (["swap_to_host", "wait_d2h", "swap_to_device"], "swap_to_host", "Call wait_h2d first"),
]


@pytest.mark.parametrize(("before", "call", "remedy"), WRONG)
def test_a_call_that_does_not_fit_names_the_missing_one(before: list[str], call: str, remedy: str) -> None:
    tensors = SwapTensors(_values())
    for verb in before:
        getattr(tensors, verb)()
    with pytest.raises(StateError, match=remedy):
        getattr(tensors, call)()


def test_the_tensors_are_only_given_out_on_the_device() -> None:
    tensors = SwapTensors(_values())
    _away(tensors)
    with pytest.raises(StateError, match="Call swap_to_device and wait_h2d first"):
        _ = tensors.tensors
    with pytest.raises(StateError, match="add_tensor does not fit"):
        tensors.add_tensor(_values())
    tensors.swap_to_device()
    with pytest.raises(StateError, match="Call wait_h2d first"):
        _ = tensors.tensors
    tensors.wait_h2d()


def test_slices_keep_their_base_and_share_one_copy() -> None:
    base = _values()
    want = base.clone()
    tensors = SwapTensors([base[10:20], base.view(64, 64)[:, 3], base, _values(16)])
    assert tensors.is_slice_tensors == [True, True, False, False]
    assert tensors.nbytes == 4096 * 4 + 16 * 4
    _away(tensors)
    assert tensors.held_elsewhere
    assert torch.equal(base, want)  # nobody emptied it
    tensors.swap_to_device()
    tensors.wait_h2d()
    first, second, whole, _ = tensors.tensors
    assert torch.equal(first, want[10:20])
    assert torch.equal(second, want.view(64, 64)[:, 3])
    assert torch.equal(whole, want)
    assert first.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_invalid_tensors_are_refused_with_their_reason() -> None:
    for wrong, reason in (
        (torch.nn.Parameter(_values()), "parameter"),
        (torch.empty(0), "storage is empty"),
        (_values(), "custom_check_fn refused it"),
    ):
        with pytest.raises(WrapError, match=reason):
            SwapTensors([_values(8), wrong], lambda tensor: tensor.numel() < 10)


def test_an_empty_list_is_a_list() -> None:
    tensors = SwapTensors()
    _away(tensors)
    tensors.swap_to_device()
    tensors.wait_h2d()
    assert (len(tensors), tensors.stat, tensors.tensors, tensors.nbytes) == (0, "device", [], 0)


def test_a_write_between_is_noticed() -> None:
    value = _values()
    tensors = SwapTensors(value)
    value.add_(1)
    with pytest.raises(ModifiedError, match="modified"):
        tensors.swap_to_host()


@pytest.mark.cpu
def test_without_an_accelerator_there_are_no_host_copies_to_look_at() -> None:
    tensors = SwapTensors([_values(), _values()[2:4]])
    _away(tensors)
    assert tensors.tensor_cpus == [None, None]


@pytest.mark.sim
@pytest.mark.values
def test_the_host_copies_are_pinned_and_look_as_the_tensors_do() -> None:
    base = torch.arange(4096.0, device="sim")
    tensors = SwapTensors([base[8:24], base.view(64, 64).t()])
    assert tensors.tensor_cpus == [None, None]
    _away(tensors)
    torch.accelerator.synchronize()
    copies = tensors.tensor_cpus
    want = torch.arange(4096.0)
    for copy, expected in zip(copies, (want[8:24], want.view(64, 64).t()), strict=True):
        assert copy is not None
        assert copy.device.type == "cpu"
        assert copy.is_pinned()
        assert torch.equal(copy, expected)
    del copy, copies
    tensors.swap_to_device()
    tensors.wait_h2d()
    assert tensors.tensor_cpus == [None, None]


# ---- how much memory there is (L9) --------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[dict[str, str]], tuple[Path, Path]]:
    def build(files: dict[str, str]) -> tuple[Path, Path]:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
        return tmp_path / "proc", tmp_path / "cgroup"

    return build


MEMINFO = "MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:  40 kB\n"


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 40 * 1024),
        # Version 2: a limit of its own, file pages are given up; a parent that is narrower; "max" is no limit.
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "cgroup/job/memory.max": "9000",
                "cgroup/job/memory.current": "5000",
                "cgroup/job/memory.stat": "anon 7\ninactive_file 500\n",
            },
            4500,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "cgroup/a/memory.max": "3000",
                "cgroup/a/memory.current": "1000",
                "cgroup/a/b/memory.max": "max",
                "cgroup/a/b/memory.current": "900",
            },
            2000,
        ),
        # In a container the group's name is the host's, and its folder is the root.
        (
            {
                "proc/self/cgroup": "0::/host/name\n",
                "cgroup/memory.max": "800",
                "cgroup/memory.current": "100",
            },
            700,
        ),
        # Version 1.
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n2:memory:/job\n",
                "cgroup/memory/job/memory.limit_in_bytes": "600",
                "cgroup/memory/job/memory.usage_in_bytes": "650",
            },
            0,
        ),
    ],
)
def test_the_memory_that_is_there(
    machine: Callable[[dict[str, str]], tuple[Path, Path]], files: dict[str, str], expected: int | None
) -> None:
    assert available_host_bytes(*machine(files)) == expected


def test_the_bytes_that_are_needed() -> None:
    assert needed_bytes(1, 100, 8) == 0
    assert needed_bytes(32, 100) == 3100
    assert needed_bytes(32, 100, 4) == 12400


@pytest.mark.cpu
def test_a_disk_without_room_is_named_with_its_directory(tmp_path: Path) -> None:
    SwapManager().configure(file_dir=str(tmp_path))
    with pytest.raises(CapacityError, match=r"bytes of free space in .* Name another directory"):
        check_room(torch.device("cpu"), 3, 1 << 60, 1, "layers")
    check_room(torch.device("cpu"), 1, 1 << 60, 1, "layers")  # the last layer's input never leaves


@pytest.mark.sim
def test_host_memory_without_room_is_found() -> None:
    with pytest.raises(CapacityError, match="bytes of host memory that is available"):
        check_room(torch.device("sim"), 3, 1 << 60, 1, "layers")
