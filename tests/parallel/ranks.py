"""Starts the processes of a world: torch is imported once, then every rank is forked from it and serves programs.

Run by ``world.World``. Law: a rank that fails says so and stays; nothing of it is swallowed.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining  # imported before the fork, so that it is paid for once

import lowtide

PATIENCE = timedelta(seconds=20)


def serve(rank: int, size: int, meeting: str, address: str) -> None:
    """Join the group, then run what the test asks for until it hangs up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=PATIENCE)
    with Client(address) as line:
        line.send(rank)
        while True:
            try:
                module, function, options = line.recv()
            except EOFError:
                break
            line.send(answer(module, function, options))
    dist.destroy_process_group()


def answer(module: str, function: str, options: dict[str, Any]) -> tuple[bool, Any]:
    """(True, the program's result) or (False, its traceback)."""
    try:
        lowtide.SwapManager().reset()
        torch.manual_seed(0)
        program = getattr(importlib.import_module(f"parallel.{module}"), function)
        return True, program(**options)
    except Exception:  # noqa: BLE001 - whatever it is, the test is told
        return False, traceback.format_exc()


def main() -> None:
    """Fork one process per rank and wait for all of them."""
    size, meeting, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.path[0] = str(Path(__file__).parents[1])
    ranks = []
    for rank in range(size):
        child = os.fork()
        if not child:
            try:
                serve(rank, size, meeting, address)
            except BaseException:  # noqa: BLE001 - a forked child must not run on in its parent's code
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        ranks.append(child)
    for child in ranks:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
