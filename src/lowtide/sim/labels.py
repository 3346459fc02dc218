"""Which module launches a kernel, for traces.

Global hooks of ``torch.nn`` tell the device when a module's forward begins and
ends; a kernel of backward belongs to the module whose forward made its node.
Names are class names joined by dots: what a module is called is known only to
its parent, and a trace must not walk the model.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

__all__ = ["ModuleLabels"]


class ModuleLabels:
    """Keeps the hooks for as long as a trace is wanted."""

    def __init__(self, native: ModuleType) -> None:
        self._native: Any = native
        self._handles: list[Any] = []
        self._stack: list[tuple[int, str]] = []

    def watch(self, *, on: bool) -> None:
        """Install or remove the hooks."""
        if on and not self._handles:
            self._handles = [
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
            ]
        elif not on:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _enter(self, module: nn.Module, args: Any) -> None:
        outer = self._stack[-1][1] if self._stack else ""
        name = f"{outer}.{type(module).__name__}" if outer else type(module).__name__
        self._stack.append((self._native.enter_module(name), name))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        before, _ = self._stack.pop()
        self._native.leave_module(before)
