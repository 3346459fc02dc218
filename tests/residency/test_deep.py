"""From a device through host memory into a file: bits come back, host memory is borrowed, what fails stays."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import SwapManager, SwapState, SwapTensor, device
from lowtide.errors import CapacityError, TierError
from lowtide.optim.swap import swap_optimizer
from lowtide.residency.deep import DeepCarrier

pytestmark = pytest.mark.sim

SIZES = [1, 4096, 100_001, 3 << 20]


@pytest.fixture
def where() -> Iterator[torch.device]:
    found = device.training_device()
    yield found
    device.synchronize(found)


@pytest.fixture
def carrier(where: torch.device) -> DeepCarrier:
    found = SwapManager().carrier_for(where, "file")
    assert isinstance(found, DeepCarrier)
    assert found is SwapManager().carrier_for(where, "file")
    assert found is not SwapManager().carrier_for(where)
    return found


def noise(nbytes: int, where: torch.device) -> Tensor:
    draw = torch.Generator(device="cpu").manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=draw, device="cpu").to(where)


@pytest.mark.values
def test_bytes_come_back_and_only_the_file_holds_them_meanwhile(where: torch.device, carrier: DeepCarrier) -> None:
    sources = [noise(n, where) for n in SIZES]
    expected = [s.cpu() for s in sources]
    before = device.allocated_bytes(where)
    tensors = [SwapTensor(s, carrier=carrier) for s in sources]
    del sources
    for _ in range(3):
        for tensor in tensors:
            tensor.async_offload()
        for tensor in tensors:
            tensor.wait_offload()
        assert {tensor.state for tensor in tensors} == {SwapState.HOST}
        assert device.allocated_bytes(where) <= before - sum(SIZES)
        assert carrier.live_bytes() == sum(SIZES)
        assert carrier._pinned.live_bytes() == 0
        for tensor, want in zip(tensors, expected, strict=True):
            assert torch.equal(tensor.peek(), want)
        for tensor in tensors:
            tensor.async_load()
        for tensor, want in zip(tensors, expected, strict=True):
            tensor.wait_load()
            assert torch.equal(tensor.get_val().cpu(), want)
        assert carrier.live_bytes() == 0
    traffic = SwapManager().traffic
    assert traffic.out_bytes == traffic.file_bytes_written == 3 * sum(SIZES)
    assert traffic.in_bytes == traffic.file_bytes_read == 3 * sum(SIZES)


@pytest.mark.values
def test_bytes_of_the_host_go_to_the_file_past_the_device(where: torch.device, carrier: DeepCarrier) -> None:
    flat = noise(100_001, torch.device("cpu"))
    before = device.allocated_bytes(where)
    made = SwapTensor.on_host(flat, where, carrier=carrier)
    assert device.allocated_bytes(where) == before
    assert carrier.live_bytes() == flat.numel()
    made.async_load()
    made.wait_load()
    assert torch.equal(made.get_val().cpu(), flat)


@pytest.mark.values
@pytest.mark.parametrize("late", [False, True])
def test_a_way_out_that_fails_leaves_the_bytes_on_the_device(
    where: torch.device, carrier: DeepCarrier, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    source = noise(1 << 20, where)
    tensor = SwapTensor(source, carrier=carrier)
    write = carrier._file.tier.write

    def full(source: Tensor) -> Any:
        if not late:
            raise CapacityError("no space left")
        slot, ticket = write(source)
        plain = type(ticket).wait

        def lost(ticket: Any) -> None:
            plain(ticket)  # until it has ended the writer reads the buffer
            raise TierError("no space left")

        monkeypatch.setattr(type(ticket), "wait", lost, raising=True)
        return slot, ticket

    monkeypatch.setattr(carrier._file.tier, "write", full)
    tensor.async_offload()
    with pytest.raises((CapacityError, TierError), match="no space left"):
        tensor.wait_offload()
    monkeypatch.undo()
    assert tensor.state is SwapState.DEVICE
    assert tensor.get_val().data_ptr() == source.data_ptr()
    assert carrier._pinned.live_bytes() == 0
    tensor.async_offload()
    tensor.wait_offload()
    tensor.async_load()
    tensor.wait_load()
    assert torch.equal(tensor.get_val().cpu(), noise(1 << 20, torch.device("cpu")))


@pytest.mark.values
@pytest.mark.parametrize("state", [SwapState.D2H, SwapState.HOST, SwapState.H2D])
def test_what_is_dropped_on_its_way_leaves_nothing_behind(
    where: torch.device, carrier: DeepCarrier, state: SwapState
) -> None:
    """Dropped at once, or once the threads have come: the same is left, nothing; and no one else's bytes are hit."""
    for waits in (False, True):
        tensor = SwapTensor(noise(1 << 20, where), carrier=carrier)
        tensor.async_offload()
        if state is not SwapState.D2H:
            tensor.wait_offload()
        if state is SwapState.H2D:
            tensor.async_load()
        if waits:
            carrier._out.submit(lambda: None).result()
            carrier._in.submit(lambda: None).result()
        assert tensor.state is state
        del tensor
        others = [torch.full((1 << 20,), 7, dtype=torch.uint8, device=where) for _ in range(3)]
        carrier._out.submit(lambda: None).result()
        carrier._in.submit(lambda: None).result()
        assert all(bool((one.cpu() == 7).all()) for one in others)
        assert carrier.live_bytes() == 0
        assert carrier._pinned.live_bytes() == 0


@pytest.mark.values
def test_what_comes_is_written_behind_the_compute_that_had_its_memory(
    where: torch.device, carrier: DeepCarrier
) -> None:
    n = 1 << 20
    tensor = SwapTensor(noise(n, where), carrier=carrier)
    tensor.async_offload()
    tensor.wait_offload()
    device.synchronize(where)
    for _ in range(4):
        passing = torch.ones(n, dtype=torch.uint8, device=where)
        total = passing.sum()  # reads it when it is about to be given to what comes
        del passing
        tensor.async_load()
        tensor.wait_load()
        assert int(total) == n
        assert torch.equal(tensor.get_val().cpu(), noise(n, torch.device("cpu")))
        tensor.async_offload()
        tensor.wait_offload()


def test_its_threads_end_with_it(where: torch.device) -> None:
    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith(("lowtide-to-file", "lowtide-from-file"))}

    others = threads()
    carrier = SwapManager().carrier_for(where, "file")
    tensor = SwapTensor(noise(4096, where), carrier=carrier)
    tensor.async_offload()
    tensor.wait_offload()
    tensor.async_load()
    tensor.wait_load()
    own = threads() - others
    assert len(own) == 2
    del carrier, tensor
    SwapManager().reset()
    gc.collect()
    for thread in own:
        thread.join(30)
    assert not threads() - others


@pytest.mark.values
@pytest.mark.parametrize("master", [None, "fp32"])
def test_an_optimizer_of_a_device_keeps_its_state_in_a_file(where: torch.device, master: str | None) -> None:
    dtype = torch.float32 if master is None else torch.bfloat16
    ends = []
    for tier in ("host", "file"):
        SwapManager().reset()
        draw = torch.Generator(device="cpu").manual_seed(0)
        rows = [
            torch.nn.Parameter(torch.randn(300_000, generator=draw, device="cpu").to(where, dtype)) for _ in range(4)
        ]
        optimizer = swap_optimizer(torch.optim.AdamW(rows, lr=0.01), swap_times=8, master=master, tier=tier)
        for step in range(4):
            for number, row in enumerate(rows):
                row.grad = torch.full_like(row, 0.01 * (step + number + 1))
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        report = optimizer.report()
        carriers = [SwapManager().carrier_for(rows[0].device, one) for one in (None, "file")]
        pinned = carriers[0 if tier == "host" else 1]
        pool = pinned.pool if tier == "host" else pinned._pinned.pool  # type: ignore[attr-defined]
        ends.append((rows, pool.allocated_bytes, report))
        assert report.peak_bytes <= report.window_bytes
        assert SwapManager().lower_bytes() >= report.moving_bytes
        assert carriers[1].live_bytes() == (report.moving_bytes if tier == "file" else 0)
    (host_rows, host_pinned, report), (file_rows, file_pinned, _) = ends
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(host_rows, file_rows, strict=True))
    assert host_pinned >= report.moving_bytes
    assert file_pinned <= 2 * report.window_bytes
