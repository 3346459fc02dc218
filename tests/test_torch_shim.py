"""Every private name of torch that lowtide uses exists and does what ``lowtide._torch`` says of it."""

from __future__ import annotations

import ast
import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide import _torch

SOURCE = Path(lowtide.__file__).parent


def test_every_name_of_the_shim_exists_and_is_listed() -> None:
    assert all(hasattr(_torch, name) for name in _torch.__all__)
    tree = ast.parse((SOURCE / "_torch.py").read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert defined <= set(_torch.__all__)


# Attributes of tensors, storages and operators that are private by name and have been there since torch 1.
_OF_OBJECTS = {
    "_base",
    "_c",
    "_cdata",
    "_is_view",
    "_overload_name",
    "_qualified_op_name",
    "_schema",
    "_version",
}


def test_private_names_of_torch_are_used_nowhere_else() -> None:
    found: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name == "_torch.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root: Any = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id == "torch" and node.attr not in _OF_OBJECTS:
                    found.append(f"{path.relative_to(SOURCE)}: {ast.unparse(node)}")
    allowed = {"torch._ops", "torch.nn.modules.batchnorm._BatchNorm"}
    names = {one.split(": ")[1] for one in found}
    assert not {name for name in names - allowed if not name.startswith("torch.ops.")}, found


class Counts(_torch.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_operators_and_costs_no_wrapper() -> None:
    mode = Counts()
    with mode:
        torch.ones(2).sin()
    assert "aten.sin.default" in mode.seen
    assert not Counts._should_skip_dynamo()
    assert Counts.ignore_compile_internals()
    # torch asks for these very names; 2.10 puts no wrapper around the handler, and has no name to spare it.
    base = torch.utils._python_dispatch.TorchDispatchMode
    assert hasattr(base, "_should_skip_dynamo") or torch.__version__.startswith("2.10.")
    assert hasattr(base, "ignore_compile_internals")


def test_no_dispatch_hides_the_body_from_every_mode() -> None:
    mode = Counts()
    with mode, _torch.no_dispatch():
        torch.ones(2).sin()
    assert not mode.seen


def test_no_autocast_hides_autocast() -> None:
    a = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
        with _torch.no_autocast():
            assert (a @ a).dtype is torch.float32


def test_the_key_of_a_storage_is_its_identity() -> None:
    a = torch.zeros(4)
    assert _torch.storage_key(a) == _torch.storage_key(a[1:].view(3, 1)) == a.untyped_storage()._cdata
    assert _torch.storage_key(a) != _torch.storage_key(a.clone())


def test_a_weak_storage_pins_the_address_and_not_the_bytes() -> None:
    a = torch.zeros(1 << 20)
    pin = _torch.take_weak_storage(a.untyped_storage())
    assert pin == _torch.storage_key(a)
    assert not _torch.weak_storage_is_dead(pin)
    again = _torch.pin_again(pin)
    assert again == pin
    del a
    assert _torch.weak_storage_is_dead(pin)
    others = [torch.zeros(1) for _ in range(1000)]
    assert pin not in {_torch.storage_key(other) for other in others}, "a pinned address was reused"
    _torch.free_weak_storage(pin)
    assert _torch.weak_storage_is_dead(again), "one pin of two was given back"
    assert _torch.pin_again(again) is None, "a dead one was pinned"
    _torch.free_weak_storage(again)


def test_a_transform_of_torch_func_is_seen() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(_torch.any_functorch_transform())
        return x

    look(torch.ones(1))
    torch.func.vmap(look)(torch.ones(2, 1))
    assert seen == [False, True]


def test_the_pack_hook_of_now_is_seen() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    assert _torch.current_saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert _torch.current_saved_tensor_hooks() is pack
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, pack):
            assert _torch.current_saved_tensor_hooks() is not pack
    assert _torch.current_saved_tensor_hooks() is None


class Asks(torch.autograd.Function):
    """Looks around in its backward."""

    seen: list[Any] = []  # noqa: RUF012 - emptied by each test

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Asks.seen.append(
            (
                _torch.autograd_keeps_graph(),
                _torch.current_backward(),
                _torch.current_python_node() is ctx,
            )
        )
        _torch.queue_after_backward(lambda: Asks.seen.append("after"))
        return grad


def test_the_running_backward_is_known_and_numbered() -> None:
    Asks.seen.clear()
    assert _torch.current_backward() == _torch.NO_BACKWARD
    assert _torch.current_python_node() is None
    x = torch.ones(2, requires_grad=True)
    out = Asks.apply(Asks.apply(x)).sum()
    out.backward(retain_graph=True)
    out.backward()
    first, second, after, after_too, *rest = Asks.seen
    assert after == after_too == "after", "the callback ran before the backward had ended"
    assert first == second
    keeps, number, is_node = first
    assert keeps is True and number != _torch.NO_BACKWARD and is_node
    assert rest[0][0] is False and rest[0][1] != number
    assert _torch.current_backward() == _torch.NO_BACKWARD


def test_a_node_of_torchs_own_is_no_python_node() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.grad_fn.register_prehook(lambda _: seen.append(_torch.current_python_node()))
    y.sum().backward()
    assert seen == [None]


def test_function_apply_arrives_at_the_single_level_class(monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(torch.autograd.Function, _torch.SingleLevelFunction)
    base = _torch.FUNCTION_WITH_APPLY
    late = base is torch.autograd.Function  # 2.14: what was bound before the patch passes it by
    bound = None if late else Asks.apply  # as user code binds it at import
    seen: list[Any] = []
    original = base.__dict__["apply"]

    def spy(cls: Any, *args: Any) -> Any:
        seen.append(cls)
        return original.__get__(None, cls)(*args)

    monkeypatch.setattr(base, "apply", classmethod(spy))
    (bound or Asks.apply)(torch.ones(1))
    assert seen == [Asks]


def test_the_direct_call_of_an_overload_is_the_operator() -> None:
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    call = _torch.direct_call(torch.ops.aten.mm.default)
    assert torch.equal(call(a, b), a @ b)
    mode = Counts()
    with mode:
        call(a, b)
    assert mode.seen == ["aten.mm.default"]


def test_lazy_bits_are_set_on_a_view() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(_torch.conjugate_view(z, conjugate=True, negative=False), z.conj())
    both = _torch.conjugate_view(z, conjugate=True, negative=True)
    assert both.is_conj() and both.is_neg() and both.data_ptr() == z.data_ptr()
    assert torch.equal(both, -z.conj())
    assert _torch.conjugate_view(z, conjugate=False, negative=False) is z


def test_tensors_without_data_are_known_by_type() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    assert isinstance(fake, _torch.TRACING_TYPES)
    assert not isinstance(torch.ones(2), _torch.TRACING_TYPES)


def test_a_subclass_that_can_be_taken_apart_is_known() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert _torch.is_traceable_subclass(TwoTensor(torch.ones(2), torch.ones(2)))
    assert not _torch.is_traceable_subclass(torch.nn.Parameter(torch.ones(2)))


def test_a_mode_dies_with_its_last_reference() -> None:
    mode = Counts()
    with mode:
        torch.ones(1).sin()
    reference = weakref.ref(mode)
    gc.disable()
    try:
        del mode
        assert reference() is None
    finally:
        gc.enable()


def test_a_backward_of_some_inputs_leaves_out_the_others() -> None:
    a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    seen: list[bool] = []
    product = a @ b
    product.grad_fn.register_prehook(lambda _: seen.append(_torch.backward_leaves_out_a_neighbour()))
    loss = product.sum()
    torch.autograd.grad(loss, [a], retain_graph=True)
    torch.autograd.grad(loss, [a, b], retain_graph=True)
    loss.backward()
    assert seen == [True, False, False]


def test_two_storages_exchange_their_memory_under_all_views() -> None:
    if _torch.swap_bytes is None:
        pytest.skip("before 2.13")
    empty, full = torch.zeros(6), torch.arange(6.0)
    view, version = empty.view(2, 3)[1], empty._version
    empty.untyped_storage().resize_(0)
    _torch.swap_bytes(empty.untyped_storage(), full.untyped_storage())
    assert view.tolist() == [3.0, 4.0, 5.0]
    assert (empty._version, full.untyped_storage().nbytes()) == (version, 0)


def test_the_keys_of_dispatch_modes_are_taken_out_of_an_argument() -> None:
    @dataclasses.dataclass
    class Metadata:
        keyset: Any
        other: int

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    made = _torch.without_modes(Metadata(keys, 3))
    assert (
        made.other == 3
        and not made.keyset.has(torch._C.DispatchKey.Python)
        and made.keyset.has(torch._C.DispatchKey.CPU)
    )
    assert _torch.without_modes(keys) is keys


def test_a_step_without_its_hooks_is_the_class_s_own() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    parameter.grad = torch.ones(2)
    _torch.unhooked_step(torch.optim.SGD)(optimizer)
    assert not calls
    assert torch.equal(parameter, torch.zeros(2))
    optimizer.step()
    assert calls == ["pre"]


def test_an_optimizer_keeps_its_hooks_where_we_look_for_them() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.register_state_dict_pre_hook(lambda *_: None)
    optimizer.register_state_dict_post_hook(lambda *_: None)
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    optimizer.register_load_state_dict_post_hook(lambda *_: None)
    assert [len(getattr(optimizer, name)) for name in _torch.OPTIMIZER_HOOKS] == [1] * 6
    hooks = {name for name in vars(optimizer) if name.endswith("_hooks")}
    assert hooks == set(_torch.OPTIMIZER_HOOKS)


def test_a_tensor_without_data_has_shape_type_and_device_and_sends_functions_to_its_class() -> None:
    seen: list[str] = []

    class Empty(torch.Tensor):
        __torch_function__ = _torch.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return None if func is torch.ops.aten._foreach_zero_.default else torch.zeros(())

    made = _torch.data_less(Empty, torch.empty(2, 3, dtype=torch.bfloat16), (1, 2))
    assert type(made) is Empty
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 2), torch.bfloat16)
    assert made.data_ptr() == 0
    torch.linalg.vector_norm(made)
    torch._foreach_zero_([made])
    assert seen == ["aten.linalg_vector_norm.default", "aten._foreach_zero_.default"]


def test_what_a_sharded_tensor_holds_is_the_object_itself() -> None:
    plain = torch.ones(2)
    assert _torch.local_of(plain) is plain
    assert _torch.local_of(None) is None


@pytest.mark.parametrize("where", ["tensor", "view", "detached", "numpy", "storage", "graph"])
def test_whoever_has_the_memory_of_a_tensor_is_counted(where: str) -> None:
    tensor = nn.Parameter(torch.ones(3, 3))
    assert _torch.storage_readers(tensor) == 1
    other: Any = {
        "tensor": lambda: torch.empty(0).set_(tensor.detach()),
        "view": lambda: tensor.view(-1),
        "detached": tensor.detach,
        "numpy": lambda: tensor.detach().numpy(),
        "storage": tensor.untyped_storage,
        "graph": lambda: nn.functional.linear(torch.ones(2, 3, requires_grad=True), tensor),
    }[where]()
    assert _torch.storage_readers(tensor) == 2
    del other
    assert _torch.storage_readers(tensor) == 1


def test_a_tensor_whose_class_has_functions_of_its_own_is_a_plain_one_without_them() -> None:
    class Own(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    parameter = nn.Parameter(torch.ones(2))
    parameter.__class__ = Own
    with pytest.raises(AssertionError):
        parameter.sum()
    with _torch.without_torch_function():
        assert parameter.detach().sum() == 2


def test_code_that_dynamo_has_compiled_is_known() -> None:
    torch._dynamo.reset()
    assert not _torch.holds_compiled_code()
    made = torch.compile(nn.Linear(2, 2), backend="eager")
    assert isinstance(made, _torch.CompiledModule)
    made(torch.ones(1, 2))
    assert _torch.holds_compiled_code()
    torch._dynamo.reset()
    assert not _torch.holds_compiled_code()
