"""Floating-point operations of a piece of computation, and so of what a backward computes again.

Law: counted from the operators that ran, by torch's own formulas, with the
CPU's attention kernels added (torch counts them as nothing). Never estimated.
torch's ``FlopCounterMode`` is not used: it hangs hooks on every module, whose
extra views make selective checkpointing fail when only backward is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

__all__ = ["FlopCounter", "backward_flops", "flops_of"]


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    count: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return count


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    count: int = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    return count


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class FlopCounter(TorchDispatchMode):
    """Adds up the operations of every operator that runs inside it; costs about 5 us an operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out


def flops_of(run: Callable[[], object]) -> int:
    """Count the floating-point operations of every operator that ``run()`` calls."""
    counter = FlopCounter()
    with counter:
        run()
    return counter.total


def backward_flops(loss: Tensor) -> int:
    """Run backward of ``loss`` and count its operations; less those of the plain model they are the recompute."""
    return flops_of(loss.backward)
