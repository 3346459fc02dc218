"""Layers that are made of kernels torch does not know: FP8 matrix products, fused attention, a vendor's namespace.

Law: the same training in every mode; what is kept because nobody said that it may run again is in the report with its
bytes and a remedy; once declared pure it is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import SwapManager, checkpoint_wrapper, swap_wrapper
from lowtide.activations import operators
from lowtide.report.counters import RegionRow

ROWS, WIDTH = 32, 64


# ---- a vendor's namespace: fused kernels with derivatives of their own -----------------------------------


@torch.library.custom_op("npu_like::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return x * inverse * weight, inverse


@torch.library.custom_op("npu_like::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * inverse
    inner = grad * weight
    return inverse * (inner - scaled * (inner * scaled).mean(-1, keepdim=True)), (grad * scaled).sum(0)


@torch.library.custom_op("npu_like::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@torch.library.custom_op("npu_like::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    soft = gate.sigmoid()
    return torch.cat([grad * up * soft * (1 + gate * (1 - soft)), grad * gate * soft], -1)


@torch.library.custom_op("npu_like::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The fused forward: its result and the log-sum-exp that its backward wants."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    total = scores.logsumexp(-1, keepdim=True)
    return ((scores - total).exp() @ v).transpose(0, 1).flatten(1).contiguous(), total


@torch.library.custom_op("npu_like::attention_backward", mutates_args=())
def attention_backward(  # noqa: PLR0917 - a kernel
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (grad, q, k, v, out))
    scale = q.shape[-1] ** -0.5
    weights = (q @ k.transpose(-1, -2) * scale - total).exp()
    inner = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    parts = (inner @ k, inner.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad)
    first, second, third = (t.transpose(0, 1).flatten(1).contiguous() for t in parts)
    return first, second, third


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _keep_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.heads = inputs[3]


rms_norm.register_autograd(
    lambda ctx, grad, _: (*rms_norm_backward(grad, *ctx.saved_tensors), None), setup_context=_keep_norm
)
swiglu.register_autograd(lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors), setup_context=_keep_input)
attention.register_autograd(
    lambda ctx, grad, _: (*attention_backward(grad, *ctx.saved_tensors, ctx.heads), None),
    setup_context=_keep_attention,
)
FORWARDS = ("rms_norm", "swiglu", "attention")


class Vendor(nn.Module):
    """A transformer layer of fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(rms_norm(x, self.scale, 1e-6)[0]).chunk(3, -1)
        x = x + self.out(attention(q.contiguous(), k.contiguous(), v.contiguous(), 4)[0])
        return x + self.down(swiglu(self.up(rms_norm(x, self.scale, 1e-6)[0])))


# ---- FP8: a product of scaled bytes, and a tensor subclass that carries them ------------------------------


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes and the factor that gives the numbers back."""
    scale = x.detach().abs().amax().clamp(min=1e-12).float() / 448.0
    return (x / scale).to(torch.float8_e4m3fn), scale


class ScaledProduct(torch.autograd.Function):
    """An FP8 linear layer as the libraries write it: what it saves for backward is bytes and scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (bytes_x, scale_x), (bytes_w, scale_w) = quantized(x), quantized(weight)
        ctx.save_for_backward(bytes_x, scale_x, bytes_w, scale_w)
        return torch._scaled_mm(bytes_x, bytes_w.t(), scale_x, scale_w, out_dtype=torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        bytes_x, scale_x, bytes_w, scale_w = ctx.saved_tensors
        weight = bytes_w.to(grad.dtype) * scale_w
        return grad @ weight, grad.t() @ (bytes_x.to(grad.dtype) * scale_x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = ScaledProduct.apply(F.layer_norm(x, (WIDTH,)), self.up)
        out: Tensor = ScaledProduct.apply(F.gelu(hidden), self.down)
        return x + out


class Float8(Tensor):
    """A tensor of bytes and a scale; every operator sees the numbers."""

    data8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: type[Float8], data8: Tensor, scale: Tensor) -> Float8:  # noqa: PYI034 - of this very class
        made = Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32, device=data8.device)
        made.data8, made.scale = data8, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], _context: None, _size: Any, _stride: Any) -> Float8:
        return Float8(parts["data8"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8, args[0].scale)

        def numbers(t: Any) -> Any:
            return t.data8.to(torch.float32) * t.scale if isinstance(t, cls) else t

        return func(*torch.utils._pytree.tree_map(numbers, args), **(kwargs or {}))


class ToFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Float8(*quantized(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Subclassed(nn.Module):
    """Its matrix products save a tensor subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8),
            nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = ToFloat8.apply(F.layer_norm(x, (WIDTH,))) @ self.up
        return x + ToFloat8.apply(F.gelu(hidden)) @ self.down


LAYERS: dict[str, type[nn.Module]] = {"vendor": Vendor, "scaled": Scaled, "subclass": Subclassed}
MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "recompute": lambda m: checkpoint_wrapper(m, recompute="replay"),
    "auto": checkpoint_wrapper,
    "call": lambda m: checkpoint_wrapper(m, recompute="call"),
    "inputs": lambda m: checkpoint_wrapper(m, recompute="replay", swap_inputs=True),
    "swap": swap_wrapper,
    "swap products": lambda m: checkpoint_wrapper(m, lowtide.swap_matmuls_and_attention(), recompute="replay"),
}


@pytest.fixture
def declared() -> Iterator[None]:
    """The vendor's forwards are pure; afterwards nobody has said so."""
    packets = [getattr(torch.ops.npu_like, name) for name in FORWARDS]
    for packet in packets:
        lowtide.pure(packet)
    yield
    for packet in packets:
        operators.pure_overloads.discard(packet.default)
        operators.known_operators.pop(id(packet.default), None)


def train(model: nn.Module) -> list[Tensor | None]:
    """Two steps: outputs, gradients and the random state."""
    made: list[Tensor | None] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        out = model(x)
        out.square().sum().backward()
        made += [out.detach(), x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]
        for parameter in model.parameters():
            parameter.grad = None
    return made


def pair(name: str, mode: str) -> tuple[nn.Module, nn.Module]:
    models = []
    for wrap in (lambda m: m, MODES[mode]):
        torch.manual_seed(0)
        models.append(nn.Sequential(*[wrap(LAYERS[name]()) for _ in range(3)]))
    SwapManager().configure(min_bytes=0)
    lowtide.auto(models[1])
    return models[0], models[1]


def trains_alike(name: str, mode: str) -> list[RegionRow]:
    plain, other = pair(name, mode)
    for want, got in zip(train(plain), train(other), strict=True):
        assert want is not None and got is not None and torch.equal(want, got)
    assert SwapManager().lower_bytes() == 0
    return lowtide.report(other).rows


@pytest.mark.filterwarnings("ignore:.*recompute='call'.*:lowtide.errors.LowtideWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LAYERS)
def test_training_is_the_same(name: str, mode: str) -> None:
    trains_alike(name, mode)


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize("mode", ["recompute", "inputs", "swap products"])
def test_training_is_the_same_once_the_kernels_are_declared(mode: str) -> None:
    trains_alike("vendor", mode)


def _kept(rows: list[RegionRow]) -> dict[str, int]:
    """Bytes of one layer that stay because their producer is opaque, by reason."""
    return {reason: refusal.bytes for reason, refusal in rows[0].refused.items() if "pure" in refusal.remedy}


def test_the_report_names_the_kernels_that_keep_their_results() -> None:
    kept = _kept(trains_alike("vendor", "recompute"))
    element = ROWS * 4
    wanted = {
        # rms_norm twice: its result, which a projection saves, and the inverse.
        "rms_norm": 2 * element * (WIDTH + 1),
        "swiglu": element * 2 * WIDTH,
        "attention": element * (WIDTH + 4),
    }
    for name, nbytes in wanted.items():
        (found,) = [
            held for reason, held in kept.items() if f"npu_like_{name}_" in reason or f"npu_like::{name}" in reason
        ]
        assert found == nbytes, (name, kept)


@pytest.mark.usefixtures("declared")
def test_declared_kernels_keep_nothing() -> None:
    rows = trains_alike("vendor", "recompute")
    assert not _kept(rows)
    assert rows[0].kept_bytes == ROWS * WIDTH * 4  # the layer's input


def test_the_report_names_a_function_that_makes_bytes() -> None:
    kept = _kept(trains_alike("scaled", "recompute"))
    (reason,) = kept
    assert "ScaledProduct" in reason
    # What two calls saved: bytes of the input and the weight, and two scales; and the results that others saved.
    inputs, weights, scales, results = ROWS * 3 * WIDTH, 2 * 2 * WIDTH * WIDTH, 4 * 4, ROWS * 2 * WIDTH * 4
    assert kept[reason] == inputs + weights + scales + results
