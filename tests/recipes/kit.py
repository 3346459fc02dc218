"""What the tests of the recipes share: small transformers, one step of each, bits, bytes and operators.

Law: bytes are those that the allocator holds when forward has ended, to the byte.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from lowtide.measure import memory_curve

__all__ = [
    "BATCH",
    "FLOAT",
    "HIDDEN",
    "LAYERS",
    "MODELS",
    "SEQUENCE",
    "WIDE",
    "Mcore",
    "allocated",
    "bits",
    "build",
    "held",
    "ops",
    "same",
]

BATCH, SEQUENCE, HIDDEN, WIDE, LAYERS, VOCABULARY, HEADS = 2, 32, 64, 256, 3, 61, 4
FLOAT = 4  # bytes
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


class _McoreMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


class _McoreAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.linear_qkv(x).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        return self.linear_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, h))


class _McoreLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention = nn.LayerNorm(HIDDEN), _McoreAttention()
        self.pre_mlp_layernorm, self.mlp = nn.LayerNorm(HIDDEN), _McoreMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Mcore(nn.Module):
    """Megatron's names, and an activation function that is called as a function."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_McoreLayer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SMALL, num_key_value_heads=2, **options))


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_SMALL, num_key_value_heads=2, head_dim=16))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_SMALL, num_key_value_heads=2, num_local_experts=4))


def _gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **ends, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout))
    )


def _t5(kind: str, dropout: float = 0.0) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 16, "d_ff": WIDE, "num_heads": HEADS}
    return T5ForConditionalGeneration(
        T5Config(
            **sizes,
            num_layers=LAYERS,
            num_decoder_layers=LAYERS,
            decoder_start_token_id=0,
            dropout_rate=dropout,
            feed_forward_proj=kind,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: value for key, value in _SMALL.items() if key != "vocab_size"}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **dropouts, image_size=32, patch_size=4, num_labels=4))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "ffn_dim": WIDE, "num_hidden_layers": LAYERS}
    more = {"num_attention_heads": HEADS, "word_embed_proj_dim": HIDDEN, "max_position_embeddings": 2 * SEQUENCE}
    return OPTForCausalLM(OPTConfig(**sizes, **more, dropout=0.0, activation_function="gelu"))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "t5-gated": lambda: _t5("gated-gelu"),
    "gpt2-dropout": lambda: _gpt2(0.1),
    "llama-dropout": lambda: _llama(attention_dropout=0.1),
    "t5-dropout": lambda: _t5("gated-gelu", 0.1),
    "t5-relu": lambda: _t5("relu"),
    "vit": _vit,
    "bert": _bert,
    "opt": _opt,
    "mcore": Mcore,
}


def build(name: str) -> nn.Module:
    """The same model whenever it is asked for, on the default device."""
    torch.manual_seed(0)
    return MODELS[name]().train()


def step(model: nn.Module) -> Tensor:
    """Loss of one step on one batch; leaves the gradients."""
    model.zero_grad(set_to_none=True)
    with record_function("forward"):
        loss = _loss(model)
    with record_function("backward"):
        loss.backward()
    return loss.detach()


def _loss(model: nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    kind = type(model).__name__
    where = next(model.parameters()).device
    if kind == "Mcore":
        x = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=draw, device="cpu").to(where)
        out: Tensor = model(x)
        return out.square().mean()
    if kind.startswith("ViT"):
        pixels = torch.randn(BATCH, 3, 32, 32, generator=draw, device="cpu").to(where)
        labels = torch.zeros(BATCH, dtype=torch.int64, device=where)
        return model(pixel_values=pixels, labels=labels).loss
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=draw, device="cpu").to(where)
    cache = {} if kind.startswith("Bert") else {"use_cache": False}
    return model(input_ids=ids, labels=ids, **cache).loss


def bits(model: nn.Module, steps: int = 2) -> list[Tensor]:
    """Losses, gradients and the generator's state of some steps."""
    torch.manual_seed(5)
    seen: list[Tensor] = []
    for _ in range(steps):
        seen.append(step(model))
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen.append(torch.get_rng_state())
    return seen


@dataclass(frozen=True)
class Plain:
    """What the unwrapped model gives."""

    bits: list[Tensor]
    held: int
    ops: Counter[str]


@functools.cache
def plain(name: str) -> Plain:
    """The figures of an unwrapped model, measured once."""
    model = build(name)
    return Plain(bits(model), held(model), ops(model))


def same(want: list[Tensor], got: list[Tensor]) -> bool:
    """Whether two records agree in every bit."""
    return len(want) == len(got) and all(torch.equal(w, g) for w, g in zip(want, got, strict=True))


def held(model: nn.Module) -> int:
    """Bytes that the graph of one forward holds when it has ended, beside its loss."""
    if torch.accelerator.is_available():
        step(model)
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        loss = _loss(model)
        after = torch.accelerator.memory_allocated()
        loss.backward()
        return after - before
    curve = memory_curve(lambda: (step(model), model.zero_grad(set_to_none=True)), warmup=1)
    end = next(phase.end for phase in curve.phases if phase.name == "forward")
    return [size for second, size in curve.points if second <= end][-1]


class _Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the operators that run under it, without those that only look at a tensor in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name not in {"as_strided", "detach"}:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def allocated(rows: int, each: tuple[int, ...]) -> int:
    """Bytes of one tensor of so many rows for each size of a row: an accelerator gives multiples of 512."""
    grain = 512 if torch.accelerator.is_available() else 1
    return sum(-(-rows * size // grain) * grain for size in each)


def ops(model: nn.Module) -> Counter[str]:
    """The operators of one backward."""
    model.zero_grad(set_to_none=True)
    loss = _loss(model)
    with _Operators() as operators:
        loss.backward()
    return operators.counts
