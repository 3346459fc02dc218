"""Laws of the file tier: bytes come back, extents are not shared, the file has no name, failures are told."""

# Fixed seeds are the point, and what is run is written here.
# ruff: noqa: S108, S607

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lowtide.errors import CapacityError, StateError, TierError
from lowtide.residency import spill as spill_module
from lowtide.residency.file import FileSlot, FileTicket, FileTier, measure_bandwidth

pytestmark = pytest.mark.cpu  # a file is the lower tier of plain CPU memory

PAGE = 4096
DESCRIPTORS = Path("/proc/self/fd")
BOUNCE = 64 << 10
SIZES = [0, 1, 4095, 4096, 4097, BOUNCE - 1, BOUNCE, BOUNCE + 1, 5 * BOUNCE + 123]
forks = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def back(tier: FileTier, slot: FileSlot, after: FileTicket | None = None) -> torch.Tensor:
    target = torch.full((slot.nbytes,), 0xA5, dtype=torch.uint8)
    tier.read(slot, target, after=after).wait()
    return target


def in_child(action: Callable[[], str]) -> str:
    """Run ``action`` in a forked child and return what it returned, or its exception's type and text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            said = action()
        except BaseException as error:  # noqa: BLE001  the parent judges it
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


_others: set[threading.Thread] = set()  # of graphs that other tests' peers leak (torch's failed recompute does)


@pytest.fixture(autouse=True)
def only_own_threads() -> None:
    """Count from here: what ran before this test is not its affair."""
    _others.clear()
    _others.update(threading.enumerate())


def file_threads() -> list[str]:
    own = set(threading.enumerate()) - _others
    return [thread.name for thread in own if thread.name.startswith("lowtide-file")]


def open_files() -> int:
    return len(list(DESCRIPTORS.iterdir()))


def open_names() -> dict[int, str]:
    """What the descriptors of this process point to."""
    names = {}
    for entry in DESCRIPTORS.iterdir():
        with contextlib.suppress(FileNotFoundError):
            names[int(entry.name)] = str(entry.readlink())
    return names


@pytest.fixture(params=[None, False], ids=["direct", "buffered"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileTier]:
    made = FileTier(tmp_path, bounce_bytes=BOUNCE, direct=request.param)
    yield made
    made.close()


class Gate:
    """Holds every write or read of a tier at the disk until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        real = getattr(os, name)

        def gated(*args: object) -> object:
            if threading.current_thread().name.startswith("lowtide-file"):
                self.reached.set()
                assert self.opened.wait(10)
            return real(*args)

        monkeypatch.setattr(os, name, gated)


# ---------------------------------------------------------------- bytes come back


@pytest.mark.parametrize("nbytes", SIZES)
def test_round_trip_is_bit_exact(tier: FileTier, nbytes: int) -> None:
    source = noise(nbytes)
    slot, written = tier.write(source)
    assert torch.equal(back(tier, slot, after=written), source)
    assert slot.nbytes == nbytes
    assert slot.offset % PAGE == slot.span % PAGE == 0
    assert 0 <= slot.span - nbytes < PAGE
    assert tier.live_bytes == tier.file_bytes_written == tier.file_bytes_read == nbytes


@pytest.mark.parametrize(("threads", "bounces"), [(1, 1), (1, 4), (3, 2), (2, 4)])
def test_many_concurrent_copies_from_many_threads(tmp_path: Path, threads: int, bounces: int) -> None:
    tier = FileTier(tmp_path, threads=threads, bounces=bounces, bounce_bytes=BOUNCE)
    wrong: list[str] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        live: list[tuple[torch.Tensor, FileSlot, FileTicket]] = []
        for step in range(30):
            source = noise(dice.choice([*SIZES, dice.randrange(4 * BOUNCE)]), seed * 1000 + step)
            live.append((source, *tier.write(source.clone())))
            if len(live) > 5:
                expected, slot, written = live.pop(dice.randrange(len(live)))
                if not torch.equal(back(tier, slot, after=written), expected):
                    wrong.append(f"{seed}/{step}")
                tier.release(slot)
        for expected, slot, written in live:
            if not torch.equal(back(tier, slot, after=written), expected):
                wrong.append(f"{seed}/end")
            tier.release(slot)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert not any(worker.is_alive() for worker in workers)
    assert wrong == []
    assert tier.live_bytes == 0
    tier.close()


def test_a_read_runs_after_the_write_of_its_slot(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.write(noise(1))[1].wait()
    gate = Gate(monkeypatch, "pwrite")
    source = noise(3 * BOUNCE)
    slot, written = tier.write(source)
    target = torch.zeros(slot.nbytes, dtype=torch.uint8)
    reads = [tier.read(slot, target, after=written), tier.read(slot, torch.zeros_like(target))]
    assert gate.reached.wait(10)
    assert not written.done()
    assert not any(read.done() for read in reads)
    gate.opened.set()
    for read in reads:
        read.wait()
        read.wait()
    assert written.done()
    assert torch.equal(target, source)


def test_the_ticket_keeps_the_source_until_it_is_written_and_not_longer(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.write(noise(1))[1].wait()
    gate = Gate(monkeypatch, "pwrite")
    source = noise(BOUNCE * 2)
    expected = source.clone()
    seen = weakref.ref(source)
    slot, written = tier.write(source)
    del source
    assert written.source is seen()
    assert seen() is not None
    gate.opened.set()
    written.wait()
    assert written.source is None
    assert seen() is None
    assert torch.equal(back(tier, slot), expected)


def test_the_target_of_a_read_is_dropped_too(tier: FileTier) -> None:
    slot, _ = tier.write(noise(BOUNCE))
    target = torch.empty(BOUNCE, dtype=torch.uint8)
    seen = weakref.ref(target)
    ticket = tier.read(slot, target)
    del target
    ticket.wait()
    assert seen() is None


# ---------------------------------------------------------------- extents


def test_a_training_loop_does_not_grow_the_file(tier: FileTier) -> None:
    dice = random.Random(0)
    sizes = [dice.randrange(1, 3 * BOUNCE) for _ in range(20)]
    files = []
    sources = [noise(size) for size in sizes]
    for _ in range(12):
        slots = [tier.write(source)[0] for source in sources]
        for slot in reversed(slots):
            back(tier, slot)
            tier.release(slot)
        files.append(tier.file_bytes)
    assert len(set(files)) == 1
    assert files[0] == sum(-(-size // PAGE) * PAGE for size in sizes)


def test_best_fit_takes_the_smallest_free_extent_and_neighbours_merge(tier: FileTier) -> None:
    slots = [tier.write(noise(pages * PAGE))[0] for pages in (4, 1, 2, 1, 3, 1)]
    for slot in slots:
        back(tier, slot)
    for index in (0, 2, 4):
        tier.release(slots[index])
    small, _ = tier.write(noise(2 * PAGE))
    assert small.offset == slots[2].offset
    back(tier, small)
    for slot in (small, slots[1], slots[3]):
        tier.release(slot)
    wide, _ = tier.write(noise(11 * PAGE))
    assert wide.offset == 0
    assert tier.file_bytes == 12 * PAGE


def test_live_extents_never_overlap_under_random_traffic(tmp_path: Path) -> None:
    dice = random.Random(3)
    tier = FileTier(tmp_path, bounce_bytes=BOUNCE)
    live: list[FileSlot] = []
    for _ in range(400):
        if live and dice.random() < 0.48:
            slot = live.pop(dice.randrange(len(live)))
            tier.release(slot)
        else:
            slot, written = tier.write(torch.empty(dice.randrange(20 * PAGE), dtype=torch.uint8))
            written.wait()
            live.append(slot)
        taken = sorted((slot.offset, slot.offset + slot.span) for slot in live if slot.span)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert all(end <= tier.file_bytes for _, end in taken)
        assert tier.live_bytes == sum(slot.nbytes for slot in live)
    tier.close()


def test_a_free_tail_that_the_loop_stopped_using_is_cut_off(tier: FileTier) -> None:
    def step(pages: int) -> None:
        slots = [tier.write(noise(PAGE))[0] for _ in range(pages)]
        for slot in slots:
            back(tier, slot)
            tier.release(slot)

    step(64)
    assert tier.file_bytes == 64 * PAGE
    for _ in range(40):
        step(8)
    assert tier.file_bytes == 8 * PAGE
    assert tier.trim() == 8 * PAGE
    assert tier.file_bytes == 0
    step(3)
    assert tier.file_bytes == 3 * PAGE


def test_trim_gives_the_disk_its_blocks_back(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    low, written = tier.write(noise(PAGE))
    high, _ = tier.write(noise(8 << 20))
    written.wait()
    back(tier, high)
    fd = next(fd for fd, name in open_names().items() if name.startswith(str(tmp_path)))
    assert os.fstat(fd).st_size >= (8 << 20) + PAGE
    tier.release(high)
    assert tier.trim() == 8 << 20
    assert os.fstat(fd).st_size == PAGE
    assert torch.equal(back(tier, low), noise(PAGE))
    tier.close()


def test_release_is_harmless_twice_and_ends_reading(tier: FileTier) -> None:
    slot, written = tier.write(noise(PAGE))
    written.wait()
    tier.release(slot)
    tier.release(slot)
    assert tier.live_bytes == 0
    with pytest.raises(StateError, match="released"):
        tier.read(slot, torch.empty(PAGE, dtype=torch.uint8))
    first, _ = tier.write(noise(PAGE, 1))
    tier.release(slot)
    second, _ = tier.write(noise(PAGE, 2))
    assert first.offset != second.offset


def test_an_extent_in_flight_is_not_used_again(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.write(noise(1))[1].wait()
    gate = Gate(monkeypatch, "pwrite")
    slot, written = tier.write(noise(PAGE))
    tier.release(slot)
    other, _ = tier.write(noise(PAGE, 1))
    assert other.offset != slot.offset
    gate.opened.set()
    written.wait()
    assert tier.live_bytes == PAGE + 1
    third, _ = tier.write(noise(PAGE, 2))
    assert third.offset == slot.offset
    assert torch.equal(back(tier, other), noise(PAGE, 1))
    assert torch.equal(back(tier, third), noise(PAGE, 2))


def test_a_slot_released_during_its_read_is_read_whole(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, written = tier.write(noise(3 * BOUNCE))
    written.wait()
    gate = Gate(monkeypatch, "preadv")
    target = torch.zeros(3 * BOUNCE, dtype=torch.uint8)
    read = tier.read(slot, target)
    tier.release(slot)
    tier.write(noise(3 * BOUNCE, 9))
    gate.opened.set()
    read.wait()
    assert torch.equal(target, noise(3 * BOUNCE))


# ---------------------------------------------------------------- the file has no name


def test_the_directory_stays_empty_while_in_use(tier: FileTier, tmp_path: Path) -> None:
    slot, written = tier.write(noise(BOUNCE))
    written.wait()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(back(tier, slot), noise(BOUNCE))


def test_without_o_tmpfile_the_name_is_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    refused: list[str] = []

    def refusing(path: str, flags: int, *args: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(path)
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refusing)
    tier = FileTier(tmp_path)
    slot, _ = tier.write(noise(PAGE + 1))
    assert torch.equal(back(tier, slot), noise(PAGE + 1))
    assert refused == [str(tmp_path)]
    assert list(tmp_path.iterdir()) == []
    tier.close()


@forks
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        tier = FileTier(tmp_path)
        tier.write(noise(PAGE))[1].wait()
        os.write(writing, b"x")
        time.sleep(60)
        os._exit(1)
    assert os.read(reading, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    os.close(reading)
    os.close(writing)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_forgets_to_close_exits_cleanly(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from lowtide.residency.file import FileTier\n"
        "tier = FileTier(sys.argv[1])\n"
        "kept = [tier.write(torch.ones(1 << 20, dtype=torch.uint8)) for _ in range(20)]\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- O_DIRECT is tried, not assumed


def test_where_direct_is_refused_copies_are_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def refusing(fd: int, data: bytes, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    tier = FileTier(tmp_path, bounce_bytes=BOUNCE)
    assert tier.direct is False
    slot, _ = tier.write(noise(3 * BOUNCE + 5))
    assert torch.equal(back(tier, slot), noise(3 * BOUNCE + 5))
    tier.close()
    with pytest.raises(TierError, match=r"O_DIRECT is refused.*direct=None"):
        FileTier(tmp_path, direct=True).write(noise(1))


def test_direct_can_be_declined(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, direct=False)
    assert tier.direct is False
    tier.close()


def test_partial_writes_and_reads_are_continued(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.write(noise(1))[1].wait()
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:PAGE], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, areas, offset: read(fd, [areas[0][:PAGE]], offset))
    slot, _ = tier.write(noise(BOUNCE + 77))
    assert torch.equal(back(tier, slot), noise(BOUNCE + 77))


def test_a_file_system_in_memory_is_told(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no /dev/shm")
    tier = FileTier(shared, bounce_bytes=BOUNCE)
    assert tier.in_memory
    slot, _ = tier.write(noise(BOUNCE + 1))
    assert torch.equal(back(tier, slot), noise(BOUNCE + 1))
    tier.close()
    assert not FileTier("/proc").in_memory
    assert not FileTier(tmp_path / "missing").in_memory


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("kind", ["missing", "a file", "under a file", "read-only"])
def test_an_unusable_directory_raises_at_the_first_write(tmp_path: Path, kind: str) -> None:
    (tmp_path / "plain").touch()
    directory = {
        "missing": tmp_path / "absent",
        "a file": tmp_path / "plain",
        "under a file": tmp_path / "plain" / "below",
        "read-only": Path("/proc"),
    }[kind]
    before = open_files()
    tier = FileTier(directory)
    with pytest.raises(TierError, match="cannot open its file") as caught:
        tier.write(noise(PAGE))
    assert str(directory) in str(caught.value)
    assert tier.live_bytes == 0
    assert file_threads() == []
    tier.close()
    assert open_files() == before


def test_a_budget_is_refused_before_anything_is_queued(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, budget=3 * PAGE)
    slot, _ = tier.write(noise(2 * PAGE))
    back(tier, slot)
    with pytest.raises(CapacityError, match=f"at least {4 * PAGE} bytes in total") as caught:
        tier.write(noise(2 * PAGE))
    assert not isinstance(caught.value, TierError)
    assert tier.live_bytes == tier.file_bytes_written == 2 * PAGE
    assert torch.equal(back(tier, slot), noise(2 * PAGE))
    tier.release(slot)
    whole, _ = tier.write(noise(3 * PAGE))
    assert torch.equal(back(tier, whole), noise(3 * PAGE))
    tier.close()


def test_at_the_budget_a_write_waits_for_released_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(tmp_path, budget=PAGE)
    gate = Gate(monkeypatch, "pwrite")
    slot, first = tier.write(noise(PAGE))
    tier.release(slot)
    assert gate.reached.wait(10)
    opener = threading.Timer(0.05, gate.opened.set)
    opener.start()
    again, _ = tier.write(noise(PAGE, 1))
    assert first.done()
    assert torch.equal(back(tier, again), noise(PAGE, 1))
    opener.join()
    tier.close()


def failing_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let the disk be full once the file has ``after`` bytes, as a file system without preallocation tells it."""
    real = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        room = after - offset
        if threading.current_thread().name.startswith("lowtide-file") and room < len(data):
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data[:room], offset)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(spill_module, "find_fallocate", lambda: None)


def test_a_disk_that_fills_up_is_told_by_every_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_disk(monkeypatch, after=3 * BOUNCE + PAGE)
    tier = FileTier(tmp_path, bounce_bytes=BOUNCE)
    good, _ = tier.write(noise(BOUNCE))
    source = noise(6 * BOUNCE, 1)
    slot, ticket = tier.write(source)
    read = tier.read(slot, torch.empty_like(source), after=ticket)
    for _ in range(2):
        with pytest.raises(TierError, match="ENOSPC") as caught:
            ticket.wait()
        assert str(tmp_path) in str(caught.value)
        assert str(6 * BOUNCE) in str(caught.value)
        assert "bytes free" in str(caught.value)
    assert ticket.done()
    assert ticket.source is source
    assert torch.equal(source, noise(6 * BOUNCE, 1))
    with pytest.raises(TierError, match="ENOSPC"):
        read.wait()
    with pytest.raises(TierError, match="ENOSPC"):
        back(tier, slot)
    assert tier.live_bytes == BOUNCE
    tier.release(slot)
    assert tier.live_bytes == BOUNCE
    fitting, _ = tier.write(noise(2 * BOUNCE, 2))
    assert fitting.offset == slot.offset
    assert torch.equal(back(tier, fitting), noise(2 * BOUNCE, 2))
    assert torch.equal(back(tier, good), noise(BOUNCE))
    tier.close()


@forks
@pytest.mark.parametrize("preallocate", [True, False])
def test_a_real_limit_of_the_system_is_told(tmp_path: Path, *, preallocate: bool) -> None:
    def action() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        if not preallocate:
            spill_module.find_fallocate = lambda: None
        tier = FileTier(tmp_path, bounce_bytes=BOUNCE)
        slot, _ = tier.write(noise(512 << 10))
        assert torch.equal(back(tier, slot), noise(512 << 10))
        source = noise(1 << 20, 1)
        try:
            tier.write(source)[1].wait()
        except TierError as error:
            assert torch.equal(source, noise(1 << 20, 1))
            assert torch.equal(back(tier, slot), noise(512 << 10))
            assert tier.live_bytes == 512 << 10
            return str(error)
        return "no error"

    said = in_child(action)
    assert "EFBIG" in said
    assert str(tmp_path) in said


def test_a_full_file_system_is_told_before_anything_is_queued(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small tmpfs")
    try:
        tier = FileTier(tmp_path, bounce_bytes=BOUNCE)
        slot, _ = tier.write(noise(512 << 10))
        back(tier, slot)
        with pytest.raises(TierError, match=r"room for \d+ more bytes, got \d+ bytes free, \[ENOSPC\]"):
            tier.write(noise(1 << 20))
        assert tier.file_bytes_written == tier.live_bytes == 512 << 10
        assert torch.equal(back(tier, slot), noise(512 << 10))
        tier.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_short_read_is_an_error(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, written = tier.write(noise(BOUNCE))
    written.wait()
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(TierError, match="short read"):
        back(tier, slot)
    monkeypatch.undo()
    assert torch.equal(back(tier, slot), noise(BOUNCE))


def test_an_unforeseen_failure_reaches_the_waiter(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, written = tier.write(noise(BOUNCE))
    written.wait()

    words = ["odd"]

    def broken(*_: object) -> int:
        raise ZeroDivisionError(*words)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(TierError, match="ZeroDivisionError: odd") as caught:
        back(tier, slot)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4),
        torch.zeros(2, 2, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
        torch.zeros(4, dtype=torch.uint8, device="meta"),
    ],
    ids=["float", "2-D", "strided", "meta"],
)
def test_only_plain_bytes_move(tier: FileTier, tensor: torch.Tensor) -> None:
    with pytest.raises(StateError, match="contiguous 1-D uint8 CPU tensor"):
        tier.write(tensor)
    slot, _ = tier.write(noise(4))
    with pytest.raises(StateError, match="contiguous 1-D uint8 CPU tensor"):
        tier.read(slot, tensor)
    with pytest.raises(StateError, match="of 4 elements"):
        tier.read(slot, torch.zeros(5, dtype=torch.uint8))


def test_slots_of_another_tier_are_refused(tier: FileTier, tmp_path: Path) -> None:
    slot, _ = tier.write(noise(PAGE))
    other = FileTier(tmp_path)
    with pytest.raises(StateError, match="another tier"):
        other.read(slot, torch.empty(PAGE, dtype=torch.uint8))
    with pytest.raises(StateError, match="another tier"):
        other.release(slot)
    other.close()
    with pytest.raises(StateError, match="threads"):
        FileTier(tmp_path, threads=0)


# ---------------------------------------------------------------- threads, descriptors, processes


def test_nothing_starts_before_the_first_copy_and_nothing_stays_after_close(tmp_path: Path) -> None:
    before = open_files()
    tier = FileTier(tmp_path, threads=2)
    assert file_threads() == []
    assert open_files() == before
    slot, written = tier.write(noise(BOUNCE))
    written.wait()
    assert len(file_threads()) in {2, 3}
    assert open_files() == before + 1
    tier.close()
    tier.close()
    assert file_threads() == []
    assert open_files() == before
    with pytest.raises(StateError, match="closed"):
        tier.write(noise(1))
    with pytest.raises(StateError, match="closed"):
        tier.read(slot, torch.empty(BOUNCE, dtype=torch.uint8))
    tier.release(slot)


def test_a_tier_that_nobody_holds_ends_its_threads(tmp_path: Path) -> None:
    before = open_files()
    tier = FileTier(tmp_path)
    cycle: list[object] = [tier]
    cycle.append(cycle)
    tier.write(noise(BOUNCE))[1].wait()
    del tier, cycle
    gc.collect()
    assert file_threads() == []
    assert open_files() == before


def test_close_fails_the_copies_that_have_not_begun(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.write(noise(1))[1].wait()
    gate = Gate(monkeypatch, "pwrite")
    launched = [tier.write(noise(BOUNCE, seed)) for seed in range(20)]
    read = tier.read(launched[-1][0], torch.zeros(BOUNCE, dtype=torch.uint8))
    assert gate.reached.wait(10)
    closing = threading.Thread(target=tier.close)
    closing.start()
    time.sleep(0.02)
    gate.opened.set()
    closing.join(10)
    assert not closing.is_alive()
    assert file_threads() == []
    launched[0][1].wait()
    assert all(ticket.done() for _, ticket in launched)
    for ticket in (launched[-1][1], read):
        with pytest.raises(TierError, match="closed before a copy ran"):
            ticket.wait()
    kept = launched[-1][1].source
    assert kept is not None
    assert torch.equal(kept, noise(BOUNCE, 19))


def test_closing_while_others_write_never_hangs_them(tmp_path: Path) -> None:
    for round_ in range(15):
        tier = FileTier(tmp_path, bounce_bytes=BOUNCE)
        ended: list[str] = []

        def work(tier: FileTier = tier, ended: list[str] = ended) -> None:
            try:
                while True:
                    tier.write(noise(PAGE))[1].wait()
            except (StateError, TierError) as error:
                ended.append(str(error))

        workers = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for worker in workers:
            worker.start()
        time.sleep(0.002 * (round_ % 5))
        tier.close()
        for worker in workers:
            worker.join(10)
        assert len(ended) == 3
        assert all("clos" in text for text in ended)


def test_release_is_safe_inside_a_garbage_collection(tmp_path: Path) -> None:
    """Slots die by the cycle collector, which may run while this very thread is inside the tier."""
    tier = FileTier(tmp_path, bounce_bytes=BOUNCE)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for seed in range(150):
            slot, _ = tier.write(noise(PAGE, seed))
            holder = type("Holder", (), {})()
            holder.me = holder
            weakref.finalize(holder, tier.release, slot).atexit = False
            del holder, slot
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert tier.live_bytes == 0
    tier.close()


@forks
def test_a_forked_child_cannot_use_the_parents_tier(tier: FileTier, tmp_path: Path) -> None:
    slot, written = tier.write(noise(BOUNCE))
    written.wait()

    def action() -> str:
        said = []
        calls: list[Callable[[], object]] = [
            lambda: tier.write(noise(1)),
            lambda: tier.read(slot, torch.empty(BOUNCE, dtype=torch.uint8)),
            tier.trim,
        ]
        for call in calls:
            with pytest.raises(StateError) as caught:
                call()
            said.append("process" in str(caught.value))
        tier.release(slot)
        inherited = any(str(tmp_path) in name for name in open_names().values())
        tier.close()
        own = FileTier(tmp_path)
        mine, _ = own.write(noise(PAGE, 5))
        same = torch.equal(back(own, mine), noise(PAGE, 5))
        own.close()
        return f"{said} {inherited} {tier.live_bytes} {same}"

    assert in_child(action) == "[True, True, True] False 0 True"
    assert torch.equal(back(tier, slot), noise(BOUNCE))
    again, _ = tier.write(noise(PAGE, 1))
    assert torch.equal(back(tier, again), noise(PAGE, 1))


@forks
def test_a_forked_child_cannot_wait_for_the_parents_copy(tier: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.write(noise(1))[1].wait()
    gate = Gate(monkeypatch, "pwrite")
    slot, written = tier.write(noise(PAGE))
    assert gate.reached.wait(10)

    def action() -> str:
        written.wait()
        return "waited"

    assert in_child(action).startswith("StateError: a copy of another process cannot be waited for")
    gate.opened.set()
    assert torch.equal(back(tier, slot), noise(PAGE))


# ---------------------------------------------------------------- overlap and bandwidth


def test_one_chunk_is_copied_while_another_is_at_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(tmp_path, bounce_bytes=8 * BOUNCE, bounces=3)
    if not tier.direct:
        pytest.skip("no O_DIRECT here, hence no bounce buffers")
    tier.write(noise(1))[1].wait()
    gate = Gate(monkeypatch, "pwrite")
    copies: list[int] = []
    copied = threading.Event()
    real = ctypes.memmove

    def counting(to: int, source: int, nbytes: int) -> object:
        copies.append(nbytes)
        if len(copies) == 3:
            copied.set()
        return real(to, source, nbytes)

    monkeypatch.setattr(ctypes, "memmove", counting)
    _, ticket = tier.write(noise(5 * 8 * BOUNCE))
    assert gate.reached.wait(10)
    assert copied.wait(10)
    time.sleep(0.02)
    assert copies == [8 * BOUNCE] * 3
    assert not ticket.done()
    gate.opened.set()
    ticket.wait()
    assert copies == [8 * BOUNCE] * 5
    tier.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_no_more_chunks_than_threads_are_at_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    tier = FileTier(tmp_path, bounce_bytes=BOUNCE, threads=threads)
    tier.write(noise(1))[1].wait()
    guard = threading.Lock()
    inside, most = [0], [0]
    real = os.pwrite

    def counting(fd: int, data: bytes, offset: int) -> int:
        with guard:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.005)
        try:
            return real(fd, data, offset)
        finally:
            with guard:
                inside[0] -= 1

    monkeypatch.setattr(os, "pwrite", counting)
    tier.write(noise(12 * BOUNCE))[1].wait()
    assert most[0] == threads
    tier.close()


def test_the_measured_bandwidth_is_that_of_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = measure_bandwidth(tmp_path, 8 << 20)
    assert write > 0
    assert read > 0
    real = os.pwrite

    def slow(fd: int, data: bytes, offset: int) -> int:
        if threading.current_thread().name.startswith("lowtide-file"):
            time.sleep(0.05)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    throttled, _ = measure_bandwidth(tmp_path, 8 << 20)
    assert throttled < (8 << 20) / 0.1
    assert file_threads() == []
    assert list(tmp_path.iterdir()) == []
