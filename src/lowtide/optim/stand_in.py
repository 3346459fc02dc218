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

__all__ = ["LeftGradient", "LeftView", "demand_current", "left", "stand_in", "used_elsewhere"]

Tensor = torch.Tensor
aten = torch.ops.aten

_REMEDY = "Use cpu_optimizer(..., grad_offload=False) for a loop that computes with parameter.grad in this way."


class _Left(torch.Tensor):
    """What has no memory on the device and is read from, and written to, the elements in host memory."""

    __torch_function__ = no_torch_function

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor: the copy belongs to nobody's step."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As :meth:`__deepcopy__`."""
        return self.clone().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        """See ``torch.Tensor.tolist``."""
        return self.clone().tolist()

    @property
    def data(self) -> Tensor:
        """The same elements; setting it writes them."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if isinstance(value, _Left) and _row_of(value) is _row_of(self) and type(value) is type(self) is LeftGradient:
            return
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise UnsupportedError(
                explain(
                    "a gradient that has left the device cannot become one of another kind",
                    expected=f"{tuple(self.shape)} of {self.dtype} on {self.device}",
                    got=f"{tuple(value.shape)} of {value.dtype} on {value.device}",
                    where="parameter.grad.data",
                    remedy="Call zero_grad() before the model is converted or moved.",
                )
            )
        self.copy_(value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See :class:`LeftGradient`."""
        options = dict(kwargs or {})
        handler = _HANDLERS.get(func)
        if handler is not None and not any(issubclass(one, LeftView) for one in types):
            found = handler(func, args, options)
            if found is not NotImplemented:
                return found
        declared = list(enumerate(func._schema.arguments))
        written = [(i, a.name) for i, a in declared if a.alias_info is not None and a.alias_info.is_write]
        if [i for i, _ in written] == [0] and args:
            return _in_place(func, args, options)
        if any(_holds_one(args[i] if i < len(args) else options.get(name)) for i, name in written):
            _refuse(func)
        if func.is_view and isinstance(args[0], _Left):
            return _view(func, args, options)
        return func(*tree_map(_on_device, args), **tree_map(_on_device, options))


class LeftGradient(_Left):
    """A gradient that has left the device: shape, type and device of the parameter, no memory there.

    Norms, ``mul_`` and the like are computed in host memory, in float32; the host waits for the gradient. A view writes
    there, too. Any other function gets a copy on the device, in the parameter's type, for the time of the call.
    """

    _row: weakref.ref[HostRow]
    _generation: int

    @staticmethod
    def __new__(cls: type[LeftGradient], row: HostRow, generation: int) -> LeftGradient:  # noqa: PYI034 - a wrapper tensor is made, not constructed
        """Stand in for the gradient of a row; ``generation`` says which of its gradients."""
        local = local_part(row.parameter)
        # As autograd makes gradients: like the parameter where that has no gaps in its memory.
        like = torch.empty_strided(local.size(), local.stride(), dtype=local.dtype, device="meta")
        strides = like.stride() if dense_strides(local) else like.contiguous().stride()
        made: LeftGradient = data_less(cls, local, strides)
        # Weakly: a parameter may outlive its optimizer, and its gradient must not keep the memory of one.
        made._row = weakref.ref(row)
        made._generation = generation
        return made

    def __init__(self, row: HostRow, generation: int) -> None:
        """All is done in ``__new__``."""

    def __repr__(self) -> str:  # type: ignore[override]
        row = self._row()
        return f"LeftGradient({'gone' if row is None else row.name}, shape={tuple(self.shape)}, dtype={self.dtype})"


class LeftView(_Left):
    """A view of a gradient that has left: what is written to it is written to the gradient's elements."""

    _of: _Left
    _made_by: Callable[[Tensor], Any]
    _keeps_type: bool

    @staticmethod
    def __new__(  # noqa: PYI034 - as above
        cls: type[LeftView], of: _Left, made_by: Callable[[Tensor], Tensor], like: Tensor, *, keeps_type: bool
    ) -> LeftView:
        """What ``made_by`` makes of ``of``, and is ``like`` this."""
        made: LeftView = data_less(cls, like, like.stride(), of.device)
        made._of, made._made_by, made._keeps_type = of, made_by, keeps_type
        return made

    def __init__(self, of: _Left, made_by: Callable[[Tensor], Tensor], like: Tensor, *, keeps_type: bool) -> None:
        """All is done in ``__new__``."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LeftView(shape={tuple(self.shape)}, dtype={self.dtype})"


def stand_in(row: HostRow) -> Tensor:
    """What to set as the ``grad`` of a row's parameter while its elements lie in host memory."""
    row.replace_gradient()
    made = LeftGradient(row, row.generation)
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


def demand_current(grad: Tensor | None) -> None:
    """Raise StateError if ``grad`` stands in for a gradient that another one has replaced."""
    local = local_of(grad)
    if isinstance(local, LeftGradient):
        _row_of(local)


# ---- one gradient ----------------------------------------------------------------------------------


def _row_of(gradient: _Left) -> HostRow:
    while isinstance(gradient, LeftView):
        gradient = gradient._of
    assert isinstance(gradient, LeftGradient)
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
    if gradient._generation != row.generation:
        raise StateError(
            explain(
                "this gradient was forgotten or replaced",
                expected="what parameter.grad is now",
                got="what it was before it was set, or zero_grad() was called",
                where=row.name,
                remedy="Keep a copy (parameter.grad.clone()), or use cpu_optimizer(..., grad_offload=False).",
            )
        )
    return row


def _host(gradient: _Left) -> HostGradient:
    row = _row_of(gradient)
    if not row.gradient.pending:
        raise StateError(
            explain(
                "step() has used this gradient up",
                expected="a gradient that waits for step()",
                got="none in host memory",
                where=row.name,
                remedy="Read it before step(), call zero_grad() before the model is converted or moved, or use "
                "cpu_optimizer(..., grad_offload=False).",
            )
        )
    return row.gradient


def _value(gradient: _Left) -> Tensor:
    """Its elements in host memory, in the parameter's shape; not to be written to."""
    if isinstance(gradient, LeftView):
        if not gradient._keeps_type:
            found: Tensor = _on_device(gradient).to("cpu")
            return found
        seen: Tensor = gradient._made_by(_value(gradient._of))
        return seen
    row = _row_of(gradient)
    return row.shaped(_host(gradient).value())


def _writable(gradient: _Left, func: Any) -> Tensor:
    if isinstance(gradient, LeftView):
        if not gradient._keeps_type:
            _refuse(func)
        seen: Tensor = gradient._made_by(_writable(gradient._of, func))
        return seen
    row = _row_of(gradient)
    return row.shaped(_host(gradient).whole())


def _on_device(value: Any) -> Any:
    if not isinstance(value, _Left):
        return value
    if isinstance(value, LeftView):
        return value._made_by(_on_device(value._of))
    return _value(value).to(value.device, value.dtype, copy=True)


def _on_host(value: Any) -> Any:
    if isinstance(value, _Left):
        return _value(value)
    return value.to("cpu") if isinstance(value, Tensor) else value


def _holds_one(value: Any) -> bool:
    return isinstance(value, _Left) or (isinstance(value, (list, tuple)) and any(map(_holds_one, value)))


def _view(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Views of what has left, one or several."""
    of, rest = args[0], tuple(args[1:])
    meta = torch.empty_strided(of.size(), of.stride(), dtype=of.dtype, device="meta")
    found = func(meta, *rest, **options)
    # An element's bits are not in host memory as they were on the device, where it has more of them.
    narrow = of.dtype != torch.promote_types(of.dtype, torch.float32)
    keeps = not narrow or func is not aten.view.dtype

    def one(like: Tensor, number: int | None) -> LeftView:
        def made_by(base: Tensor) -> Any:
            made = func(base, *rest, **options)
            return made if number is None else made[number]

        return LeftView(of, made_by, like, keeps_type=keeps)

    return one(found, None) if isinstance(found, Tensor) else [one(like, i) for i, like in enumerate(found)]


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


def _in_place(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A function that changes its first argument, a gradient or a list of them: it changes the elements on the host."""
    first, others = args[0], (tuple(args[1:]), dict(options))
    if isinstance(first, _Left):
        rest, named = tree_map(_on_host, others)
        func(_writable(first, func), *rest, **named)
        return first
    if not isinstance(first, (list, tuple)):
        # A plain tensor is written: what is read from us is read where it lies.
        rest, named = tree_map(_on_device, others)
        return func(first, *rest, **named)
    if not all(isinstance(one, _Left) for one in first):
        _refuse(func)
    rest, named = tree_map(_on_host, others)
    func([_writable(one, func) for one in first], *rest, **named)
    return None


# ---- what has a way of its own -------------------------------------------------------------------------


def _detach(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    return LeftGradient(_row_of(args[0]), args[0]._generation)


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
        return _host(gradient).norm(float(kind)).to(gradient.device, copy=True)  # who asked may write to it
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
    one = factor.to("cpu", wide) if isinstance(factor, Tensor) else torch.tensor(factor, dtype=wide, device="cpu")
    host.scale(one.reshape(()))
    return gradient


def _unscale(func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A gradient scaler: whether any element is no number, and the division by its scale."""
    gradients, found_inf, inverse = args
    plain = [one for one in gradients if not isinstance(one, LeftGradient)]
    if plain:
        func(plain, found_inf, inverse)
    values = [_writable(one, func) for one in gradients if isinstance(one, LeftGradient)]
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
