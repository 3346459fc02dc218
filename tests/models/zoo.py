"""Small models of every kind that training code contains, and a batch for each.

Holds one builder a kind. Law: a model is a function of torch's seed; each has
regions that are found by class, as a user would wrap "every decoder layer".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ZOO", "Specimen", "Step"]

Step = Callable[[nn.Module, int], Tensor]
D, V, T, B = 16, 32, 8, 2


@dataclass(frozen=True)
class Specimen:
    """A model, the classes whose instances become regions, and a step: ``(model, number) -> loss``."""

    build: Callable[[], nn.Module]
    regions: tuple[str, ...]
    step: Step
    needs: str = ""


ZOO: dict[str, Specimen] = {}


def _specimen(name: str, regions: tuple[str, ...], step: Step, needs: str = "") -> Callable[[Any], Any]:
    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO[name] = Specimen(build, regions, step, needs)
        return build

    return add


def _tokens(number: int, length: int = T) -> Tensor:
    return torch.randint(0, V, (B, length), generator=torch.Generator().manual_seed(number))


def _next_token(model: nn.Module, number: int) -> Tensor:
    ids = _tokens(number)
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def _next_token_bf16(model: nn.Module, number: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _next_token(model, number)


def _square(model: nn.Module, number: int) -> Tensor:
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(number))
    out = model(x)
    return out.float().square().mean()


class Block(nn.Module):
    """A GPT block: both norms, fused qkv, attention and MLP with dropout."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.RMSNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D, bias=False)
        self.up, self.down, self.p = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), p

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + F.dropout(self.o(a), self.p, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.n2(x)))), self.p, self.training)


class Stack(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, *blocks: nn.Module, tie: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = nn.Embedding(V, D), nn.ModuleList(blocks), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@_specimen("gpt-dropout", ("Block",), _next_token)
def _gpt() -> nn.Module:
    return Stack(*[Block() for _ in range(3)])


@_specimen("gpt-autocast-bf16", ("Block",), _next_token_bf16)
def _gpt_bf16() -> nn.Module:
    return Stack(*[Block() for _ in range(3)])


@_specimen("gpt-one-region", ("Stack",), _next_token)
def _gpt_whole() -> nn.Module:
    return Stack(*[Block() for _ in range(2)])


class Lora(nn.Module):
    """A frozen linear with a trainable low-rank side path."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.drop = base.requires_grad_(False), nn.Dropout(0.1)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.drop(x)))


@_specimen("lora-frozen", ("Block",), _next_token)
def _lora() -> nn.Module:
    model = Stack(*[Block() for _ in range(4)]).requires_grad_(False)
    for block in list(model.blocks)[1:3]:
        block.qkv, block.down = Lora(block.qkv), Lora(block.down)
    return model


class Experts(nn.Module):
    """Top-2 routing of 4 experts with noise, gathered a token at a time, and a balance term in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(D, 4, bias=False), nn.LayerNorm(D)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D)) for _ in range(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, -2)
        score = self.gate(flat)
        score = (score + torch.randn_like(score) * 0.1).softmax(-1)
        weight, pick = score.topk(2, dim=-1)
        self.load += torch.bincount(pick.flatten(), minlength=4)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            row, slot = (pick == i).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(flat[row]) * weight[row, slot, None])
        return x + out.view_as(x)


@_specimen("moe-routing", ("Experts", "Block"), _next_token)
def _moe() -> nn.Module:
    return Stack(Block(), Experts(), Experts(), Block())


@_specimen("shared-weights", ("Block",), _next_token)
def _shared() -> nn.Module:
    first, second = Block(), Block()
    second.up.weight = first.up.weight
    return Stack(first, second, first, tie=True)


class InPlace(nn.Module):
    """In-place operators on fresh results, on slices and through masks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.a(x))
        h = h.clone().mul_(0.9).add_(0.1)
        h[..., :4] = h[..., 4:8].clone()
        h.masked_fill_(h > 2.0, 2.0)
        y = torch.zeros_like(x)
        y[..., ::2] += self.b(h)[..., 1::2].sigmoid_()
        return F.dropout(y.add_(x), 0.1, self.training, inplace=True)


@_specimen("in-place", ("InPlace",), _square)
def _in_place() -> nn.Module:
    return nn.Sequential(*[InPlace() for _ in range(3)])


class Views(nn.Module):
    """Transposes, expands, unfolds, strided slices, complex views and conjugates of few storages."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.rows = nn.Linear(D, 2 * D), nn.Parameter(torch.randn(1, D))

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.lin(x).chunk(2, -1)
        cross = u.transpose(-1, -2) @ v
        windows = F.pad(u, (1, 1)).unfold(-1, 3, 1).prod(-1)
        waves = torch.view_as_real(torch.view_as_complex(v.unflatten(-1, (-1, 2))).conj() * 1.5).flatten(-2)
        spread = self.rows.expand(x.shape[-2], -1) * u
        freq = torch.fft.rfft(u, dim=-2).conj()
        back = torch.fft.irfft(freq, n=x.shape[-2], dim=-2)
        return torch.tanh((v @ cross) * 0.1 + windows + waves * spread + back) + x.flip(-1)


@_specimen("views", ("Views",), _square)
def _views() -> nn.Module:
    return nn.Sequential(*[Views() for _ in range(3)])


class FusedGate(torch.autograd.Function):
    """A fused gated activation, as hand-written kernels have it: keeps its inputs, recomputes in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return grads[0] * up * (s + gate * s * (1 - s)), grads[0] * gate * s


class MaskedDrop(torch.autograd.Function):
    """A dropout that draws its mask inside and keeps it alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask = torch.rand_like(x) > p
        ctx.save_for_backward(mask)
        ctx.p = p
        return x * mask / (1 - p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask / (1 - ctx.p), None


class Custom(nn.Module):
    """A layer whose activation and dropout are autograd Functions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + MaskedDrop.apply(self.down(FusedGate.apply(self.gate(x), self.up(x))), 0.1)


@_specimen("autograd-function", ("Custom",), _square)
def _custom() -> nn.Module:
    return nn.Sequential(*[Custom() for _ in range(3)])


class Conv(nn.Module):
    """Convolution, BatchNorm with running statistics, in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv1d(T, T, 3, padding=1), nn.BatchNorm1d(T), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.norm(self.conv(x)))


@_specimen("batch-norm", ("Conv",), _square)
def _batch_norm() -> nn.Module:
    return nn.Sequential(*[Conv() for _ in range(3)])


class Recurrent(nn.Module):
    """A two-layer GRU with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(D, D, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


@_specimen("gru", ("Recurrent",), _square)
def _gru() -> nn.Module:
    return nn.Sequential(*[Recurrent() for _ in range(2)])


class Unsteady(nn.Module):
    """Python that differs from call to call: layer drop, a counter, a cache filled in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.calls, self.cache = nn.Linear(D, D), 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.cache is None:
            self.cache = torch.arange(D) / D
        if torch.rand(()) < 0.3:
            return x * 1.5
        return x + torch.tanh(self.lin(x)) * self.calls * self.cache


@_specimen("python-state", ("Unsteady",), _square)
def _unsteady() -> nn.Module:
    return nn.Sequential(*[Unsteady() for _ in range(4)])


def _labelled(model: nn.Module, number: int) -> Tensor:
    ids = _tokens(number)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def _labelled_plain(model: nn.Module, number: int) -> Tensor:
    ids = _tokens(number)
    return model(input_ids=ids, labels=ids).loss


def _seq2seq(model: nn.Module, number: int) -> Tensor:
    ids = _tokens(number)
    return model(input_ids=ids, labels=_tokens(number + 100, 5), use_cache=False).loss


def _pixels(model: nn.Module, number: int) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    pixels = torch.randn(B, 3, 16, 16, generator=draw)
    return model(pixel_values=pixels, labels=torch.randint(0, 4, (B,), generator=draw)).loss


SMALL = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 2 * D,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}


@_specimen("hf-llama", ("LlamaDecoderLayer",), _labelled, "transformers")
def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL))


@_specimen("hf-qwen3", ("Qwen3DecoderLayer",), _labelled, "transformers")
def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=4))


@_specimen("hf-mixtral", ("MixtralDecoderLayer",), _labelled, "transformers")
def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=True, router_jitter_noise=0.01)
    return MixtralForCausalLM(config)


@_specimen("hf-t5", ("T5Block",), _seq2seq, "transformers")
def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=V,
            d_model=D,
            d_kv=4,
            d_ff=2 * D,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


@_specimen("hf-vit", ("ViTLayer",), _pixels, "transformers")
def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=D,
            intermediate_size=2 * D,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=4,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


@_specimen("hf-mamba", ("MambaBlock",), _labelled_plain, "transformers")
def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=V,
            hidden_size=D,
            state_size=4,
            num_hidden_layers=3,
            conv_kernel=3,
            time_step_rank=3,
            use_cache=False,
        )
    )
