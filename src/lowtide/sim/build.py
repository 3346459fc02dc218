"""Compile the simulated device once, and load it.

The device is C++ against the headers of the torch that is installed, so it is
compiled on the machine that uses it: about half a minute, the first time. The
result is kept by torch version, Python version, compiler flags and a hash of
the sources. Law: two processes never write one file; whoever is second waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from lowtide.errors import UnsupportedError, explain

__all__ = ["NAME", "build", "cache_directory", "load"]

NAME = "_lowtide_sim"
SOURCES = Path(__file__).parent / "csrc"
# Optimising costs as long as the headers do, and kernels are the CPU's own.
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}")
SHOWN_LINES = 20


def cache_directory() -> Path:
    """Where compiled devices are kept: ``LOWTIDE_CACHE``, or a folder of the user's cache."""
    given = os.environ.get("LOWTIDE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lowtide"


def _key() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    python = f"{sys.implementation.cache_tag}{sys.abiflags}"
    return f"sim-torch{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise UnsupportedError(
            explain(
                "the simulated device is compiled on first use, and there is no C++ compiler",
                expected="g++ (11 or newer) or another compiler of C++20 on PATH or in CXX",
                got="none",
                where="lowtide.sim",
                remedy="Install one, such as Debian's package g++. Nothing else of lowtide needs it.",
            )
        )
    return compiler


def _command(compiler: str, out: Path) -> list[str]:
    home = Path(torch.__file__).parent
    include = home / "include"
    includes = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"])]
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    return [
        *compiler.split(),
        *FLAGS,
        *[part for path in includes for part in ("-isystem", str(path))],
        str(SOURCES / "sim.cpp"),
        f"-L{home / 'lib'}",
        *libraries,
        "-o",
        str(out),
    ]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build() -> Path:
    """Return the compiled device, compiling it if this torch, Python and source have none yet.

    Costs about 30 seconds and 1.5 GB of memory the first time.

    Raises:
        UnsupportedError: no compiler, or it refuses; the message has the end of what it says.
    """
    folder = cache_directory() / _key()
    made = folder / f"{NAME}.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if made.exists():
            return made
        partial = folder / f"{NAME}.partial.so"
        command = _command(_compiler(), partial)
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the user's compiler
        if done.returncode:
            said = "\n".join(done.stderr.splitlines()[-SHOWN_LINES:])
            raise UnsupportedError(
                explain(
                    "the simulated device does not compile",
                    expected=f"that {command[0]} compiles it against torch {torch.__version__}",
                    got=f"exit status {done.returncode}:\n{said}\n",
                    where=str(SOURCES),
                    remedy="It needs C++20 and the headers of Python (Debian: python3-dev).",
                )
            )
        partial.replace(made)
    return made


def load() -> ModuleType:
    """Build if need be, and import the device. From then on torch knows it."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module
    return module
