"""The bench's Llama is Hugging Face's, to the bit; its policies change no gradient and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import SwapManager
from lowtide.bench.sim_formula import Layers, Link
from lowtide.bench.sim_models import MODELS, Llama, LlamaLayer, Shape, rope_tables
from lowtide.bench.sim_policies import HIDEABLE, POLICIES, Product, best_fit, hideable, moving, products, worn
from lowtide.sim.describe import Description

TOKENS = 16
SMALL = Shape(3, 64, 4, 2, 96, 128)
NAMES = {
    "self_attn.q_proj": "self_attn.q",
    "self_attn.k_proj": "self_attn.k",
    "self_attn.v_proj": "self_attn.v",
    "self_attn.o_proj": "self_attn.o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
}
MIB = 1 << 20


def theirs(shape: Shape) -> Any:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = transformers.LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=shape.layers,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    return LlamaDecoderLayer(config, 0)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_what_hugging_faces_computes(kv_heads: int, dtype: torch.dtype) -> None:
    shape = Shape(1, 64, 4, kv_heads, 96)
    reference, ours = theirs(shape).to(dtype), LlamaLayer(shape).to(dtype)
    state = reference.state_dict()
    ours.load_state_dict({f"{NAMES[key.removesuffix('.weight')]}.weight": value for key, value in state.items()})
    cos, sin = (table.to(dtype) for table in rope_tables(TOKENS, shape.head))
    x = torch.randn(2, TOKENS, shape.width, dtype=dtype)
    want = reference(x, attention_mask=None, position_embeddings=(cos[None], sin[None]))
    want = want[0] if isinstance(want, tuple) else want
    assert torch.equal(ours(x, cos, sin), want)


def saved_bytes(layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor) -> int:
    """Bytes of the storages that autograd saves, parameters left out."""
    found: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(tensor)  # an address says who it is only while it is taken
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, cos, sin)
    return sum(found.values())


def expected_bytes(shape: Shape, tokens: int) -> int:
    """What a layer saves, by hand: norms, attention, MLP, and the tables that all layers share."""
    narrow = shape.kv_heads * shape.head
    norm = 4 * shape.width + 4 + 2 * shape.width + 2 * shape.width  # single precision, its scale, normed, weighted
    attention = 2 * shape.width + 2 * narrow + 2 * narrow + 2 * shape.width + 4 * shape.heads
    return tokens * (2 * norm + attention + 4 * 2 * shape.hidden + 2 * 2 * shape.head)


def test_a_layer_saves_what_can_be_counted_by_hand() -> None:
    shape = Shape(1, 64, 4, 4, 96)
    x = torch.randn(1, TOKENS, shape.width, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = (table.bfloat16() for table in rope_tables(TOKENS, shape.head))
    assert saved_bytes(LlamaLayer(shape).bfloat16(), x, cos, sin) == expected_bytes(shape, TOKENS)


def test_a_layer_of_the_7b_model_saves_the_bytes_that_the_roofline_assumes() -> None:
    assert expected_bytes(MODELS["llama-7b"], 4096) / MIB == pytest.approx(730.5, abs=0.05)


@pytest.mark.parametrize(("model", "billions"), [("llama-7b", 6.74), ("llama-8b-gqa", 8.03), ("llama-70b", 68.98)])
def test_the_sizes_are_those_of_the_models_they_are_named_after(model: str, billions: float) -> None:
    with torch.device("meta"):
        one = Llama(MODELS[model].with_layers(1), 8, ends=True)
    layer = sum(p.numel() for p in one.blocks.parameters())
    rest = sum(p.numel() for p in one.parameters()) - layer
    assert (layer * MODELS[model].layers + rest) / 1e9 == pytest.approx(billions, abs=0.006)


def gradients(model: Llama, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def small() -> tuple[Llama, Tensor]:
    torch.manual_seed(0)
    return Llama(SMALL, TOKENS), torch.randn(2, TOKENS, SMALL.width)


def hideable_policy() -> Any:
    counts = {torch.ops.aten.mm.default: 7, torch.ops.aten.add.Tensor: 6}
    return moving([Product("sdpa", 1, 1.0), Product("gate", 1, 1.0)], counts)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_changes_no_gradient_and_leaves_nothing_behind(name: str) -> None:
    model, x = small()
    plain = gradients(model, x)
    policy = hideable_policy() if name == HIDEABLE else POLICIES[name]
    with worn(policy, model):
        SwapManager().configure(min_bytes=0)
        assert ("forward" in model.blocks[0].__dict__) is (name != "plain")
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, x), strict=True))
        assert (SwapManager().traffic.out_bytes > 0) is policy.moves
    assert not [m for m in model.modules() if "forward" in m.__dict__]
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, x), strict=True))


def test_a_policy_comes_off_when_the_step_fails() -> None:
    model, _ = small()

    def fail() -> None:
        with worn(POLICIES["swap-all"], model):
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert not [m for m in model.modules() if "forward" in m.__dict__]


H100 = Description.named("h100-80gb")


def test_products_are_counted_with_their_bytes_and_the_roofline_of_their_operations() -> None:
    found = {product.name: product for product in products(MODELS["llama-8b-gqa"], 1024, 2, H100)}
    assert set(found) == {"q", "k", "v", "o", "gate", "up", "sdpa"}
    assert found["gate"].nbytes == 2 * 1024 * 14336 * 2
    assert found["k"].nbytes == found["q"].nbytes // 4
    assert found["gate"].seconds == 2 * 2048 * 4096 * 14336 / (989e12 * 0.65)
    assert found["sdpa"].nbytes == found["q"].nbytes + 2048 * 32 * 4


def test_the_dearest_recompute_that_fits_is_chosen() -> None:
    a, b, c = Product("a", 60, 6.0), Product("b", 50, 5.0), Product("c", 50, 4.0)
    assert best_fit([a, b, c], 10.0, 10.0, 0.0) == (b, c)
    assert best_fit([a, b, c], 9.9, 10.0, 0.0) == (a,)
    assert best_fit([a, b, c], 10.0, 10.0, 0.1) == (a,)
    assert best_fit([a, b, c], 4.0, 10.0, 0.0) == ()
    assert best_fit([a, b, c], -1.0, 10.0, 0.0) == ()
    assert best_fit([a, Product("same", 40, 6.0)], 6.0, 10.0, 0.0)[0].name == "same"


def test_what_a_layer_moves_for_nothing_fits_under_its_forward_together_with_its_input() -> None:
    shape, layers, latency = MODELS["llama-7b"], Layers(32, 3.5e-3, 7e-3), H100.link_latency
    candidates, input_bytes = products(shape, 4096, 1, H100), 4096 * shape.width * 2
    chosen = hideable(layers, Link(50e9, 50e9), candidates, input_bytes, latency)
    moved = input_bytes + sum(product.nbytes for product in chosen)
    assert chosen
    assert moved / 50e9 + (1 + len(chosen)) * latency <= 3.5e-3
    assert hideable(layers, Link(50e9, 1e9), candidates, input_bytes, latency) == ()
