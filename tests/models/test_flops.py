"""What a Llama block computes again, as formulas in its shape.

Law: replay runs the minimal closure of what backward asks for. For the block
of width d, hidden width f, B sequences of T tokens (n = B T rows), in
multiply-adds counted twice: a projection costs 2 n d d, the MLP's linears
2 n d f each, attention 4 n T d.
"""

from __future__ import annotations

import copy

import pytest
import torch

from lowtide import CheckpointPolicy, checkpoint_wrapper
from lowtide.bench.flops import backward_flops, flops_of
from lowtide.bench.models import LlamaBlock
from lowtide.bench.modes import KEPT_SETS, Kept, operator_counts

D, F, B, T = 256, 688, 4, 512
N = B * T
PROJECTION, LINEAR, ATTENTION = 2 * N * D * D, 2 * N * D * F, 4 * N * T * D

# Kept set -> what is computed again. The down-projection never is: nobody needs the block's own result.
AGAIN = {
    # everything hangs on the last product: q, k, v, attention, o, gate, up
    "none": 4 * PROJECTION + ATTENTION + 2 * LINEAR,
    # q, k, v for attention's own backward, o for the mid residual, gate, up
    "sdpa": 4 * PROJECTION + 2 * LINEAR,
    # q, k, v; and o, because the second norm hangs on the mid residual
    "sdpa, gate, up": 4 * PROJECTION,
    # o is cut off by the kept mid residual
    "mid residual": 3 * PROJECTION + ATTENTION + 2 * LINEAR,
    "mid residual, sdpa": 3 * PROJECTION + 2 * LINEAR,
    # only o is left
    "rope q, rope k, v, sdpa, gate, up": PROJECTION,
    "rope q, rope k, v, sdpa, gate, up, o": 0,
    "all mm, sdpa": 0,
}


@pytest.fixture(scope="module")
def block() -> LlamaBlock:
    torch.manual_seed(0)
    return LlamaBlock(D, 4, F, T)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain_backward(block: LlamaBlock, x: torch.Tensor) -> int:
    return backward_flops(block(x.clone().requires_grad_()).sum())


def _wrapped(block: LlamaBlock, x: torch.Tensor, kept: str, yes: CheckpointPolicy) -> torch.nn.Module:
    policy = Kept(KEPT_SETS[kept], operator_counts(block, x), yes, CheckpointPolicy.MUST_RECOMPUTE)
    return checkpoint_wrapper(copy.deepcopy(block), policy)


@pytest.mark.parametrize("kept", AGAIN)
def test_only_the_closure_is_computed_again(kept: str, block: LlamaBlock, x: torch.Tensor, plain_backward: int) -> None:
    wrapped = _wrapped(block, x, kept, CheckpointPolicy.MUST_SAVE)
    loss = wrapped(x.clone().requires_grad_()).sum()
    assert backward_flops(loss) - plain_backward == AGAIN[kept]


def test_without_a_policy_everything_but_the_last_linear(
    block: LlamaBlock, x: torch.Tensor, plain_backward: int
) -> None:
    wrapped = checkpoint_wrapper(copy.deepcopy(block))
    assert backward_flops(wrapped(x.clone().requires_grad_()).sum()) - plain_backward == AGAIN["none"]


def test_frozen_weights_need_no_more(block: LlamaBlock, x: torch.Tensor) -> None:
    frozen = copy.deepcopy(block).requires_grad_(False)
    plain = backward_flops(frozen(x.clone().requires_grad_()).sum())
    wrapped = checkpoint_wrapper(copy.deepcopy(frozen))
    again = backward_flops(wrapped(x.clone().requires_grad_()).sum()) - plain
    assert again == AGAIN["none"]


def test_each_node_runs_once_in_each_backward_of_a_retained_graph(
    block: LlamaBlock, x: torch.Tensor, plain_backward: int
) -> None:
    wrapped = checkpoint_wrapper(copy.deepcopy(block))
    loss = wrapped(x.clone().requires_grad_()).sum()
    for _ in range(2):
        again = flops_of(lambda: loss.backward(retain_graph=True)) - plain_backward
        assert again == AGAIN["none"]
