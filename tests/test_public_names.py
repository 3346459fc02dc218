"""The public names are data: what is exported, that each explains itself, and that importing them touches nothing."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide import errors

EXPORTS = {
    "Applied",
    "AppliedRow",
    "Auto",
    "CheckpointPolicy",
    "CheckpointWithoutOutput",
    "CpuOptimizer",
    "CpuOptimizerReport",
    "LayerInputs",
    "MemoryConfig",
    "Report",
    "SelectiveCheckpointContext",
    "SharedMasters",
    "Storage",
    "SwapGroup",
    "SwapLayerInputManager",
    "SwapManager",
    "SwapOptimizer",
    "SwapOptimizerReport",
    "SwapState",
    "SwapTensor",
    "SwapTensors",
    "apply",
    "auto",
    "checkpoint_wrapper",
    "cpu_optimizer",
    "create_selective_checkpoint_contexts",
    "errors",
    "is_valid_for_swap",
    "offload_optimizer",
    "pure",
    "report",
    "reuse_fp32_param",
    "save_matmuls_and_attention",
    "save_ops",
    "swap_layer_input_fboverlap_1f1b_wrapper",
    "swap_layer_input_fboverlap_backward_wrapper",
    "swap_layer_input_fboverlap_forward_wrapper",
    "swap_layer_input_forward_wrapper",
    "swap_layer_input_init_wrapper",
    "swap_layer_inputs",
    "swap_matmuls_and_attention",
    "swap_ops",
    "swap_optimizer",
    "swap_wrapper",
    "unwrap",
}
# Made by another public name, whose example shows it, or an enumeration of states.
WITHOUT_EXAMPLE = {
    "Applied": "apply",
    "AppliedRow": "apply",
    "Auto": "auto",
    "CpuOptimizer": "cpu_optimizer",
    "CpuOptimizerReport": "cpu_optimizer",
    "LayerInputs": "swap_layer_inputs",
    "Report": "report",
    "SwapOptimizer": "swap_optimizer",
    "SwapOptimizerReport": "swap_optimizer",
    "SwapState": "SwapTensor",
    "errors": "",
}
SIGNATURES = {
    "checkpoint_wrapper": "(module_or_fn, policy_fn=None, swap_inputs=False, *, "
    "recompute='auto', certify=0, name=None)",
    "swap_layer_inputs": "(layers, *, prefetch=None, micro_batches=1)",
    "is_valid_for_swap": "(tensor, custom_check_fn=None)",
    "swap_wrapper": "(module_or_fn, policy_fn=None, *, certify=0, name=None)",
    "unwrap": "(module_or_fn)",
    "apply": "(model, config, optimizer=None)",
    "cpu_optimizer": "(optimizer, *, master='fp32', grad_offload=False, overlap=False)",
    "offload_optimizer": "(optimizer, *, step='auto', master='fp32', grad_offload=False, overlap=False)",
    "reuse_fp32_param": "(model, optimizer, *, mode='exact', swap_times=16)",
    "swap_optimizer": "(optimizer, *, swap_times=16, bucket_bytes=None, state=None, master=None, "
    "residual_mode='exact', tier=None, elementwise=None, overlap=False)",
    "auto": "(model)",
    "report": "(model)",
    "pure": "(function)",
    "save_ops": "(*ops)",
    "swap_ops": "(*ops)",
    "save_matmuls_and_attention": "()",
    "swap_matmuls_and_attention": "()",
    "create_selective_checkpoint_contexts": "(policy_fn)",
}
METHODS = {
    "SwapManager": {
        "configure": "(self, *, min_bytes, in_flight_bytes, prefetch, host_bytes, file_dir)",
        "set_forward_prefetch_layer": "(self, first_layer, second_layer)",
        "set_current_group_name": "(self, group_name)",
        "launch_offload": "(self, group_name, copy_stream=None)",
        "wait_offload": "(self, group_name)",
        "launch_load": "(self, group_name, copy_stream=None)",
        "wait_load": "(self, group_name)",
        "add_storage": "(self, group_name, storage)",
        "lower_bytes": "(self)",
        "reset": "(self)",
    },
    "SwapTensor": {
        "async_offload": "(self, copy_stream=None)",
        "wait_offload": "(self)",
        "async_load": "(self, copy_stream=None)",
        "wait_load": "(self)",
        "get_val": "(self)",
    },
    "CheckpointWithoutOutput": {
        "checkpoint": "(self, function, distribute_saved_activations, *inputs)",
        "discard_output": "(self)",
        "recompute": "(self, _grad=None)",
        "discard_output_and_register_recompute": "(self, hook_tensor)",
    },
    "SwapGroup": dict.fromkeys(["launch_offload", "launch_load"], "(self, copy_stream=None)"),
    "Auto": {"undo": "(self)"},
}


def _written(thing: Any, *, defaults: bool = True) -> str:
    """A signature without annotations."""
    signature = inspect.signature(thing)
    bare = [
        p.replace(annotation=inspect.Parameter.empty, default=p.default if defaults else inspect.Parameter.empty)
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def test_the_exports_are_exactly_these() -> None:
    assert set(lowtide.__all__) == EXPORTS
    assert len(lowtide.__all__) == len(EXPORTS)
    assert all(hasattr(lowtide, name) for name in EXPORTS)


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_the_signature_of_a_verb(name: str) -> None:
    assert _written(getattr(lowtide, name)) == SIGNATURES[name]


@pytest.mark.parametrize(("name", "method"), [(n, m) for n, methods in METHODS.items() for m in methods])
def test_the_signature_of_a_method(name: str, method: str) -> None:
    thing = getattr(getattr(lowtide, name), method)
    assert _written(thing, defaults=method != "configure") == METHODS[name][method]


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    thing = getattr(lowtide, name)
    text = inspect.getdoc(thing) or ""
    assert len(text) > 20
    if name in WITHOUT_EXAMPLE:
        shown_by = WITHOUT_EXAMPLE[name]
        text = inspect.getdoc(getattr(lowtide, shown_by)) or "" if shown_by else inspect.getdoc(errors.explain) or ""
    assert doctest.DocTestParser().get_examples(text), f"{name} has no example"


@pytest.mark.parametrize("name", sorted(set(lowtide.__all__) - {"errors"}))
def test_every_public_method_has_a_docstring(name: str) -> None:
    thing = getattr(lowtide, name)
    if not isinstance(thing, type):
        return
    for member, value in vars(thing).items():
        function = value.fget if isinstance(value, property) else value
        if not member.startswith("_") and inspect.isfunction(function):
            assert inspect.getdoc(function), f"{name}.{member}"


def test_every_error_is_exported_documented_and_described_in_the_tree() -> None:
    for name in errors.__all__:
        assert inspect.getdoc(getattr(errors, name))
        if name not in {"explain", "LowtideWarning"}:
            assert name in (errors.__doc__ or "")


def test_every_module_says_what_it_exports_and_what_it_is_for() -> None:
    for info in pkgutil.walk_packages(lowtide.__path__, "lowtide."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        assert module.__doc__, info.name
        names = getattr(module, "__all__", [])
        assert all(hasattr(module, name) for name in names), info.name


def test_the_version_is_the_packages() -> None:
    import importlib.metadata

    assert importlib.metadata.version("lowtide") == lowtide.__version__


IMPORT_PROBE = """
import sys, threading, os
import torch
made = []
def refuse(*args, **kwargs):
    made.append(1)
    raise AssertionError("importing lowtide asked for a device")
for name in ("current_accelerator", "is_available", "device_count", "current_stream", "synchronize"):
    setattr(torch.accelerator, name, refuse)
for name in ("init", "_lazy_init", "current_device", "device_count", "current_stream", "synchronize"):
    setattr(torch.cuda, name, refuse)
threads, state = threading.active_count(), torch.get_rng_state()
numeric = (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
import lowtide
assert not made
assert not torch.cuda.is_initialized()
assert threading.active_count() == threads
assert torch.equal(state, torch.get_rng_state())
assert numeric == (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
assert torch._C._len_torch_dispatch_stack() == 0
heavy = {"matplotlib", "typer", "rich", "jinja2", "transformers", "torch._inductor.compile_fx"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_importing_touches_no_device_no_state_and_nothing_heavy() -> None:
    search = os.pathsep.join(filter(None, [str(Path(lowtide.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
