"""Programs with one model over two ranks: data parallel, fully sharded, tensor, sequence and context parallel.

Law: bits are compared in the rank that made them; a collective runs in backward
as often as it does without wrapping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import SwapManager

from .kit import WRAPS, Watch, mean_square, more_than, same

BATCH, TOKENS, WIDTH, HEADS, LAYERS = 2, 8, 16, 4, 3


Exchange = Callable[[torch.Tensor, int, int], torch.Tensor]


class Enter(torch.autograd.Function):
    """Into split products, as Megatron writes it: the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """Out of split products, as Megatron writes it: the sum over the ranks is written into the product itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Layer(nn.Module):
    """A transformer layer: attention may look across ranks, products may be split over them."""

    def __init__(self, exchange: Exchange | None = None, split: int = 1) -> None:
        super().__init__()
        self.exchange, self.split = exchange, split
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // split, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH // split, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH // split), nn.Linear(2 * WIDTH // split, WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention; with ``exchange``, over all tokens for a part of the heads (Ulysses)."""
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH // HEADS)) for part in (self.q, self.k, self.v))
        if self.exchange is not None:  # (batch, tokens, heads, head)
            q, k, v = (self.exchange(part, 2, 1) for part in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        out = out.transpose(1, 2)
        if self.exchange is not None:
            out = self.exchange(out.contiguous(), 1, 2)
        y: torch.Tensor = self.o(out.flatten(-2))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) in and out."""
        if self.split == 1:
            x = x + self.attend(self.norm1(x))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        x = x + Leave.apply(self.attend(Enter.apply(self.norm1(x))))
        y: torch.Tensor = x + Leave.apply(self.down(nn.functional.gelu(self.up(Enter.apply(self.norm2(x))))))
        return y


class Model(nn.Module):
    """Layers, and a head that takes no part."""

    def __init__(self, exchange: Exchange | None = None, *, split: int = 1, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(exchange, split) for _ in range(LAYERS))
        self.unused = nn.Linear(WIDTH, 2) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) in and out."""
        for layer in self.layers:
            x = layer(x)
        return x


def wrap_layers(model: Model, wrap: str | None) -> None:
    """A region per layer, in the learned order."""
    if wrap is not None:
        for layer in model.layers:
            WRAPS[wrap](layer)
        lowtide.auto(model)


# ---- data parallel -------------------------------------------------------------------------------

DDP: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-unused": {"find_unused_parameters": True},
    "ddp-static": {"static_graph": True},
    "ddp-view": {"gradient_as_bucket_view": True},
    "ddp-first": {},
}


def data_parallel(name: str, wrap: str | None) -> tuple[nn.Module, Model]:
    """Wrapped, then given to DDP, or the other way round."""
    model = Model(unused=name == "ddp-unused")
    if name != "ddp-first":
        wrap_layers(model, wrap)
    run = DistributedDataParallel(model, **DDP[name])
    if name == "ddp-first":
        wrap_layers(model, wrap)
    return run, model


# ---- fully sharded -------------------------------------------------------------------------------


def fully_sharded(name: str, wrap: str | None) -> tuple[nn.Module, Model]:
    """A unit and a region per layer, in either order."""
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh}
    if name == "fsdp-mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if name != "fsdp-shard-first":
        wrap_layers(model, wrap)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if name == "fsdp-shard-first":
        wrap_layers(model, wrap)
    return model, model


# ---- tensor and sequence parallel ----------------------------------------------------------------


def split_by_hand(name: str, wrap: str | None) -> tuple[nn.Module, Model]:
    """Tensor parallel as Megatron does it, with collectives inside of ``autograd.Function``s."""
    model = Model(split=dist.get_world_size())
    wrap_layers(model, wrap)
    return model, model


def tensor_parallel(name: str, wrap: str | None) -> tuple[nn.Module, Model]:
    """Tensor and sequence parallel by torch's plans; weights are DTensors."""
    model = Model()
    grid = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    mesh = grid["tensor"]
    plan: dict[str, Any] = {part: ColwiseParallel() for part in ("q", "k", "v", "up")}
    plan |= {part: RowwiseParallel() for part in ("o", "down")}
    if name == "sequence":
        # Between the products every rank has a part of the tokens only.
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {part: ColwiseParallel(input_layouts=Shard(1)) for part in ("q", "k", "v", "up")}
        plan |= {part: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for part in ("o", "down")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    if name == "sequence":
        scatter = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),))
        parallelize_module(model.layers[0], mesh, scatter)
    if name == "fsdp-tensor":
        for unit in (*model.layers, model):
            fully_shard(unit, mesh=grid["data"])
    wrap_layers(model, wrap)
    return model, model


# ---- context parallel ----------------------------------------------------------------------------


def _all_to_all(x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
    size = dist.get_world_size()
    sent = torch.stack([part.contiguous() for part in x.chunk(size, scatter)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(list(received), gather)


class AllToAll(torch.autograd.Function):
    """Splits one dimension over the ranks and gathers another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        ctx.back = (gather, scatter)
        return _all_to_all(x, scatter, gather)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _all_to_all(grad, *ctx.back), None, None


def by_function(x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
    """The exchange as an ``autograd.Function``."""
    out: torch.Tensor = AllToAll.apply(x, scatter, gather)
    return out


def by_operator(x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
    """The exchange as an operator that autograd knows."""
    size = dist.get_world_size()
    sent = torch.cat(x.chunk(size, scatter))
    group = dist.group.WORLD
    assert group is not None
    received = all_to_all_single_autograd(sent, None, None, group)
    return torch.cat(received.chunk(size), gather)


def context_parallel(name: str, wrap: str | None) -> tuple[nn.Module, Model]:
    """Ulysses: every rank has a part of the tokens, and in attention all tokens of a part of the heads."""
    model = Model(by_function if name == "ulysses" else by_operator)
    wrap_layers(model, wrap)
    return model, model


# ---- training ------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[str, str | None], tuple[nn.Module, Model]]] = {
    **dict.fromkeys(DDP, data_parallel),
    **dict.fromkeys(("fsdp-wrap-first", "fsdp-shard-first", "fsdp-mixed"), fully_sharded),
    **dict.fromkeys(("tensor", "sequence", "fsdp-tensor"), tensor_parallel),
    "megatron": split_by_hand,
    **dict.fromkeys(("ulysses", "ulysses-operator"), context_parallel),
}
SAME_DATA = {"tensor", "sequence", "fsdp-tensor", "megatron"}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(name: str, wrap: str | None, steps: int) -> tuple[list[torch.Tensor], Watch, Model]:
    """A few steps; what must not depend on the wrap, what the last backward ran, and the model."""
    torch.manual_seed(3)
    run, model = KINDS[name](name, wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bits: list[torch.Tensor] = []
    watch = Watch()
    for number in range(steps):
        data = torch.Generator().manual_seed(10 * number + (0 if name in SAME_DATA else dist.get_rank()))
        x, target = (torch.randn(BATCH, TOKENS, WIDTH, generator=data) for _ in range(2))
        optimizer.zero_grad()
        watch.backward.clear()
        watch.collectives.clear()
        if name == "sequence":
            x, target = (part.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for part in (x, target))
        with watch:
            out = run(x)
            loss = mean_square(local(out), target)
            loss.backward()
        bits += [loss.detach().clone()]
        bits += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*bits, *(local(p).detach().clone() for p in model.parameters())], watch, model


def compare(name: str, steps: int = 2) -> dict[str, Any]:
    """Train plain and under every way to wrap."""
    plain, watch, _ = train(name, None, steps)
    found: dict[str, Any] = {"plain": {"collectives": +watch.collectives}}
    for wrap in WRAPS:
        SwapManager().reset()
        SwapManager().configure(min_bytes=0)
        got, seen, model = train(name, wrap, steps)
        rows = lowtide.report(model).rows
        found[wrap] = {
            "equal": same(plain, got),
            "results": len(got),
            "after": SwapManager().lower_bytes(),
            "in": SwapManager().traffic.in_bytes,
            "out": SwapManager().traffic.out_bytes,
            "late": SwapManager().traffic.late_loads,
            "again": more_than(watch.backward, seen.backward),
            "collectives": more_than(watch.collectives, seen.collectives),
            "refused": sorted({reason for row in rows for reason in row.refused}),
            "recomputed": sum(row.recomputed_bytes for row in rows),
        }
    return found


def over_several_units() -> str:
    """One region over a model whose layers are sharded one by one: what it says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    lowtide.checkpoint_wrapper(model, recompute="replay")
    try:
        model(torch.ones(BATCH, TOKENS, WIDTH)).sum().backward()
    except lowtide.errors.UnsupportedError as error:
        return str(error)
    return "nothing was raised"


class Scale(torch.autograd.Function):
    """Scales by a statistic of all ranks, as a synchronised norm does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.sum().reshape(1)
        dist.all_reduce(total)
        ctx.save_for_backward(total)
        return x * total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (total,) = ctx.saved_tensors
        return grad * total


class Scaled(nn.Module):
    """A product, scaled, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) in and out."""
        y: torch.Tensor = self.second(Scale.apply(self.first(x)))
        return y


def uneven() -> str:
    """One call with a large batch on rank 0 and a small one elsewhere: what the default way to recompute says of it."""
    model = nn.Sequential(lowtide.checkpoint_wrapper(Scaled()))
    model(torch.ones(16 if dist.get_rank() else 4096, WIDTH)).sum().backward()
    row = lowtide.report(model).rows[0]
    return " ".join([*row.notes, *row.refused])
