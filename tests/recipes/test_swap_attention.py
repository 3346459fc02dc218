"""Swap attention (A1-A3): what moves, what stays, LoRA, and the fully connected parts beside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import SwapManager
from lowtide.errors import ConfigError, WrapError
from lowtide.recipes.apply import apply
from lowtide.recipes.attention import find_fully_connected, find_swapped
from lowtide.recipes.config import MemoryConfig
from lowtide.recipes.find import Found

from .kit import BATCH, FLOAT, HEADS, HIDDEN, LAYERS, SEQUENCE, WIDE, Mcore, bits, build, held, ops, plain, same

TOKENS = BATCH * SEQUENCE
# What Megatron-like self-attention saves: its input, the fused q, k and v, the result of attention (of which the
# projection reads a view), and one number a head and token.
ATTENTION = TOKENS * (5 * HIDDEN + HEADS) * FLOAT


@pytest.fixture(autouse=True)
def _everything_may_move() -> None:
    SwapManager().configure(min_bytes=0)


@pytest.mark.parametrize("schedule", ["chain", "auto"])
@pytest.mark.parametrize("name", ["mcore", "llama", "mixtral", "gpt2", "t5-gated", "vit"])
def test_attention_moves_and_no_bit_changes(name: str, schedule: str) -> None:
    if name != "mcore":
        pytest.importorskip("transformers")
    other = build(name)
    want = plain(name).bits
    applied = apply(other, MemoryConfig(swap_attention=True, swap_schedule=schedule))
    SwapManager().traffic.out_bytes = 0
    assert same(want, bits(other))
    assert SwapManager().traffic.out_bytes > 0
    assert SwapManager().lower_bytes() == 0
    assert ops(other) == plain(name).ops, "nothing is computed again"
    moved = SwapManager().traffic.out_bytes
    applied.undo()
    assert same(want, bits(other))
    assert SwapManager().traffic.out_bytes == moved


@pytest.mark.cpu
def test_what_a_layer_of_swap_attention_moves_is_what_its_attention_saves() -> None:
    layers = 4
    torch.manual_seed(0)
    unwrapped = Mcore(layers)
    other = copy.deepcopy(unwrapped)
    apply(other, MemoryConfig(swap_attention=True))
    bits(other, steps=1)
    # The last layer never leaves. The first one's input is its norm's output, which nobody else saves.
    assert SwapManager().traffic.out_bytes == (layers - 1) * ATTENTION
    # When forward ends, the last layer is there and the one before it still on its way.
    assert held(unwrapped) - held(other) == (layers - 2) * ATTENTION


@pytest.mark.cpu
def test_the_fully_connected_part_of_the_first_layers_recomputes_besides() -> None:
    swapped, other = build("mcore"), build("mcore")
    apply(swapped, MemoryConfig(swap_attention=True))
    applied = apply(other, MemoryConfig(swap_attention=True, swap_attention_recompute_num_layers=2))
    assert [len(row.answers) for row in applied.rows] == [2, 2, 1]
    assert same(plain("mcore").bits, bits(other))
    # The pre-activation and the activation function's output.
    assert held(swapped) - held(other) == 2 * 2 * TOKENS * WIDE * FLOAT
    extra = ops(other) - ops(swapped)
    assert extra["gelu"] == 2
    assert extra["addmm"] == 2, "the second product is not needed, so it does not run"


def test_bare_count_means_the_fully_connected_parts() -> None:
    applied = apply(build("mcore"), MemoryConfig(swap_attention=True, recompute_num_layers=1))
    first = "recompute the fully connected part: mlp"
    assert [row.answers[0] == first for row in applied.rows] == [True, False, False]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "config",
    [
        MemoryConfig(swap_attention=True),
        MemoryConfig(swap_attention=True, swap_schedule="auto"),
        MemoryConfig(swap_attention=True, swap_attention_recompute_num_layers=2),
        MemoryConfig(recompute_activation_function=True, recompute_norm=True),
        MemoryConfig(full_recompute_num_layers=2, swap_inputs=True),
    ],
)
def test_lora_trains_the_same(config: MemoryConfig) -> None:
    pytest.importorskip("transformers")
    unwrapped, other = lora(0.1), lora(0.1)
    applied = apply(other, config)
    assert applied.rows[0].layer == "base_model.model.model.layers.0"
    assert same(bits(unwrapped), bits(other))
    assert (SwapManager().traffic.out_bytes > 0) == config.swaps
    assert SwapManager().lower_bytes() == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_sum_of_an_adapter_is_kept_and_the_activation_function_freed() -> None:
    """Computing the sum again would keep both of its terms in its place."""
    pytest.importorskip("transformers")
    unwrapped, other = lora(0.0), lora(0.0)
    apply(other, MemoryConfig(recompute_activation_function=True))
    assert held(unwrapped) - held(other) == LAYERS * 2 * TOKENS * WIDE * FLOAT
    assert ops(other) - ops(unwrapped) == {"silu": LAYERS, "mul": LAYERS}


def lora(dropout: float) -> nn.Module:
    peft = pytest.importorskip("peft")
    names = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    settings: dict[str, Any] = {"target_modules": names, "lora_dropout": dropout, "init_lora_weights": False}
    model: nn.Module = peft.get_peft_model(build("llama"), peft.LoraConfig(r=4, lora_alpha=8, **settings))
    return model.train()


def layer_of(*names: str) -> Found:
    return Found("layers.0", nn.ModuleDict({name: nn.Linear(4, 4) for name in names}))


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"), 3),
        (("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp"), 3),
        (("ln_1", "attn", "ln_2", "mlp"), 3),
        (("layernorm_before", "attention", "layernorm_after", "mlp"), 3),
    ],
)
def test_the_documents_names_are_understood_in_every_model(names: tuple[str, ...], want: int) -> None:
    asked = ("input_norm", "self_attention", "post_attention_norm")
    assert [found.name for found in find_swapped([layer_of(*names)], asked)[0]] == list(names[:want])


def test_the_documents_default_moves_the_norms_too() -> None:
    applied = apply(build("mcore"), MemoryConfig(swap_attention=True, swap_modules="input_norm,self_attention"))
    assert applied.rows[0].answers == ("swap: input_layernorm, self_attention",)


def test_a_layer_without_attention_is_left_alone_and_noted() -> None:
    layers = [layer_of("self_attn", "mlp"), layer_of("mixer", "mlp")]
    assert [len(found) for found in find_swapped(layers)] == [1, 0]


@pytest.mark.parametrize("modules", ["self_attn", "self_attention,core"])
def test_a_sub_module_that_no_layer_has_is_refused(modules: str) -> None:
    with pytest.raises(WrapError, match=r"found in no layer: expected (self_attn|core), got input_layernorm"):
        apply(build("mcore"), MemoryConfig(swap_attention=True, swap_modules=modules))
    with pytest.raises(WrapError, match="no fully connected part"):
        find_fully_connected(layer_of("attn", "out"))


def test_one_layer_cannot_be_chained() -> None:
    with pytest.raises(ConfigError, match="a chain of one layer moves nothing"):
        apply(Mcore(1), MemoryConfig(swap_attention=True, layer_modules="layers.*"))


def test_without_a_schedule_groups_drive_it() -> None:
    unwrapped, other = build("mcore"), build("mcore")
    apply(other, MemoryConfig(swap_attention=True, swap_schedule="none"))
    manager = SwapManager()
    x = torch.randn(BATCH, SEQUENCE, HIDDEN)
    manager.set_current_group_name("chunk")
    out = other(x)
    manager.set_current_group_name(None)
    manager.launch_offload("chunk")
    manager.wait_offload("chunk")
    assert manager.lower_bytes() >= LAYERS * ATTENTION  # another device's fused attention may save more
    manager.launch_load("chunk")
    out.sum().backward()
    unwrapped(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(unwrapped.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("schedule", ["chain", "auto"])
def test_micro_batches_in_flight_and_an_evaluation_between_them(schedule: str) -> None:
    unwrapped, other = build("mcore"), build("mcore")
    apply(other, MemoryConfig(swap_attention=True, swap_schedule=schedule, recompute_norm=True))
    batches = [torch.randn(BATCH, SEQUENCE, HIDDEN) for _ in range(3)]
    for model in (unwrapped, other):
        outs = [model(x) for x in batches[:2]]
        with torch.no_grad():
            model(batches[2])
        outs[0].square().mean().backward()
        outs.append(model(batches[2]))
        for out in outs[1:]:
            out.square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(unwrapped.parameters(), other.parameters(), strict=True))
    assert SwapManager().traffic.out_bytes > 0
    assert SwapManager().lower_bytes() == 0


def test_whole_layers_are_not_swapped_besides() -> None:
    other = build("mcore")
    applied = apply(other, MemoryConfig(swap_attention=True, full_recompute_num_layers=1))
    assert [row.answers for row in applied.rows] == [
        ("recompute the layer",),
        ("swap: self_attention",),
        ("swap: self_attention",),
    ]
    assert same(plain("mcore").bits, bits(other))
    with pytest.raises(ConfigError, match="swap_attention has no layer left"):
        apply(build("mcore"), MemoryConfig(swap_attention=True, recompute_method="uniform"))


def test_with_norm_recompute_what_attention_saves_moves_and_the_other_norm_recomputes() -> None:
    other = build("mcore")
    applied = apply(other, MemoryConfig(swap_attention=True, recompute_norm=True))
    assert "what a swapped module saves of a norm moves" in str(applied)
    assert same(plain("mcore").bits, bits(other))
    assert SwapManager().traffic.out_bytes > 0
    assert lowtide.report(other).total("swapped_bytes") > 0
