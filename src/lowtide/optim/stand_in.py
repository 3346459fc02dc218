"""What ``parameter.grad`` is once the gradient has left: a tensor of the same shape whose elements lie in host memory.

Law: nobody who looks at ``parameter.grad`` is told something wrong. Whatever torch calls with it (clipping, gradient
scalers, ``zero_grad``, autograd's own addition) is computed from the elements in host memory, or raises. A parameter
whose ``grad`` is None has no gradient, here as everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from lowtide._torch import data_less, like_sharded, local_of, no_torch_function
from lowtide.errors import StateError, UnsupportedError, explain
from lowtide.optim.tensors import dense_strides, is_sharded, local_part

if TYPE_CHECKING:
    from lowtide.optim.host_gradient import HostGradient
    from lowtide.optim.host_row import HostRow

__all__ = ["LeftGradient", "left", "stand_in", "used_elsewhere"]

Tensor = torch.Tensor
aten = torch.ops.aten

_REMEDY = "Use cpu_optimizer(..., grad_offload=False) for a loop that computes with parameter.grad in this way."


class LeftGradient(torch.Tensor):
    """A gradient that has left the device: shape, type and device of the parameter, no memory there.

    Norms, ``mul_`` and the like are computed in host memory, in float32; the host waits for the gradient. Any other
    function gets a copy on the device, in the parameter's type, for the time of the call.
    """

    _row: weakref.ref[HostRow]

    @staticmethod
    def __new__(cls: type[LeftGradient], row: HostRow) -> LeftGradient:  # noqa: PYI034 - a wrapper tensor is made, not constructed
        """Stand in for the gradient of a row."""
        local = local_part(row.parameter)
        # As autograd makes gradients: like the parameter where that has no gaps in its memory.
        like = torch.empty_strided(local.size(), local.stride(), dtype=local.dtype, device="meta")
        strides = like.stride() if dense_strides(local) else like.contiguous().stride()
        made: LeftGradient = data_less(cls, local, strides)
        # Weakly: a parameter may outlive its optimizer, and its gradient must not keep the memory of one.
        made._row = weakref.ref(row)
        return made

    def __init__(self, row: HostRow) -> None:
        """All is done in ``__new__``."""

    def __repr__(self) -> str:  # type: ignore[override]
        row = self._row()
        return f"LeftGradient({'gone' if row is None else row.name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor: the copy belongs to nobody's step."""
        return self.clone()

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See the class."""
        options = dict(kwargs or {})
        handler = _HANDLERS.get(func)
        if handler is not None:
            found = handler(func, args, options)
            if found is not NotImplemented:
                return found
        declared = list(enumerate(func._schema.arguments))
        written = [(i, a.name) for i, a in declared if a.alias_info is not None and a.alias_info.is_write]
        if [i for i, _ in written] == [0] and args and not options:
            return _in_place(func, args)
        if any(_holds_one(args[i] if i < len(args) else options.get(name)) for i, name in written):
            _refuse(func)
        return func(*tree_map(_on_device, args), **tree_map(_on_device, options))


def stand_in(row: HostRow) -> Tensor:
    """What to set as the ``grad`` of a row's parameter while its elements lie in host memory."""
    made = LeftGradient(row)
    return like_sharded(made, row.parameter) if is_sharded(row.parameter) else made


def left(grad: Tensor | None, row: HostRow | None) -> bool:
    """Whether ``grad`` stands in for the gradient of ``row``; None: of one that is gone."""
    local = local_of(grad)
    return isinstance(local, LeftGradient) and local._row() is row


def used_elsewhere(grad: Tensor | None) -> bool:
    """Whether ``grad`` stands in for a gradient that another optimizer has used up, or that went with one."""
    local = local_of(grad)
    if not isinstance(local, LeftGradient):
        return False
    row = local._row()
    return row is None or not row.gradient.pending


# ---- one gradient ----------------------------------------------------------------------------------


def _row_of(gradient: LeftGradient) -> HostRow:
    row = gradient._row()
    if row is None:
        raise StateError(
            explain(
                "this gradient went with its optimizer",
                expected="a CpuOptimizer that is alive",
                got="one that was dropped or unwrapped",
                where="parameter.grad",
                remedy="Set parameter.grad to None; call unwrap() first to keep gradients.",
            )
        )
    return row


def _host(gradient: LeftGradient) -> HostGradient:
    row = _row_of(gradient)
    if not row.gradient.pending:
        raise StateError(
            explain(
                "step() has used this gradient up",
                expected="a gradient that waits for step()",
                got="none in host memory",
                where=row.name,
                remedy="Read it before step(), or use cpu_optimizer(..., grad_offload=False).",
            )
        )
    return row.gradient


def _value(gradient: LeftGradient) -> Tensor:
    """Its elements in host memory, in the parameter's shape; not to be written to."""
    row = _row_of(gradient)
    return row.shaped(_host(gradient).value())


def _writable(gradient: LeftGradient) -> Tensor:
    row = _row_of(gradient)
    return row.shaped(_host(gradient).whole())


def _on_device(value: Any) -> Any:
    if not isinstance(value, LeftGradient):
        return value
    return _value(value).to(value.device, value.dtype, copy=True)


def _on_host(value: Any) -> Any:
    if isinstance(value, LeftGradient):
        return _value(value)
    return value.to("cpu") if isinstance(value, Tensor) else value


def _holds_one(value: Any) -> bool:
    return isinstance(value, LeftGradient) or (isinstance(value, (list, tuple)) and any(map(_holds_one, value)))


def _refuse(func: Any) -> NoReturn:
    raise UnsupportedError(
        explain(
            "this function cannot write to a gradient that has left the device",
            expected="a function that changes its first argument alone",
            got=str(func),
            where="parameter.grad",
            remedy=_REMEDY,
        )
    )


def _in_place(func: Any, args: Sequence[Any]) -> Any:
    """A function that changes its first argument, a gradient or a list of them: it changes the elements on the host."""
    first, rest = args[0], [tree_map(_on_host, value) for value in args[1:]]
    if isinstance(first, LeftGradient):
        func(_writable(first), *rest)
        return first
    if not isinstance(first, (list, tuple)):
        # A plain tensor is written: what is read from us is read where it lies.
        return func(first, *tree_map(_on_device, args[1:]))
    if not all(isinstance(one, LeftGradient) for one in first):
        _refuse(func)
    func([_writable(one) for one in first], *rest)
    return None


# ---- what has a way of its own -------------------------------------------------------------------------


def _detach(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    return LeftGradient(_row_of(args[0]))


def _add(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Autograd adds the next gradient: it leaves as the first did."""
    gradient, other = args
    plain = isinstance(other, Tensor) and not isinstance(other, LeftGradient) and not options
    if not isinstance(gradient, LeftGradient) or not plain or other.shape != gradient.shape:
        return NotImplemented
    _row_of(gradient).receive(other.detach())
    return gradient


def _copy(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    gradient, source = args[0], args[1]
    if not isinstance(gradient, LeftGradient) or isinstance(source, LeftGradient) or source.shape != gradient.shape:
        return NotImplemented
    row = _row_of(gradient)
    row.gradient.used()
    row.receive(source.detach())
    return gradient


def _zero(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """What ``zero_grad(set_to_none=False)`` calls, of an optimizer or of a module."""
    several = isinstance(args[0], (list, tuple))
    for one in args[0] if several else args[:1]:
        if isinstance(one, LeftGradient):
            _row_of(one).gradient.zero(set_to_none=False)
        else:
            one.zero_()
    return None if several else args[0]


def _norm(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    # In float32, as the elements are: of 16 bits, a norm over many elements is far off.
    gradient, *rest = args
    kind = rest[0] if rest else options.get("ord", 2)
    if not rest[1:] and not options.keys() - {"ord"} and isinstance(kind, (int, float)):
        return _host(gradient).norm(float(kind)).to(gradient.device)
    return func(_value(gradient), *rest, **options).to(gradient.device)


def _foreach_norm(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    kind = args[1] if len(args) > 1 else options.get("ord", 2)
    return [torch.linalg.vector_norm(one, kind) for one in args[0]]


def _scale(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """One factor for all elements waits for the step, which multiplies beside the copies up."""
    gradient, factor = args
    if not isinstance(gradient, LeftGradient) or (isinstance(factor, Tensor) and factor.numel() != 1):
        return NotImplemented
    host = _host(gradient)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    host.scale(torch.as_tensor(factor, device="cpu").to(wide).reshape(()))
    return gradient


def _unscale(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A gradient scaler: whether any element is no number, and the division by its scale."""
    gradients, found_inf, inverse = args
    plain = [one for one in gradients if not isinstance(one, LeftGradient)]
    if plain:
        func(plain, found_inf, inverse)
    values = [_writable(one) for one in gradients if isinstance(one, LeftGradient)]
    found = torch.zeros((), dtype=torch.float32, device="cpu")
    func(values, found, inverse.to("cpu"))
    if found.item():
        found_inf.fill_(1.0)


_HANDLERS: dict[Any, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.add_.Tensor: _add,
    aten.copy_.default: _copy,
    aten.zero_.default: _zero,
    aten._foreach_zero_.default: _zero,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.mul_.Tensor: _scale,
    aten.mul_.Scalar: _scale,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
