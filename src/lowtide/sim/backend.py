"""``torch.sim``: what torch and its users expect of a device's module, over the compiled device.

Law: every function is one that ``torch.cuda`` has, with its meaning. torch calls
some of these itself (checkpoint's random state, autocast, ``fork_rng``), and
does nothing, silently, where one is missing.
"""

from __future__ import annotations

from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from lowtide import _torch

__all__ = ["install"]

DeviceLike = Any


def install(native: ModuleType, count: int) -> ModuleType:
    """Give the device its name, and torch a module of that name."""
    rename_privateuse1_backend("sim")
    module = ModuleType("torch.sim", "The simulated accelerator of lowtide.")
    for part in (_devices(native, count), _memory(), _random(native, count), _streams()):
        for name, value in part.items():
            setattr(module, name, value)
    _torch.register_device_module("sim", module)
    generate_methods_for_privateuse1_backend()
    return module


def _devices(native: ModuleType, count: int) -> dict[str, Any]:
    def index(device: DeviceLike = None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return int(native.current_device()) if found is None else found

    class device:  # noqa: N801 - torch's own name for it
        """Make a device current for the body."""

        def __init__(self, wanted: DeviceLike) -> None:
            self._wanted = index(wanted)

        def __enter__(self) -> None:
            self._before = native.current_device()
            native.set_device(self._wanted)

        def __exit__(self, *args: object) -> None:
            native.set_device(self._before)

    return {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": native.current_device,
        "set_device": lambda wanted: native.set_device(index(wanted)),
        "device": device,
        "synchronize": lambda wanted=None: torch.accelerator.synchronize(index(wanted)),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda *args, **kwargs: True,
        # torch asks these before it saves a device's random state: without them it saves nothing.
        "_initialized": True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
    }


def _memory() -> dict[str, Any]:
    return {
        name: getattr(torch.accelerator, name)
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "memory_stats",
            "reset_peak_memory_stats",
            "reset_accumulated_memory_stats",
            "empty_cache",
        )
    } | {"mem_get_info": torch.accelerator.get_memory_info}


def _random(native: ModuleType, count: int) -> dict[str, Any]:
    generators: list[torch.Generator] = [native.generator(i) for i in range(count)]

    def of(device: DeviceLike = None) -> torch.Generator:
        if isinstance(device, int):
            return generators[device]
        found = None if device is None else torch.device(device).index
        return generators[native.current_device() if found is None else found]

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    return {
        "default_generators": generators,
        "manual_seed": lambda seed: of().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "seed": lambda: of().seed(),
        "initial_seed": lambda: of().initial_seed(),
        "get_rng_state": lambda device=None: of(device).get_state(),
        "set_rng_state": lambda state, device=None: of(device).set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": lambda states: [g.set_state(s) for g, s in zip(generators, states, strict=True)],
    }


class _OnStream:
    """Make a stream current for the body."""

    def __init__(self, wanted: torch.Stream | None) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream()
        if self._wanted is not None:
            torch.accelerator.set_stream(self._wanted)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        torch.accelerator.set_stream(self._before)


def _streams() -> dict[str, Any]:
    return {
        "Stream": torch.Stream,
        "Event": torch.Event,
        "current_stream": torch.accelerator.current_stream,
        "set_stream": torch.accelerator.set_stream,
        "stream": _OnStream,
        "is_current_stream_capturing": lambda: False,
    }
