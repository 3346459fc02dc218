"""Programs with a wrapped optimizer over sharded and replicated parameters: steps, clipping, distributed checkpoints.

Law: bits are compared in the rank that made them, with a plain optimizer over the same shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lowtide.optim.cpu import cpu_optimizer
from lowtide.optim.swap import swap_optimizer

WIDTH = 48


def model_and(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of two units, each rank holding a part of every parameter, one of which does not divide evenly."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 33), nn.Tanh(), nn.Linear(33, WIDTH))
    for unit in (model[0], model[2]):
        fully_shard(unit)
    fully_shard(model)
    return model, make(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, WIDTH, generator=draw)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def swapped(parameters: Any) -> torch.optim.Optimizer:
    return swap_optimizer(adamw(parameters), swap_times=3)


def offloaded(parameters: Any) -> torch.optim.Optimizer:
    return cpu_optimizer(adamw(parameters), grad_offload=True)


def late(parameters: Any) -> torch.optim.Optimizer:
    return cpu_optimizer(adamw(parameters), overlap=True)


WAYS = {"swapped": swapped, "offloaded": offloaded, "late": late}


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def same_state(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two state_dicts have the same keys, kinds, placements and bits."""
    if list(first["state"]) != list(second["state"]):
        return False
    for number, state in first["state"].items():
        other = second["state"][number]
        if list(state) != list(other):
            return False
        for name, value in state.items():
            if isinstance(value, DTensor) and (
                not isinstance(other[name], DTensor) or value.placements != other[name].placements
            ):
                return False
            if not torch.equal(local(value), local(other[name])):
                return False
    return True


def fully_sharded(way: str) -> dict[str, bool]:
    """Four steps of both over shards, with the norm over all ranks."""
    plain, wrapped = model_and(adamw), model_and(WAYS[way])
    for model, optimizer in (plain, wrapped):
        train(model, optimizer, range(4))
    return {
        "weights": all(
            torch.equal(local(a), local(b)) for a, b in zip(plain[0].parameters(), wrapped[0].parameters(), strict=True)
        ),
        "state": same_state(plain[1].state_dict(), wrapped[1].state_dict()),
    }


def replicated(way: str, *, views: bool) -> dict[str, bool]:
    """Four steps of both over replicas, of which only the second backward of each reduces gradients; clipped."""
    ends = []
    for make in (adamw, WAYS[way]):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(WIDTH, 33), nn.Tanh(), nn.Linear(33, WIDTH))
        replica = DistributedDataParallel(model, gradient_as_bucket_view=views)
        optimizer = make(model.parameters())
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(2):
                draw = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
                data = torch.randn(4, WIDTH, generator=draw)
                with contextlib.nullcontext() if micro else replica.no_sync():
                    replica(data).square().mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
        ends.append((norms, [p.detach() for p in model.parameters()], optimizer.state_dict()))
        del replica  # it holds the process group
    (norms, weights, state), (other_norms, other_weights, other_state) = ends
    return {
        "norms": all(torch.equal(a, b) for a, b in zip(norms, other_norms, strict=True)),
        "weights": all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True)),
        "state": same_state(state, other_state),
    }


def save(folder: str, *, asynchronous: bool) -> None:
    """Three steps, then a distributed checkpoint; while an asynchronous one is written, the next step runs."""
    model, optimizer = model_and(swapped)
    train(model, optimizer, range(3))
    weights, state = get_state_dict(model, optimizer)
    if not asynchronous:
        dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
        return
    # The weights are the user's to guard: what training goes on writing to is copied.
    weights = {name: value.clone() for name, value in weights.items()}
    # It talks to the other ranks while training does: by a group of its own.
    group = dist.new_group(backend="gloo")
    written = dcp.async_save({"model": weights, "optim": state}, checkpoint_id=folder, process_group=group)
    train(model, optimizer, range(3, 5))
    written.result()  # type: ignore[union-attr]


def load(folder: str, *, wraps: bool) -> list[list[int]]:
    """Load what any number of ranks saved, make two steps; the bits of every weight and of every moment in full."""
    model, optimizer = model_and(swapped if wraps else adamw)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step in range(3, 5):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(step)
        model(torch.randn(4, WIDTH, generator=draw)).square().mean().backward()  # the same data in every rank
        optimizer.step()
    found = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    moments = [s["exp_avg_sq"] for s in optimizer.state_dict()["state"].values()]
    values = [*(t.detach() for t in found), *(m.full_tensor() for m in moments)]
    return [value.view(torch.int32).flatten().tolist() for value in values]
