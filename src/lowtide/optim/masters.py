"""The float32 value behind a parameter of fewer bits: none, in full, or as what rounding has left over.

Law: what is stepped is the float32 master; the parameter is, bit for bit, the
master's cast. A parameter that was changed from outside (weights loaded late,
clipped, averaged) wins over its master, which is made from it anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, cast

import torch

from lowtide.optim import residual
from lowtide.optim.layout import Array
from lowtide.optim.tensors import Scratch, sum_of_bits

__all__ = ["MASTER", "FullMaster", "Masters", "NoMaster", "ResidualMaster", "choose"]

Tensor = torch.Tensor
Views = Mapping[str, Tensor]

# What a state_dict calls the master, as TransformerEngine and Megatron do.
MASTER = "master_param"
_RESIDUAL = "residual"
_TIES = "residual_ties"
_SUM = "residual_of"


class Masters(ABC):
    """How the master of one parameter is kept. All tensors are rows of the piece's elements."""

    arrays: tuple[Array, ...] = ()
    stepped: ClassVar[torch.dtype | None] = torch.float32  # the type of what is stepped; None: the parameter's

    @abstractmethod
    def target(self, weight: Tensor, views: Views, *, made: bool, scratch: Scratch) -> Tensor:
        """What is to be stepped; ``made``: the views hold a master."""

    @abstractmethod
    def finish(self, target: Tensor, weight: Tensor, views: Views) -> None:
        """Write what was stepped to the parameter and keep the rest of it."""

    @abstractmethod
    def export(self, weight: Tensor, views: Views) -> Tensor | None:
        """The master in full, for a checkpoint; all of it in host memory."""

    @abstractmethod
    def take(self, master: Tensor, views: Views) -> None:
        """Keep a master that was loaded; all of it in host memory. The parameter itself is not touched."""


class NoMaster(Masters):
    """The parameter is stepped itself."""

    stepped: ClassVar[torch.dtype | None] = None

    def target(self, weight: Tensor, views: Views, *, made: bool, scratch: Scratch) -> Tensor:
        """The parameter's own elements."""
        return weight

    def finish(self, target: Tensor, weight: Tensor, views: Views) -> None:
        """Only a copy was stepped where the parameter has gaps in its memory."""
        if target.data_ptr() != weight.data_ptr():
            weight.copy_(target)

    def export(self, weight: Tensor, views: Views) -> Tensor | None:
        """There is none."""
        return None

    def take(self, master: Tensor, views: Views) -> None:
        """A master that nobody keeps: the parameter is all there is."""


class FullMaster(Masters):
    """Four bytes an element."""

    arrays = (Array(MASTER, torch.float32),)

    def target(self, weight: Tensor, views: Views, *, made: bool, scratch: Scratch) -> Tensor:
        """The master; elements whose parameter is not its cast were edited, and are taken from the parameter."""
        master = views[MASTER]
        if made:
            master.copy_(_unless_edited(master, weight))
        else:
            master.copy_(weight)
        return master

    def finish(self, target: Tensor, weight: Tensor, views: Views) -> None:
        """Round to the parameter."""
        weight.copy_(target)

    def export(self, weight: Tensor, views: Views) -> Tensor | None:
        """The master as :meth:`target` would give it."""
        return _unless_edited(views[MASTER], weight)

    def take(self, master: Tensor, views: Views) -> None:
        """Copy it."""
        views[MASTER].copy_(master)


def _unless_edited(master: Tensor, weight: Tensor) -> Tensor:
    """The master, with what the parameter says where that is not the master's cast.

    Where more than half of the elements are not, all were replaced, and those that kept their bits did so by chance.
    Decided on the device, without a host read. A cast NaN equals itself.
    """
    kept = master.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)
    kept &= 2 * kept.sum() >= kept.numel()
    return torch.where(kept, master, weight.to(torch.float32))


class ResidualMaster(Masters):
    """Two bytes an element, and in mode ``exact`` one bit: what the rounding to bfloat16 has left over."""

    def __init__(self, mode: residual.Mode) -> None:
        self.mode: residual.Mode = mode
        kept = (Array(_RESIDUAL, torch.int16), Array(_SUM, torch.int64, torch.Size((1,))))
        ties = (Array(_TIES, torch.uint8, bits=True),) if mode == "exact" else ()
        self.arrays = (*kept, *ties)

    def target(self, weight: Tensor, views: Views, *, made: bool, scratch: Scratch) -> Tensor:
        """The master, made from both halves in a row of its own. A piece whose parameter was edited has no residual."""
        master = scratch.row(weight.numel(), torch.float32, weight.device)
        if not made:
            return master.copy_(weight)
        self._drop_if_edited(weight, views)
        residual.merge(weight, views[_RESIDUAL], views.get(_TIES), master, self.mode)
        return master

    def finish(self, target: Tensor, weight: Tensor, views: Views) -> None:
        """Split what was stepped into both halves."""
        residual.split(target, weight, views[_RESIDUAL], views.get(_TIES), self.mode)
        views[_SUM].copy_(sum_of_bits(weight).reshape(1))

    def export(self, weight: Tensor, views: Views) -> Tensor | None:
        """The master as :meth:`target` would give it."""
        own = {name: view.clone() for name, view in views.items() if name in {_RESIDUAL, _TIES, _SUM}}
        return self.target(weight, own, made=True, scratch=Scratch())

    def take(self, master: Tensor, views: Views) -> None:
        """Split it; the half that is the parameter's is only compared with the parameter, at the next step."""
        weight = torch.empty_like(master, dtype=torch.bfloat16)
        self.finish(master, weight, views)

    def _drop_if_edited(self, weight: Tensor, views: Views) -> None:
        unchanged = sum_of_bits(weight).reshape(1) == views[_SUM]
        if weight.device.type == "cpu" and bool(unchanged):
            return
        # No read of a device: the comparison stays there and becomes a factor of the residual.
        views[_RESIDUAL].mul_(unchanged)
        if _TIES in views:
            views[_TIES].mul_(unchanged)


def choose(dtype: torch.dtype, master: str | None, mode: str) -> Masters:
    """How the master of a parameter of this type is kept; float32 and wider parameters are their own."""
    if master is None or dtype not in {torch.bfloat16, torch.float16}:
        return NoMaster()
    return FullMaster() if master == "fp32" else ResidualMaster(cast("residual.Mode", mode))
