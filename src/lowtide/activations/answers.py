"""One tape, a stack of answers: which wrapper speaks for which tensor.

For an operator's output the innermost ``checkpoint_wrapper`` answers. For a
tensor that autograd packs, the ``swap_wrapper`` answers if it is the innermost
wrapper of either kind; outside of a ``checkpoint_wrapper`` it answers only for
what that region keeps anyway (its inputs, opaque results), so that a
``swap_wrapper`` around checkpointed layers moves their inputs and does not undo
their recompute. Law: every policy answer is checked where it is given.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.errors import PolicyError, explain
from lowtide.policy import (
    CheckpointPolicy,
    Fate,
    OperatorPolicy,
    PolicyFn,
    SelectiveCheckpointContext,
    TensorPolicyFn,
    as_policy,
    fate_of,
)

__all__ = ["Answers", "CheckpointFrame", "SwapFrame"]

_FORWARD = SelectiveCheckpointContext(is_recompute=False)


class CheckpointFrame:
    """The answers of one ``checkpoint_wrapper``."""

    __slots__ = ("known", "name", "policy", "swap_inputs")

    def __init__(self, name: str, policy: PolicyFn | None, *, swap_inputs: bool) -> None:
        self.name = name
        self.policy = policy
        self.swap_inputs = swap_inputs
        # A ready-made policy looks at the operator only, so its answers are remembered; others are asked each time.
        self.known: dict[Any, CheckpointPolicy | None] = policy.answers if type(policy) is OperatorPolicy else {}

    def for_operator(self, operator: Any, args: Any, kwargs: Any) -> CheckpointPolicy | None:
        """The policy's answer for one call, or None for the default (recompute if possible)."""
        policy = self.policy
        if policy is None:
            return None
        answer = as_policy(policy(_FORWARD, operator.func, *args, **kwargs), self.name)
        if type(policy) is OperatorPolicy:
            # To prefer a recompute is the default, which costs nothing to carry out.
            known = None if answer is CheckpointPolicy.PREFER_RECOMPUTE else answer
            self.known[operator] = known
            return known
        if operator.composites and fate_of(answer) is Fate.RECOMPUTE:
            for composite in operator.composites:
                wider = as_policy(policy(_FORWARD, composite, *args, **kwargs), self.name)
                if fate_of(wider) is not Fate.RECOMPUTE:
                    return wider
        return answer


class SwapFrame:
    """The answers of one ``swap_wrapper``."""

    __slots__ = ("name", "policy")

    def __init__(self, name: str, policy: TensorPolicyFn | None) -> None:
        self.name = name
        self.policy = policy

    def for_tensor(self, tensor: torch.Tensor) -> CheckpointPolicy:
        """The policy's answer for one tensor that autograd is about to save (U4)."""
        if self.policy is None:
            return CheckpointPolicy.PREFER_SWAP
        answer = as_policy(self.policy(tensor), self.name)
        if fate_of(answer) is Fate.RECOMPUTE:
            raise PolicyError(
                explain(
                    "the policy of a swap_wrapper can only save or swap",
                    expected="MUST_SAVE, PREFER_SAVE, MUST_SWAP or PREFER_SWAP",
                    got=answer.name,
                    where=self.name,
                    remedy="Use checkpoint_wrapper to recompute.",
                )
            )
        return answer


class Answers:
    """The wrappers that are open on this tape, outermost first."""

    __slots__ = ("_frames", "checkpoint", "swap", "swap_is_innermost")

    def __init__(self, outer_swap: SwapFrame | None = None) -> None:
        self._frames: list[CheckpointFrame | SwapFrame] = [] if outer_swap is None else [outer_swap]
        self.checkpoint: CheckpointFrame | None = None
        self.swap: SwapFrame | None = outer_swap
        self.swap_is_innermost = outer_swap is not None

    def push(self, frame: CheckpointFrame | SwapFrame) -> None:
        """A wrapped module or function is entered."""
        self._frames.append(frame)
        if type(frame) is CheckpointFrame:
            self.checkpoint = frame
            self.swap_is_innermost = False
        else:
            self.swap = frame  # type: ignore[assignment]
            self.swap_is_innermost = True

    def pop(self) -> None:
        """The innermost wrapped module or function is left."""
        frames = self._frames
        frames.pop()
        self.checkpoint = next((f for f in reversed(frames) if isinstance(f, CheckpointFrame)), None)
        self.swap = next((f for f in reversed(frames) if isinstance(f, SwapFrame)), None)
        self.swap_is_innermost = bool(frames) and isinstance(frames[-1], SwapFrame)

    def for_leaf(self, tensor: torch.Tensor, *, foreign: bool) -> CheckpointPolicy | None:
        """The answer for something that is kept because it cannot be made again."""
        frame = self.checkpoint
        if foreign and frame is not None and frame.swap_inputs:
            return CheckpointPolicy.PREFER_SWAP
        return None if self.swap is None else self.swap.for_tensor(tensor)

    def for_packed(self, tensor: torch.Tensor) -> CheckpointPolicy:
        """The answer for a packed tensor; only asked where ``swap_is_innermost``."""
        assert self.swap is not None
        return self.swap.for_tensor(tensor)
