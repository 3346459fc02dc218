"""Two pipeline stages under torch's 1F1B schedule: each stage's layers swap, micro-batch by micro-batch.

What lies on the lower tier is in proportion to the micro-batches in flight, not to their number.
Starts its two processes itself. Run: python examples/torch_pipeline.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import lowtide

STAGES, LAYERS, WIDTH, TOKENS, BATCHES = 2, 4, 64, 256, 6


def build(rank: int, *, swapped: bool) -> nn.Module:
    """This rank's stage, with its layers wrapped or not."""
    torch.manual_seed(rank)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    stage = nn.Sequential(*layers)
    if swapped:
        for layer in stage:
            lowtide.swap_wrapper(layer)
        lowtide.auto(stage)  # the order is learned anew for every micro-batch
    return stage


def step(rank: int, stage: nn.Module) -> list[torch.Tensor]:
    """One step of all micro-batches; losses (on the last rank) and gradients."""
    pipe = PipelineStage(stage, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(pipe, n_microbatches=BATCHES, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(9)
    x = torch.randn(BATCHES * TOKENS, WIDTH)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x, losses=losses)
    return [loss.detach() for loss in losses] + [p.grad for p in stage.parameters() if p.grad is not None]


def run(rank: int, meeting: str) -> None:
    """One rank: plain, swapped, compare."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=STAGES)
    plain, stage = step(rank, build(rank, swapped=False)), build(rank, swapped=True)
    other = step(rank, stage)
    equal = all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    print(f"rank {rank}: {lowtide.SwapManager().traffic}\nrank {rank}: losses and gradients bit-equal: {equal}")
    dist.destroy_process_group()
    if not equal:
        raise SystemExit(1)


def main() -> None:
    """Start both ranks; one that fails ends the program with its error."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, args=(f"{folder}/meeting",), nprocs=STAGES)


if __name__ == "__main__":
    main()
