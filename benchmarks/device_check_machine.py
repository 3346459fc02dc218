"""The first section of the device check: what was measured, where and when."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone

import torch
from device_check_base import GIB, Check, device_free_bytes, host_free_bytes

import lowtide

__all__ = ["machine"]


def _name(where: torch.device) -> str:
    if where.type == "cpu":
        return platform.processor() or platform.machine()
    ask = getattr(torch.get_device_module(where), "get_device_name", None)
    return str(ask(where)) if ask is not None else where.type


def machine(check: Check) -> None:
    """Print and record the machine."""
    where = check.device
    facts = {
        "device": f"{where}: {_name(where)}" + ("" if check.simulator is None else " (simulated)"),
        "device memory free": f"{device_free_bytes(where) / GIB:.1f} GiB",
        "host memory free": f"{host_free_bytes() / GIB:.1f} GiB",
        "host": f"{platform.machine()}, {os.cpu_count()} processors, {torch.get_num_threads()} compute threads",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "python": platform.python_version(),
        "lowtide": lowtide.__version__,
        "allocator settings": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "-",
        "date": datetime.now(tz=timezone.utc).isoformat(timespec="seconds"),
        "form": "small" if check.small else "whole",
    }
    check.table("machine", ("fact", "value"), list(facts.items()))
    for name, value in facts.items():
        check.record("machine", "", name, value, "text")
