"""The operator kinds that fuzzed programs are made of.

Holds one small function a kind: ``(a, b, env) -> tensor`` with 6 x 6 operands.
Law: a kind may draw only from torch's generator or from the two numbers of its
environment, so that a program is a function of its seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .functions import Functions

__all__ = ["KINDS", "Env"]

N = 6


@dataclass
class Env:
    """What an operator may use besides its operands: two fixed numbers, a weight, the Functions, the inner wrap."""

    p: float
    q: float
    weight: Tensor
    functions: Functions
    inner: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


Kind = Callable[[Tensor, Tensor, Env], Tensor]
KINDS: dict[str, Kind] = {}


def _kind(fn: Kind) -> Kind:
    KINDS[fn.__name__] = fn
    return fn


KINDS.update(
    # plain arithmetic, and results that autograd saves
    tanh=lambda a, b, e: torch.tanh(a),
    sigmoid=lambda a, b, e: torch.sigmoid(a),
    mul=lambda a, b, e: a * b,
    add=lambda a, b, e: a + b * 0.5,
    scale=lambda a, b, e: a * (1 + e.p),
    mm=lambda a, b, e: (a @ e.weight) * 0.3,
    mm_both=lambda a, b, e: torch.mm(a, b) * 0.1,
    addmm=lambda a, b, e: torch.addmm(a, b, e.weight, beta=0.5, alpha=0.2),
    bmm=lambda a, b, e: (
        torch.bmm(a.view(2, 3, N) if a.is_contiguous() else a.reshape(2, 3, N), b.expand(2, N, N)).reshape(N, N) * 0.1
    ),
    einsum=lambda a, b, e: torch.einsum("ij,kj->ik", a, b) * 0.1,
    gelu=lambda a, b, e: F.gelu(a),
    silu=lambda a, b, e: F.silu(a) * b,
    softmax=lambda a, b, e: torch.softmax(a, -1),
    layer_norm=lambda a, b, e: F.layer_norm(a, (N,)),
    rms_norm=lambda a, b, e: F.rms_norm(a, (N,), b[0]),
    group_norm=lambda a, b, e: F.group_norm(a.reshape(2, 3, N), 3).reshape(N, N),
    cumsum=lambda a, b, e: a.cumsum(1) * 0.2,
    norm=lambda a, b, e: a / (1 + a.norm(dim=-1, keepdim=True)),
    logsumexp=lambda a, b, e: a - torch.logsumexp(a, 1, keepdim=True),
    amax=lambda a, b, e: a * 0.5 + a.amax(0, keepdim=True),
    # in place
    relu_=lambda a, b, e: torch.relu_(a),
    add_=lambda a, b, e: a.add_(b.detach() if e.q < 0.3 else b, alpha=0.3),
    mul_=lambda a, b, e: a.mul_(0.7 if e.q < 0.5 else b.tanh()),
    masked_fill_=lambda a, b, e: (a.clone() if 0 in a.stride() else a).masked_fill_(b > 0.5, 0.1),
    sigmoid_=lambda a, b, e: (a * 1.0).sigmoid_(),
    clamp_=lambda a, b, e: a.clamp_(-1.0, 1.0),
    view_write=lambda a, b, e: (a * 1.1).t_().mul_(0.9),
    # views
    transpose=lambda a, b, e: a.t(),
    slices=lambda a, b, e: torch.cat([a[:3], b[3:]], 0),
    expand=lambda a, b, e: a.mean(0, keepdim=True).expand(N, N),
    strided=lambda a, b, e: torch.cat([a, b], 1)[:, ::2],
    unfold=lambda a, b, e: a.unfold(1, 3, 1).sum(-1).repeat(1, 2)[:, :N],
    unbind=lambda a, b, e: torch.stack([u * v for u, v in zip(a.unbind(0), b.unbind(1), strict=True)]),
    as_strided=lambda a, b, e: a.contiguous().as_strided((N, N), (1, N)) * b,
    diagonal=lambda a, b, e: b + a.diagonal().exp() * 0.05,
    flip=lambda a, b, e: a.flip(0) * b.roll(1, 1),
    complex_view=lambda a, b, e: torch.view_as_real(torch.view_as_complex(a.reshape(N, 3, 2)).conj() * 0.5).reshape(
        N, N
    ),
    fft=lambda a, b, e: torch.fft.fft(a).conj().imag * 0.2,
    # indices
    index_select=lambda a, b, e: a.index_select(0, torch.tensor([5, 1, 1, 0, 2, 4])),
    gather=lambda a, b, e: a.gather(1, b.argsort(1)),
    topk=lambda a, b, e: torch.topk(a, N, -1)[0] * b,
    sort=lambda a, b, e: a.sort(0)[0] * 0.8,
    scatter_add=lambda a, b, e: a.scatter_add(1, b.argsort(1), b * 0.1),
    where=lambda a, b, e: torch.where(a > b, a, b * 0.3),
    nonzero=lambda a, b, e: b.index_add(0, (a[:, 0] > 0).nonzero().flatten(), a[a[:, 0] > 0] * 0.2),
    # the generator
    dropout=lambda a, b, e: F.dropout(a, 0.4),
    alpha_dropout=lambda a, b, e: F.alpha_dropout(a, 0.2, training=True),
    dropout_=lambda a, b, e: F.dropout(a * 1.0, 0.3, inplace=True),
    bernoulli=lambda a, b, e: a * torch.bernoulli(b.detach().sigmoid().nan_to_num(0.5)),
    rand_like=lambda a, b, e: a + torch.rand_like(b) * b,
    # behind autograd's back
    data=lambda a, b, e: b * a.data.tanh(),
    detach=lambda a, b, e: b * a.detach().cos(),
    clone=lambda a, b, e: a.clone(),
    item=lambda a, b, e: a / (1 + abs(b.sum().item())),
    unsafe_view=lambda a, b, e: torch.ops.aten._unsafe_view(a.contiguous().clone(), [N * N]).view(N, N) * 1.1,
    # autograd.Function
    fn_product=lambda a, b, e: e.functions.product.apply(a, b),
    fn_dropout=lambda a, b, e: e.functions.dropout.apply(a, 0.2 + 0.3 * e.p),
    fn_dirty=lambda a, b, e: e.functions.writes_argument.apply(a * 1.0) * 1.0,
    fn_attribute=lambda a, b, e: e.functions.keeps_attribute.apply(a),
    fn_nested=lambda a, b, e: e.functions.nested.apply(a, b),
    fn_view=lambda a, b, e: e.functions.view.apply(a).sin(),
    fn_draw=lambda a, b, e: e.functions.no_grad_output.apply(a) * b,
    fn_strides=lambda a, b, e: e.functions.non_contiguous.apply(a, b) * 0.2,
    # regions inside
    nested=lambda a, b, e: e.inner(lambda t: torch.tanh(t) * t.sigmoid())(a),
    nested_two=lambda a, b, e: e.inner(lambda t, u: F.dropout(t @ u, 0.2).relu_() * 0.2)(a, b),
    checkpoint=lambda a, b, e: checkpoint(lambda t: F.dropout(torch.tanh(t @ e.weight), 0.2), a, use_reentrant=False),
)


@_kind
def chunk(a: Tensor, b: Tensor, e: Env) -> Tensor:
    u, v = a.chunk(2, 1)
    return torch.cat([v * u, u.exp() * 0.2], 1)


@_kind
def unsafe_split(a: Tensor, b: Tensor, e: Env) -> Tensor:
    u, v = torch.unsafe_split(a * 1.5, 3, 1)
    v = v.mul_(0.5) if e.q < 0.5 else v
    return torch.cat([torch.tanh(u), v * v], 1)


@_kind
def copy_into_slice(a: Tensor, b: Tensor, e: Env) -> Tensor:
    r = b.clone()
    r[1:4].copy_(a[2:5])
    return r * 1


@_kind
def zeros_filled(a: Tensor, b: Tensor, e: Env) -> Tensor:
    r = torch.zeros(N, N)
    r[:, :3] = a[:, 3:]
    r[2] += b[1]
    return r + 0


@_kind
def empty_out(a: Tensor, b: Tensor, e: Env) -> Tensor:
    r = torch.empty(N, N)
    torch.mul(a.detach(), 0.5, out=r)
    return r * b


@_kind
def mask_assign(a: Tensor, b: Tensor, e: Env) -> Tensor:
    r = a * 1
    r[b > 0.3] = 0.2
    return r


@_kind
def index_put(a: Tensor, b: Tensor, e: Env) -> Tensor:
    r = a.exp() * 0.1
    r.index_put_((torch.tensor([0, 2, 2]),), b[:3], accumulate=True)
    return r


@_kind
def no_grad_block(a: Tensor, b: Tensor, e: Env) -> Tensor:
    with torch.no_grad():
        m = a.abs().mean(0)
        m.add_(1)
    return b / m


@_kind
def attention(a: Tensor, b: Tensor, e: Env) -> Tensor:
    q, k = (t.reshape(1, 2, 3, N) for t in (a, b))
    p = 0.2 if e.q < 0.5 else 0.0
    return F.scaled_dot_product_attention(q, k, q * k, dropout_p=p, is_causal=e.p < 0.5).reshape(N, N)


@_kind
def batch_norm(a: Tensor, b: Tensor, e: Env) -> Tensor:
    mean, var = torch.zeros(N), torch.ones(N)
    r = F.batch_norm(a, mean, var, training=True)
    return r + mean * b + var


@_kind
def fn_several(a: Tensor, b: Tensor, e: Env) -> Tensor:
    u, index, h = e.functions.several.apply(a, b, 1 + e.p, [e.q])
    r = torch.cat([u[:, :3] * 0.1, h.sin()], 1)
    return r.index_select(0, index) if e.q < 0.5 else r.mul_(0.9)


@_kind
def fn_setup(a: Tensor, b: Tensor, e: Env) -> Tensor:
    u, k = e.functions.with_setup.apply(a, b)
    return u + k.add_(0.1) if e.q < 0.5 else u * k
