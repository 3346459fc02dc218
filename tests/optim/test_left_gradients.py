"""Views, old ones, factors, norms and copies of gradients that have left are as those of any other, or raise (O4)."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import SwapManager
from lowtide.errors import StateError, UnsupportedError
from lowtide.optim.cpu import cpu_optimizer
from lowtide.optim.swap import swap_optimizer

from .kit import OPTIMIZERS, assert_same_bits, backward, net, weights

Edit = Callable[[Tensor], Any]


def _each(parts: Any) -> None:
    for part in parts:
        part.div_(part.norm() + 1)


def _index(key: Any, value: Any) -> Edit:
    return lambda grad: grad.__setitem__(key, value)


VIEWS: dict[str, Edit] = {
    "a row": _index(0, 0),
    "a slice": _index(slice(None, 2), 1),
    "every second": _index((slice(None), slice(None, None, 2)), 0),
    "an element": _index((1, 2), 3.0),
    "a view, zeroed": lambda grad: grad[1].zero_(),
    "flat": lambda grad: grad.view(-1).mul_(0.5) if grad.is_contiguous() else grad.t().reshape(-1).mul_(0.5),
    "flattened, cut": lambda grad: grad.t().t()[1:3].mul_(0.1),
    "transposed": lambda grad: grad.t().mul_(0.5),
    "a view's copy_": lambda grad: grad[0].copy_(grad[1] * 2),
    "one view from another": lambda grad: grad[0].add_(grad[1], alpha=0.5),
    "chunks": lambda grad: _each(grad.chunk(3)),
    "rows": lambda grad: _each(grad.unbind(0)),
    "iteration": _each,
    "a diagonal": lambda grad: grad.diagonal().fill_(0.25),
    "a list of views": lambda grad: torch._foreach_mul_([grad[0], grad[1]], 0.5),
}
OPTIONS: dict[str, Edit] = {
    "add_ alpha": lambda grad: grad.add_(torch.ones_like(grad), alpha=0.1),
    "addcmul_ value": lambda grad: grad.addcmul_(torch.ones_like(grad), torch.ones_like(grad), value=0.1),
    "foreach add_ alpha": lambda grad: torch._foreach_add_([grad], [torch.ones_like(grad)], alpha=0.1),
}
FACTORS: dict[str, Edit] = {
    "a float": lambda grad: grad.mul_(0.1),
    "two floats": lambda grad: grad.mul_(0.1).mul_(0.3),
    "an int": lambda grad: grad.mul_(3),
    "a tensor": lambda grad: grad.mul_(torch.tensor(0.1, dtype=grad.dtype)),
    "a division": lambda grad: grad.div_(3),
}


def trained(edit: Edit, dtype: torch.dtype, *, wraps: bool) -> tuple[nn.Module, Any]:
    model = net(dtype)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    if wraps:
        optimizer = cpu_optimizer(optimizer, master=None, grad_offload=True)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            backward(model, 10 * step + micro)
            edit(model[0].weight.grad)
            edit(model[2].weight.grad)  # not contiguous
        optimizer.step()
    return model, optimizer


@pytest.mark.values
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edit", [*VIEWS.values(), *OPTIONS.values()], ids=[*VIEWS, *OPTIONS])
def test_what_is_written_to_a_gradient_or_a_view_of_it_is_stepped(edit: Edit, dtype: torch.dtype) -> None:
    assert_same_bits(weights(trained(edit, dtype, wraps=False)[0]), weights(trained(edit, dtype, wraps=True)[0]), "")


@pytest.mark.values
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edit", FACTORS.values(), ids=FACTORS)
def test_a_factor_has_all_its_bits(edit: Edit, dtype: torch.dtype) -> None:
    assert_same_bits(weights(trained(edit, dtype, wraps=False)[0]), weights(trained(edit, dtype, wraps=True)[0]), "")


def one() -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = cpu_optimizer(torch.optim.SGD([parameter], lr=1.0), grad_offload=True)
    (parameter * torch.arange(16.0).view(4, 4)).sum().backward()
    return parameter, optimizer


@pytest.mark.values
def test_a_view_that_is_set_as_gradient_is_what_is_stepped() -> None:
    parameter, optimizer = one()
    wanted = 1 - parameter.grad.clone().t()
    parameter.grad = parameter.grad.t()
    optimizer.step()
    assert torch.equal(parameter.detach(), wanted)


def test_bits_of_a_narrower_type_are_read_and_not_written() -> None:
    parameter, _ = one()
    bits = parameter.grad.view(torch.int16)
    assert torch.equal(bits.clone(), parameter.grad.clone().view(torch.int16))
    with pytest.raises(UnsupportedError):
        bits.zero_()


FORGOTTEN: dict[str, Callable[[nn.Parameter, Any], Any]] = {
    "zero_grad of the optimizer": lambda parameter, optimizer: optimizer.zero_grad(),
    "None and a backward": lambda parameter, optimizer: (
        setattr(parameter, "grad", None),
        parameter.sum().backward(),
    ),
    "zero_grad and a backward": lambda parameter, optimizer: (optimizer.zero_grad(), parameter.sum().backward()),
}
USES: dict[str, Callable[[nn.Parameter, Any, Tensor], Any]] = {
    "read": lambda parameter, optimizer, old: old.clone(),
    "a view of it": lambda parameter, optimizer, old: old[0].clone(),
    "its norm": lambda parameter, optimizer, old: old.norm(),
    "edited": lambda parameter, optimizer, old: old.mul_(2),
    "put back": lambda parameter, optimizer, old: (setattr(parameter, "grad", old), optimizer.step()),
    "put back before a backward": lambda parameter, optimizer, old: (
        setattr(parameter, "grad", old),
        parameter.sum().backward(),
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("forget", FORGOTTEN.values(), ids=FORGOTTEN)
def test_an_old_gradient_is_never_taken_for_a_new_one(forget: Any, use: Any) -> None:
    """Read, or put back and stepped."""
    parameter, optimizer = one()
    old = parameter.grad
    forget(parameter, optimizer)
    with pytest.raises(StateError):
        use(parameter, optimizer, old)


@pytest.mark.values
def test_a_norm_that_is_written_to_is_asked_for_anew() -> None:
    parameter, _ = one()
    wanted = parameter.grad.norm().clone()
    parameter.grad.norm().mul_(2)
    torch._foreach_mul_(torch._foreach_norm([parameter.grad]), 2.0)
    assert torch.equal(parameter.grad.norm(), wanted)


def _saved(grad: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save([grad], buffer)
    buffer.seek(0)
    made: Tensor = torch.load(buffer)[0]
    return made


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "save": _saved,
    "pickle": lambda grad: pickle.loads(pickle.dumps(grad)),  # noqa: S301 - ours
    "deepcopy": copy.deepcopy,
    "deepcopy of a view": lambda grad: copy.deepcopy(grad.view(-1)).view(4, 4),
    "tolist": lambda grad: torch.tensor(grad.tolist(), dtype=grad.dtype),
}


@pytest.mark.values
@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_copies_and_files_have_the_elements(made: Callable[[Tensor], Tensor]) -> None:
    parameter, _ = one()
    found = made(parameter.grad)
    assert type(found) is Tensor
    assert torch.equal(found, parameter.grad.clone())


@pytest.mark.values
def test_data_that_is_set_is_stepped() -> None:
    parameter, optimizer = one()
    parameter.grad.data = torch.full_like(parameter, 0.5)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full_like(parameter, 0.5))


def test_data_of_another_type_is_refused() -> None:
    parameter, _ = one()
    with pytest.raises(UnsupportedError):
        parameter.grad.data = torch.zeros(4, 4, dtype=torch.float64)


def test_a_backward_that_raised_leaves_no_copy_in_flight_behind_its_optimizer() -> None:
    """Under an accelerator: memory was freed while it was read (races are looked for by the fixture)."""
    model = net()
    optimizer = cpu_optimizer(OPTIMIZERS["sgd"](list(model.parameters())), grad_offload=True)

    def fails(grad: Tensor) -> None:
        raise ZeroDivisionError

    model[0].weight.register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        backward(model, 0)
    del optimizer
    gc.collect()
    torch.ones(1000).sum().item()


def test_a_step_through_a_file_can_be_timed_wherever_tensors_are_made(tmp_path: Any) -> None:
    """The disk is probed with bytes of the host."""
    SwapManager().configure(file_dir=str(tmp_path))
    model = net()
    optimizer = swap_optimizer(OPTIMIZERS["adamw"](list(model.parameters())), tier="file")
    backward(model, 0)
    assert optimizer.timed_step().buckets


@pytest.mark.values
def test_of_two_optimizers_over_the_same_parameters_the_second_does_not_step_with_nothing() -> None:
    model = net()
    first, second = (cpu_optimizer(OPTIMIZERS["sgd"](list(model.parameters())), grad_offload=True) for _ in range(2))
    backward(model, 0)
    first.step()
    before = [w.clone() for w in weights(model)]
    with pytest.raises(StateError, match="another optimizer has used this gradient up"):
        second.step()
    assert_same_bits(before, weights(model))
    second.zero_grad()
    backward(model, 1)
    second.step()
    assert not torch.equal(before[0], weights(model)[0])
