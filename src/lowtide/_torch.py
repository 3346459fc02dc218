"""The one place where private torch names are used.

Every name below is private in torch, has no public counterpart with the same
meaning, and is looked up here once, so that a torch release that moves it
breaks one file and one test (``tests/test_torch_shim.py``). The versions are
those in which the name was seen to work.

Imports no other module of the package.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

# The first call of a dispatch mode imports dynamo lazily, and the frames of that
# import would keep the first tape alive for good (2.10-2.14).
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "FUNCTION_WITH_APPLY",
    "NO_BACKWARD",
    "OPTIMIZER_HOOKS",
    "TRACING_TYPES",
    "CompiledModule",
    "DispatchMode",
    "SingleLevelFunction",
    "any_functorch_transform",
    "autograd_keeps_graph",
    "backward_leaves_out_a_neighbour",
    "conjugate_view",
    "current_backward",
    "current_python_node",
    "current_saved_tensor_hooks",
    "data_less",
    "direct_call",
    "free_weak_storage",
    "holds_compiled_code",
    "is_traceable_subclass",
    "like_sharded",
    "local_of",
    "no_autocast",
    "no_dispatch",
    "no_torch_function",
    "pin_again",
    "queue_after_backward",
    "register_device_module",
    "storage_key",
    "storage_readers",
    "swap_bytes",
    "take_weak_storage",
    "unhooked_step",
    "weak_storage_is_dead",
    "without_modes",
    "without_torch_function",
]

# `Function.apply` calls `super().apply`; the class below is where `f = Fn.apply`,
# bound before we were imported, still arrives (2.0-2.14).
SingleLevelFunction: type = torch.autograd.function._SingleLevelFunction
# Where every call of a Function passes: up to 2.13 `Function.apply` is Python and goes on to the class below; from 2.14
# on it is the C method itself, named once more in `Function`, and an `apply` bound before our hook passes it by.
FUNCTION_WITH_APPLY: type = (
    torch.autograd.Function
    if torch.autograd.Function.__dict__["apply"] is torch._C._FunctionBase.__dict__["apply"]
    else SingleLevelFunction
)

# The Python-only context that `torch.utils.checkpoint` too uses to replay baked-in casts (1.11-2.14).
no_autocast: Callable[[], Any] = torch._C._DisableAutocast


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that costs no more than its handler, and that compiled code does not see (2.0-2.14)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that torch otherwise puts around the handler costs 0.8 us an operator.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Operators that a compiled region runs inside are not ours to see, as in torch's own checkpoint."""
        return True


# Tensors without data, as in sharding propagation and tracing (2.0-2.14).
TRACING_TYPES: tuple[type, ...] = (FakeTensor, FunctionalTensor)

# What `current_backward` says outside of a backward.
NO_BACKWARD = -1

# Runs the body below every Python dispatch mode and subclass (1.11-2.14).
no_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch


# As a class's `__torch_function__`: its tensors are plain ones up to the dispatcher (1.11-2.14).
no_torch_function: Any = torch._C._disabled_torch_function_impl


# Runs the body as if no tensor's class had a `__torch_function__` (2.0-2.14).
without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


# What `torch.compile` makes of a module (2.0-2.14).
CompiledModule: type = torch._dynamo.eval_frame.OptimizedModule


def holds_compiled_code() -> bool:
    """Whether this process holds code that dynamo has compiled (2.1-2.14)."""
    return bool(torch._dynamo.convert_frame.output_codes.seen)


def data_less(
    cls: type[torch.Tensor], like: torch.Tensor, strides: tuple[int, ...], where: torch.device | None = None
) -> Any:
    """A tensor of ``cls`` with the shape and type of ``like``, on its device or ``where``, no memory (1.11-2.14)."""
    where = where or like.device
    return torch.Tensor._make_wrapper_subclass(cls, like.size(), strides=strides, dtype=like.dtype, device=where)


def storage_key(tensor: torch.Tensor) -> int:
    """Address of the C++ storage of ``tensor``: its identity while something (weakly) pins it (2.0-2.14)."""
    return int(tensor.untyped_storage()._cdata)


def storage_readers(tensor: torch.Tensor) -> int:
    """How many tensors, and storages in somebody's hands, have the memory of ``tensor``, itself included (2.2-2.14)."""

    def counted(one: torch.Tensor) -> int:
        storage = one.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)

    # What the counting itself adds is up to Python's version.
    return 1 + counted(tensor) - counted(torch.empty(1, device="cpu"))


# Pin the C++ struct of a storage, not its bytes, and give a pin back (1.x-2.14). Bound here without a wrapper of our
# own, like `current_backward` below: they run for every operator of the user's forward.
take_weak_storage: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage._weak_ref  # type: ignore[assignment]
free_weak_storage: Callable[[int], None] = torch.UntypedStorage._free_weak_ref


# Exchange the memory behind two storages; every view of either sees the other's (2.13-2.14, perhaps earlier). Without
# it, what is given back to a storage must be copied there.
swap_bytes: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] | None = getattr(
    torch.UntypedStorage, "_swap_data_ptr_", None
)


def pin_again(key: int) -> int | None:
    """One more pin of a storage that is pinned already, or None if its bytes are gone (1.x-2.14)."""
    storage: Any = torch.UntypedStorage._new_with_weak_ptr(key)
    return None if storage is None else int(storage._weak_ref())


def weak_storage_is_dead(key: int) -> bool:
    """Whether the bytes behind a pinned storage are gone."""
    return bool(torch.UntypedStorage._expired(key))


def any_functorch_transform() -> bool:
    """Whether a ``torch.func`` transform is active on this thread (2.1-2.14)."""
    return torch._C._are_functorch_transforms_active()


def current_saved_tensor_hooks() -> Callable[[torch.Tensor], Any] | None:
    """The pack hook autograd would call now, or None (2.1-2.14)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks else None


def autograd_keeps_graph() -> bool:
    """Whether the backward that runs now was asked to retain its graph; only valid inside a backward (2.1-2.14)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


# The engine's id of the backward that runs on this thread, or NO_BACKWARD (1.12-2.14).
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that runs now ends (1.x-2.14)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def direct_call(overload: Any) -> Callable[..., Any]:
    """The C++ entry behind an ``OpOverload``, without its Python ``__call__`` (2.0-2.14)."""
    entry: Callable[..., Any] = overload._op
    return entry


def current_python_node() -> Any | None:
    """The node of an ``autograd.Function`` whose backward runs now on this thread, or None (2.1-2.14)."""
    node: Any = torch._C._current_autograd_node()
    return node if isinstance(node, torch.autograd.function.BackwardCFunction) else None


def without_modes(argument: Any) -> Any:
    """What ``torch.library`` passes to its Functions beside the user's arguments, less today's dispatch modes.

    Its set of dispatch keys names the modes of the moment; called again without one, torch 2.10 and 2.11 assert
    (2.4-2.14). Any other argument is given back as it is.
    """
    keys = getattr(argument, "keyset", None)
    if not isinstance(keys, torch._C.DispatchKeySet):
        return argument
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        keys = keys.remove(key)
    return dataclasses.replace(argument, keyset=keys)


def backward_leaves_out_a_neighbour() -> bool:
    """Whether the node that runs now leads to one that this backward was not asked for (2.1-2.14).

    It will then run again, in a backward of what was left out.
    """

    def is_asked_for(node: Any) -> bool:
        try:
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError:
            # What it raises for a leaf whose gradient torch.autograd.grad was asked for, and for nothing else here.
            return True

    node: Any = torch._C._current_autograd_node()
    following = () if node is None else node.next_functions
    return any(one is not None and not is_asked_for(one) for one, _ in following)


def conjugate_view(tensor: torch.Tensor, *, conjugate: bool, negative: bool) -> torch.Tensor:
    """Set the lazy conj and neg bits on a view of ``tensor`` (1.10-2.14)."""
    if conjugate:
        tensor = torch._conj(tensor)
    if negative:
        tensor = torch._neg_view(tensor)
    return tensor


def is_traceable_subclass(tensor: object) -> bool:
    """Whether a tensor subclass can be taken apart with ``__tensor_flatten__`` (2.1-2.14)."""
    return is_traceable_wrapper_subclass(tensor)


def register_device_module(name: str, module: ModuleType) -> None:
    """Make a module ``torch.<name>``, where torch looks for what a backend outside of it can do (2.1-2.14)."""
    torch._register_device_module(name, module)


# Where an optimizer keeps the hooks that were registered on it, by attribute (2.3-2.14).
OPTIMIZER_HOOKS: tuple[str, ...] = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def unhooked_step(optimizer_class: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The ``step`` of an optimizer's class without the wrapper that runs hooks around it (2.0-2.14).

    ``Optimizer.__init__`` replaces the method in the class and marks what it put there with ``hooked``.
    """
    step: Any = optimizer_class.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def like_sharded(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A ``DTensor`` over ``local`` with the mesh and placements of ``like``, wherever ``local`` lies (2.5-2.14).

    ``DTensor.from_local`` would move it to the mesh's device.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - needs a torch with distributed
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415

    assert isinstance(like, DTensor)
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    made: torch.Tensor = DTensor(local, spec, requires_grad=False)
    return made


def local_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The very object that a ``DTensor`` holds, of which ``to_local`` may give a view; else the tensor (2.0-2.14)."""
    return getattr(tensor, "_local_tensor", tensor)
