"""lowtide lowers the high-water mark of training memory.

For each tensor that autograd saves there is one decision: keep it on the
device, keep it elsewhere, or compute it again. Wrap layers in place, say which,
and train as before, with the same bits::

    import lowtide

    for layer in model.layers:
        lowtide.checkpoint_wrapper(layer, lowtide.swap_matmuls_and_attention(), swap_inputs=True)
    lowtide.auto(model)

Importing this module touches no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.activations.call_mode import create_selective_checkpoint_contexts
from lowtide.activations.discard import CheckpointWithoutOutput
from lowtide.activations.function_node import pure
from lowtide.activations.wrappers import Auto, auto, checkpoint_wrapper, regions_of, swap_wrapper, unwrap
from lowtide.optim.cpu import CpuOptimizer, CpuOptimizerReport, cpu_optimizer
from lowtide.optim.placement import offload_optimizer
from lowtide.optim.reuse import reuse_fp32_param
from lowtide.optim.shared import SharedMasters
from lowtide.optim.swap import SwapOptimizer, SwapOptimizerReport, swap_optimizer
from lowtide.policy import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    save_matmuls_and_attention,
    save_ops,
    swap_matmuls_and_attention,
    swap_ops,
)
from lowtide.recipes.apply import Applied, AppliedRow, apply
from lowtide.recipes.config import MemoryConfig
from lowtide.recipes.layer_inputs import (
    LayerInputs,
    SwapLayerInputManager,
    SwapTensors,
    is_valid_for_swap,
    swap_layer_input_fboverlap_1f1b_wrapper,
    swap_layer_input_fboverlap_backward_wrapper,
    swap_layer_input_fboverlap_forward_wrapper,
    swap_layer_input_forward_wrapper,
    swap_layer_input_init_wrapper,
    swap_layer_inputs,
)
from lowtide.report.summary import Report, build
from lowtide.residency.group import Storage, SwapGroup
from lowtide.residency.manager import SwapManager
from lowtide.residency.swap_tensor import SwapState, SwapTensor

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"

__all__ = [
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
]


def report(model: torch.nn.Module) -> Report:
    """What every wrapped region of ``model`` kept, recomputed and swapped in its last call, and what was refused.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(lowtide.checkpoint_wrapper(torch.nn.Linear(4, 4)))
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> lowtide.report(model).rows[0].name
    '0'
    """
    return build(regions_of(model), SwapManager().notes())
