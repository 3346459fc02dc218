"""Norm recompute (F4), whole layers (F5) and the rules of counting (F3)."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
from torch import nn

from lowtide import SwapManager
from lowtide.errors import ConfigError, LowtideWarning, WrapError
from lowtide.recipes.apply import apply
from lowtide.recipes.attention import find_norms
from lowtide.recipes.config import MemoryConfig
from lowtide.recipes.find import Found
from lowtide.recipes.plan import Role, make_plan

from .kit import BATCH, FLOAT, HIDDEN, LAYERS, SEQUENCE, WIDE, Mcore, allocated, bits, build, held, ops, plain, same

TOKENS = BATCH * SEQUENCE
PATCHES = BATCH * (8 * 8 + 1)
# norms, tokens, bytes a token of the tensors that each no longer keeps, what runs again.
# LayerNorm: its output, mean and reciprocal deviation. RMSNorm as transformers writes it: the normalised input (which
# the weight's gradient reads), the output, and the root.
LAYER_NORM = (HIDDEN * FLOAT, FLOAT, FLOAT)
RMS_NORM = (HIDDEN * FLOAT, HIDDEN * FLOAT, FLOAT)
BY_HAND = {"pow": 1, "mean": 1, "add": 1, "rsqrt": 1, "mul": 2}
CASES = {
    "llama": (2 * LAYERS, TOKENS, RMS_NORM, BY_HAND),
    "qwen3": (2 * LAYERS, TOKENS, RMS_NORM, BY_HAND),
    "mixtral": (2 * LAYERS, TOKENS, RMS_NORM, BY_HAND),
    "gpt2": (2 * LAYERS, TOKENS, LAYER_NORM, {"native_layer_norm": 1}),
    "t5-gated": (5 * LAYERS, TOKENS, RMS_NORM, BY_HAND),
    "vit": (2 * LAYERS, PATCHES, LAYER_NORM, {"native_layer_norm": 1}),
    "opt": (2 * LAYERS, TOKENS, LAYER_NORM, {"native_layer_norm": 1}),
    "mcore": (2 * LAYERS, TOKENS, LAYER_NORM, {"native_layer_norm": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_norms_are_computed_again_and_nothing_else(name: str) -> None:
    if name != "mcore":
        pytest.importorskip("transformers")
    norms, rows, each, again = CASES[name]
    other = build(name)
    apply(other, MemoryConfig(recompute_norm=True))
    assert same(plain(name).bits, bits(other))
    assert plain(name).held - held(other) == norms * allocated(rows, each)
    assert ops(other) - plain(name).ops == Counter({op: norms * count for op, count in again.items()})


def test_norm_and_activation_function_together_free_both() -> None:
    other = build("mcore")
    apply(other, MemoryConfig(recompute_norm=True, recompute_activation_function=True))
    assert same(plain("mcore").bits, bits(other))
    assert plain("mcore").held - held(other) == LAYERS * (2 * allocated(TOKENS, LAYER_NORM) + TOKENS * WIDE * FLOAT)
    assert ops(other) - plain("mcore").ops == Counter({"native_layer_norm": 2 * LAYERS, "gelu": LAYERS})


@pytest.mark.parametrize("name", ["mcore", "llama", "t5-gated", "bert"])
def test_whole_layers_train_the_same(name: str) -> None:
    if name != "mcore":
        pytest.importorskip("transformers")
    block, uniform = build(name), build(name)
    apply(block, MemoryConfig(recompute_method="block", full_recompute_num_layers=2))
    apply(uniform, MemoryConfig(recompute_method="uniform"))
    assert same(plain(name).bits, bits(block))
    assert same(plain(name).bits, bits(uniform))
    assert plain(name).held > held(block) > held(uniform)


def test_inputs_of_whole_layers_move() -> None:
    stays, moves = build("mcore"), build("mcore")
    SwapManager().configure(min_bytes=0)
    apply(stays, MemoryConfig(recompute_method="uniform"))
    apply(moves, MemoryConfig(recompute_method="uniform", swap_inputs=True))
    assert same(plain("mcore").bits, bits(moves))
    # The last layer stays, and the one before it is on its way when forward ends. The first one's input is the batch.
    before = SwapManager().traffic.out_bytes
    held(moves)
    assert SwapManager().traffic.out_bytes > before
    assert held(moves) <= held(stays)


def roles(config: MemoryConfig, layers: int = 4) -> list[str]:
    letters = {Role.WHOLE_LAYER: "L", Role.ACTIVATION: "a", Role.NORM: "n", Role.FULLY_CONNECTED: "f", Role.SWAP: "s"}
    return [
        "".join(dict.fromkeys(letters[wrap.role] for wrap in plan.wraps if wrap.role in letters))
        for plan in make_plan(Mcore(layers), config)
    ]


def test_whole_layers_are_counted_first_and_no_layer_gets_both() -> None:
    act = {"recompute_method": "block", "recompute_activation_function": True}
    assert roles(MemoryConfig(**act, full_recompute_num_layers=1)) == ["L", "a", "a", "a"]
    both = MemoryConfig(**act, full_recompute_num_layers=1, recompute_activation_function_num_layers=3)
    assert roles(both) == ["L", "a", "a", "a"]
    norm = MemoryConfig(recompute_norm=True, recompute_norm_num_layers=2, full_recompute_num_layers=2)
    assert roles(norm) == ["L", "L", "n", "n"]


def test_counts_should_sum_to_the_layers_without_pipeline_stages() -> None:
    short = {"full_recompute_num_layers": 1, "recompute_activation_function_num_layers": 2}
    with pytest.warns(
        LowtideWarning, match="1 layers recompute whole and 2 get recompute_activation_function, of 4"
    ) as caught:
        apply(Mcore(4), MemoryConfig(recompute_activation_function=True, **short))
    assert caught[0].filename == __file__, "the warning points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert roles(MemoryConfig(recompute_activation_function=True, **short, pipeline_stages=2))[3] == ""


@pytest.mark.parametrize(
    ("rank", "want"),
    [(0, ["L", "L", "a"]), (1, ["L", "a", ""])],  # places 0, 2, 4 and 1, 3, 5: three whole, two activation functions
)
def test_virtual_pipeline_chunks_share_the_counts(rank: int, want: list[str]) -> None:
    config = MemoryConfig(
        full_recompute_num_layers=3,
        recompute_activation_function=True,
        recompute_activation_function_num_layers=2,
        pipeline_stages=2,
        virtual_pipeline_chunks=2,
        virtual_pipeline_rank=rank,
    )
    assert roles(config, layers=3) == want


@pytest.mark.parametrize(
    "given",
    [
        {"full_recompute_num_layers": 5},
        {"recompute_activation_function": True, "recompute_activation_function_num_layers": 5},
        {"recompute_norm": True, "recompute_norm_num_layers": 2, "full_recompute_num_layers": 3},
        {"swap_attention": True, "swap_attention_recompute_num_layers": 5},
    ],
)
def test_more_layers_than_there_are_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"more layers are asked for than there are: expected at most 4 .*got 5"):
        roles(MemoryConfig(**given))


def test_norms_outside_of_attention_and_mlp_are_found() -> None:
    layer = nn.ModuleDict({"attn": nn.ModuleDict({"q_norm": nn.RMSNorm(4)}), "ln_1": nn.LayerNorm(4)})
    assert [found.name for found in find_norms(Found("h.0", layer))] == ["ln_1"]
    assert [found.name for found in find_norms(Found("h.0", layer), ["q_norm"])] == ["attn.q_norm"]
    with pytest.raises(WrapError, match=r"no norm was found.*got attn \(h\.0\)"):
        find_norms(Found("h.0", nn.ModuleDict({"attn": nn.Linear(4, 4)})))
