"""One parameter of a wrapped optimizer: its elements, its gradient, its master, and where its pieces lie.

Law: everything is asked for at the moment of use. A parameter may get other
memory (``param.data = ...``), another gradient or none between two steps.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.errors import UnsupportedError, explain
from lowtide.optim.kinds import StateSpec
from lowtide.optim.layout import Array, Demand, Piece
from lowtide.optim.masters import MASTER, Masters
from lowtide.optim.tensors import dense_strides, flat_view, in_order_of, is_sharded, local_part

__all__ = ["SteppedParameter"]

Tensor = torch.Tensor


class SteppedParameter:
    """What the optimizer knows of one parameter.

    Args:
        parameter: the user's own.
        group: number of its group.
        name: for messages.
        spec: the state its class keeps for it.
        moving: which arrays of that state move; the others stay with the optimizer.
        masters: how its master is kept.
        cut: whether it may be cut; else it is stepped whole, in its own shape.
    """

    def __init__(
        self,
        parameter: Tensor,
        group: int,
        name: str,
        *,
        spec: StateSpec,
        moving: frozenset[str],
        masters: Masters,
        cut: bool,
    ) -> None:
        self.parameter = parameter
        self.group = group
        self.name = name
        self.masters = masters
        self.spec = spec
        local = local_part(parameter)
        self.dense = dense_strides(local)
        self.cut = cut and self.dense
        self.arrays = (
            *masters.arrays,
            *(Array(key, dtype, shape) for key, (dtype, shape) in spec.arrays.items() if key in moving),
        )

    def demand(self, number: int) -> Demand:
        """What the layout must find room for."""
        return Demand(number, local_part(self.parameter).numel(), self.arrays, self.cut)

    # ---- elements ------------------------------------------------------------------------------

    def weight(self, piece: Piece) -> Tensor:
        """The piece's elements, as a row; over the parameter's memory where that has no gaps, else a copy."""
        local = local_part(self.parameter)
        row = flat_view(local) if self.dense else local.reshape(-1)
        return row[piece.start : piece.stop]

    def write(self, row: Tensor) -> None:
        """Write a row that was a copy back to a parameter with gaps."""
        local = local_part(self.parameter)
        local.copy_(row.view(local.shape))

    def gradient(self) -> Tensor | None:
        """What this process holds of the gradient, with the parameter's strides where these are dense."""
        grad = self.parameter.grad
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                explain(
                    "this gradient is not dense",
                    expected="a strided gradient",
                    got=str(grad.layout),
                    where=self.name,
                    remedy="Use a dense gradient (Embedding(sparse=False)), or give this parameter an optimizer of its "
                    "own; nothing was stepped.",
                )
            )
        local = local_part(grad)
        return in_order_of(local, local_part(self.parameter)) if self.dense else local

    def row_of(self, grad: Tensor, piece: Piece) -> Tensor:
        """The piece's part of what :meth:`gradient` gave."""
        row = flat_view(grad) if self.dense else grad.reshape(-1)
        return row[piece.start : piece.stop]

    def shaped(self, row: Tensor) -> Tensor:
        """A row as the class is to see it: as it is where it may be cut, else with the parameter's shape."""
        if self.cut:
            return row
        local = local_part(self.parameter)
        return row.as_strided(local.size(), local.stride()) if self.dense else row.view(local.shape)

    def array(self, row: Tensor, array: Array) -> Tensor:
        """An array of the state as the class is to see it."""
        return self.shaped(row) if array.shape is None else row.view(array.shape)

    # ---- state, in full ------------------------------------------------------------------------

    def is_array(self, name: str, value: Any) -> bool:
        """Whether a piece's value is one of an array that is cut as the parameter is, or lies in a segment."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return False
        return self.cut or name in self.spec.arrays or name == MASTER

    def accepts(self, name: str, value: Any) -> str | None:
        """None if a value can be this parameter's state ``name``; else what was expected."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return None
        known = self.spec.arrays.get(name)
        if known is None and name != MASTER and not self.cut:
            return None
        shape = self.parameter.shape if known is None or known[1] is None else known[1]
        if value.shape != shape:
            return f"a tensor of {tuple(shape)}"
        return "a DTensor" if is_sharded(self.parameter) and not is_sharded(value) else None

    def whole(self, name: str, rows: list[Tensor]) -> Tensor:
        """Rows of all pieces, in host memory, as one tensor with the shape and strides that the class gives it."""
        shape = self.spec.arrays[name][1] if name in self.spec.arrays else None
        if shape is not None:
            return rows[0].clone().view(shape)
        local = local_part(self.parameter)
        row = torch.cat([one.reshape(-1) for one in rows])  # a copy even of one: it was a row of a whole segment
        return row.as_strided(local.size(), local.stride()) if self.dense else row.view(local.shape)

    def piece_of(self, name: str, value: Any, piece: Piece, *, counts_on_device: bool) -> Any:
        """A piece's part of a value of the state in full: a row where it is an array, else a copy of its own."""
        if not isinstance(value, Tensor):
            return value
        local = local_part(self.parameter)
        if not self.is_array(name, value):
            to_device = value.dim() > 0 or counts_on_device
            return value.detach().to(local.device if to_device else value.device, copy=True)
        known = self.spec.arrays.get(name)
        if known is not None and known[1] is not None:
            return local_part(value).reshape(-1)
        given = local_part(value)
        row = flat_view(in_order_of(given, local)) if self.dense else given.reshape(-1)
        taken = row[piece.start : piece.stop]
        moves = name == MASTER or any(array.name == name for array in self.arrays)
        return taken if moves else self.shaped(taken.to(local.device, copy=True))
