"""Activation-function recompute: what it frees, to the byte, what it runs again, and the same bits (F2)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import LowtideWarning, WrapError
from lowtide.recipes.activation_function import ActivationPolicy, find_holders
from lowtide.recipes.apply import apply
from lowtide.recipes.config import MemoryConfig
from lowtide.recipes.find import Found

from .kit import BATCH, FLOAT, LAYERS, SEQUENCE, WIDE, bits, build, held, ops, plain, same

TOKENS = BATCH * SEQUENCE
PATCHES = BATCH * (8 * 8 + 1)
WIDE_BYTES = WIDE * FLOAT
# layers, rows of the wide tensor, how many wide tensors a layer no longer keeps, and what runs again for them.
# silu: the output and the gate's product. gelu: the output. Written out as GPT-2 has it: half of x, tanh, one plus
# that, and the output; T5's gate adds its product. Experts: each token passes two of them.
CASES = {
    "llama": (LAYERS, TOKENS, 2, {"silu": 1, "mul": 1}),
    "qwen3": (LAYERS, TOKENS, 2, {"silu": 1, "mul": 1}),
    "mixtral": (LAYERS, 2 * TOKENS, 2, {"silu": 1, "mul": 1}),
    "gpt2": (LAYERS, TOKENS, 4, {"pow": 1, "mul": 4, "add": 2, "tanh": 1}),
    "t5-gated": (2 * LAYERS, TOKENS, 5, {"pow": 1, "mul": 5, "add": 2, "tanh": 1}),
    "vit": (LAYERS, PATCHES, 1, {"gelu": 1}),
    "bert": (LAYERS, TOKENS, 1, {"gelu": 1}),
    "opt": (LAYERS, TOKENS, 1, {"gelu": 1}),
    "mcore": (LAYERS, TOKENS, 1, {"gelu": 1}),
}
CONFIG = MemoryConfig(recompute_activation_function=True)


@pytest.mark.parametrize("name", CASES)
def test_frees_the_wide_outputs_runs_the_activation_again_and_changes_no_bit(name: str) -> None:
    if name != "mcore":
        pytest.importorskip("transformers")
    layers, rows, tensors, again = CASES[name]
    other = build(name)
    applied = apply(other, CONFIG)
    assert same(plain(name).bits, bits(other))
    assert plain(name).held - held(other) == layers * tensors * rows * WIDE_BYTES
    ran = ops(other)
    assert ran - plain(name).ops == Counter({op: layers * count for op, count in again.items()})
    assert plain(name).ops - ran == Counter()
    applied.undo()
    assert not any("forward" in module.__dict__ for module in other.modules())


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_count_is_of_layers(count: int) -> None:
    other = build("mcore")
    apply(other, MemoryConfig(recompute_activation_function=True, recompute_activation_function_num_layers=count))
    assert plain("mcore").held - held(other) == count * TOKENS * WIDE_BYTES


def test_relu_frees_nothing_and_says_so() -> None:
    """Its backward reads its output, which the projection saves as well: one tensor either way."""
    pytest.importorskip("transformers")
    other = build("t5-relu")
    with pytest.warns(LowtideWarning, match=r"frees nothing where ReLU alone stands.*encoder\.block\.0") as caught:
        applied = apply(other, CONFIG)
    assert caught[0].filename == __file__, "the warning points at the caller"
    assert "ReLU" in str(applied)
    assert plain("t5-relu").held == held(other)
    assert plain("t5-relu").ops == ops(other)


class _SquaredRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)).square())


def test_of_a_squared_relu_the_square_alone_runs_again() -> None:
    x = torch.ones(4, 8)
    mlp = lowtide.checkpoint_wrapper(_SquaredRelu(), ActivationPolicy(), recompute="replay")
    mlp(x).sum().backward()
    row = lowtide.report(mlp).rows[0]
    assert row.recomputed_bytes == 4 * 32 * FLOAT


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))}), ["mlp"]),
        # experts, each with its own activation
        (
            nn.ModuleDict(
                {"experts": nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 4)) for _ in range(2))}
            ),
            ["experts.0", "experts.1"],
        ),
        # an activation in attention is not an MLP's
        (
            nn.ModuleDict(
                {
                    "attn": nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4)),
                    "ff": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
                }
            ),
            ["ff"],
        ),
        # nor is a mixer's
        (
            nn.ModuleDict(
                {
                    "mixer": nn.ModuleDict({"conv": nn.Conv1d(4, 4, 1), "act": nn.SiLU(), "out": nn.Linear(4, 4)}),
                    "ff": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
                }
            ),
            ["ff"],
        ),
        # projections in the layer itself: the activation alone, inside of a region of the layer
        (nn.ModuleDict({"fc1": nn.Linear(4, 8), "act": nn.GELU(), "fc2": nn.Linear(8, 4)}), ["act"]),
        # no activation module at all: by name
        (nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})}), ["mlp"]),
    ],
)
def test_the_module_that_holds_both_projections_is_found(module: nn.Module, names: list[str]) -> None:
    assert [holder.found.name for holder in find_holders(Found("layers.0", module))] == names


def test_a_layer_without_an_activation_function_is_refused() -> None:
    layer = nn.ModuleDict({"attn": nn.Linear(4, 4), "out": nn.Linear(4, 4)})
    with pytest.raises(WrapError, match=r"no activation function.*expected a module with.*got attn, out \(layers\.3\)"):
        find_holders(Found("layers.3", layer))
    with pytest.raises(WrapError, match=r"expected feed, got attn, out"):
        find_holders(Found("layers.3", layer), ["feed"])
