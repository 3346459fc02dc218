"""The spill file itself: nameless, grown and cut in large steps, read and written in whole chunks.

Law: the file is gone when the process is, however it ends, and a forked child
never keeps it. ``O_DIRECT`` is used where trying it succeeds.

It must never know what the bytes are or who waits for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import TierError, explain

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PAGE", "Spill", "aligned", "tier_error"]

PAGE = 4096
GROWTH = 64 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNUSABLE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS})
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_PROBE_BYTES = bytes(range(256)) * (PAGE // 256)


def aligned(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def _window(address: int, nbytes: int) -> memoryview:
    """See ``nbytes`` of memory at ``address`` as a buffer; the caller keeps the memory alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def tier_error(error: OSError, directory: str, needed: int, *, problem: str) -> TierError:
    """Say in one sentence what the operating system refused, where, and what to do."""
    reason = f"[{errno.errorcode.get(error.errno or 0, '?')}] {error.strerror or error}"
    where = f"directory {directory}"
    if error.errno in _UNUSABLE:
        return TierError(
            explain(
                problem,
                expected="a directory that exists and can be written",
                got=reason,
                where=where,
                remedy="Name a writable directory on a local disk.",
            )
        )
    if error.errno not in _FULL:
        return TierError(
            explain(
                problem,
                expected="the system to carry it out",
                got=reason,
                where=where,
                remedy="Look for a fault of the disk, or name another directory.",
            )
        )
    free = "an unknown number of"
    with contextlib.suppress(OSError):
        stat = os.statvfs(directory)
        free = str(stat.f_bavail * stat.f_frsize)
    return TierError(
        explain(
            problem,
            expected=f"room for {needed} more bytes",
            got=f"{free} bytes free, {reason}",
            where=where,
            remedy="Free space there, name a directory with more, or swap less.",
        )
    )


def find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """Find the C library's ``fallocate``.

    Not ``posix_fallocate``: where the file system has no preallocation that one writes to every block.
    """
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(None, use_errno=True).fallocate64
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        function.restype = ctypes.c_int
        return function
    return None


def _open_nameless(directory: str) -> int:
    """Open a file without a name; where ``O_TMPFILE`` is refused, one whose name is removed at once."""
    flag = getattr(os, "O_TMPFILE", 0)
    if flag:
        with contextlib.suppress(OSError):
            return os.open(directory, flag | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fd, path = tempfile.mkstemp(prefix="lowtide-", dir=directory)
    Path(path).unlink()
    return fd


class Spill:
    """The open file: grows, shrinks, reads and writes whole chunks; knows the process that opened it."""

    def __init__(self, directory: str, *, direct: bool | None) -> None:
        self.directory = directory
        self.pid = os.getpid()
        self._reserved = 0
        self._fallocate = find_fallocate()
        try:
            self.fd = _open_nameless(directory)
        except OSError as error:
            raise tier_error(error, directory, PAGE, problem="the file tier cannot open its file") from error
        _open_spills.add(self)
        try:
            self.direct = direct is not False and self._accepts_direct()
            os.ftruncate(self.fd, 0)
        except OSError as error:
            self.close()
            raise tier_error(error, directory, PAGE, problem="the file tier cannot write its file") from error
        if direct and not self.direct:
            self.close()
            raise TierError(
                explain(
                    "O_DIRECT is refused",
                    expected="a file system that supports it",
                    got="a refusal",
                    where=f"directory {directory}",
                    remedy="Name a directory on a local disk, or pass direct=None.",
                )
            )

    def _accepts_direct(self) -> bool:
        """Try it: write one page and read it back; on refusal the file is left in buffered mode."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        plain = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        with mmap.mmap(-1, PAGE) as page:
            page[:] = _PROBE_BYTES
            try:
                fcntl.fcntl(self.fd, fcntl.F_SETFL, plain | flag)
                os.pwrite(self.fd, page, 0)
                page[:] = bytes(PAGE)
                if os.preadv(self.fd, [page], 0) == PAGE and page[:] == _PROBE_BYTES:
                    return True
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            fcntl.fcntl(self.fd, fcntl.F_SETFL, plain)
        return False

    def reserve(self, size: int, limit: int | None) -> None:
        """Have the disk promise ``size`` bytes, in large steps while it has them. Costs about 1 ms a GB."""
        if size <= self._reserved or self._fallocate is None:
            return
        step = min(GROWTH, max(1 << 20, 1 << size.bit_length() >> 1))
        ample = -(-size // step) * step
        for wanted in (ample if limit is None else min(ample, limit), size):
            code = self._preallocate(wanted)
            if code == 0:
                self._reserved = wanted
                return
        if code in _UNSUPPORTED:
            self._fallocate = None
            return
        error = OSError(code, os.strerror(code))
        raise tier_error(error, self.directory, size - self._reserved, problem="the file tier is full") from error

    def _preallocate(self, size: int) -> int:
        code = errno.EINTR
        while code == errno.EINTR and self._fallocate is not None:
            failed = self._fallocate(self.fd, 0, self._reserved, size - self._reserved)
            code = ctypes.get_errno() if failed else 0
        return code

    def cut(self, size: int) -> None:
        """Return everything beyond ``size`` to the disk. Costs about 0.2 s a GB on ext4."""
        os.ftruncate(self.fd, size)
        self._reserved = min(self._reserved, size)

    def write(self, address: int, offset: int, nbytes: int) -> None:
        """Write a whole chunk; a disk that fills up half-way raises ``OSError``."""
        data = _window(address, nbytes)
        done = 0
        while done < nbytes:
            moved = os.pwrite(self.fd, data[done:], offset + done)
            if self.direct:
                moved -= moved % PAGE
            if moved <= 0:
                raise OSError(errno.ENOSPC, "the disk took only a part of a write")
            done += moved

    def read(self, address: int, offset: int, nbytes: int) -> None:
        """Read a whole chunk; a file that ends early raises ``OSError``."""
        data = _window(address, nbytes)
        done = 0
        while done < nbytes:
            moved = os.preadv(self.fd, [data[done:]], offset + done)
            if self.direct and done + moved < nbytes:
                moved -= moved % PAGE
            if moved <= 0:
                raise OSError(errno.EIO, f"short read, {done} of {nbytes} bytes")
            done += moved

    def close(self) -> None:
        """Drop the file and its blocks; in a child process only the descriptor. Harmless twice."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
        os.close(fd)


_open_spills: weakref.WeakSet[Spill] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child: let go of the parent's files, so that their blocks do not outlive the parent."""
    for spill in list(_open_spills):
        spill.close()


os.register_at_fork(after_in_child=_close_inherited)
