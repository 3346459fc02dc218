"""``reuse_fp32_param``: one copy of the parameters in bfloat16, and two bytes each that complete it (P1, P2)."""

from __future__ import annotations

import torch

from lowtide.errors import ConfigError, explain
from lowtide.optim import residual
from lowtide.optim.swap import SwapOptimizer, swap_optimizer

__all__ = ["check_model", "reuse_fp32_param"]


def reuse_fp32_param(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, mode: residual.Mode = "exact", swap_times: int = 16
) -> SwapOptimizer:
    """Step bfloat16 parameters through float32 masters that are never kept in full (P1, P2).

    Effect: returns an optimizer over the same parameters. A master is the parameter and a residual of 16 bits; in
    ``step()`` the masters of one piece of the parameters at a time are put together, stepped in float32 by the class of
    ``optimizer``, and split again. Weights, masters and state have the bits of a loop that keeps separate float32
    masters and casts them to the parameters after each step (modes ``saturate`` and ``half_away`` say where not).
    ``state_dict()`` has the float32 masters as ``"master_param"``.

    Cost: two bytes a parameter, one bit more in mode ``exact``, where a separate master has four; a step takes a split
    and a merge more. The state stays on the device; ``lowtide.swap_optimizer(optimizer, master="residual")`` moves it.

    Hazard: see :func:`lowtide.swap_optimizer` on parameters that are edited from outside: the masters of such a piece
    are made anew from the parameter, as they are from weights that were loaded.

    Args:
        model: its parameters are those that the optimizer steps; at least one is bfloat16. Others are stepped directly.
        optimizer: an instance of any ``torch.optim`` optimizer, before or after its first step.
        mode: ``"exact"``, ``"saturate"`` or ``"half_away"``.
        swap_times: a step puts together about one part in ``4 * swap_times`` of the masters at once.

    Raises:
        ConfigError: no parameter is bfloat16, or the optimizer steps parameters of another model.
        UnsupportedError: a parameter is float16, or the optimizer's class cannot be taken apart.

    >>> import torch, lowtide
    >>> layer = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    >>> optimizer = lowtide.reuse_fp32_param(layer, torch.optim.AdamW(layer.parameters()))
    >>> layer(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state_dict()["state"][0]["master_param"].dtype
    torch.float32
    """
    check_model(model, optimizer)
    return swap_optimizer(optimizer, master="residual", residual_mode=mode, tier="device", swap_times=swap_times)


def check_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError unless the optimizer steps bfloat16 parameters of this model."""
    own = {id(p) for p in model.parameters()}
    stepped = [p for group in getattr(optimizer, "param_groups", []) for p in group["params"]]
    foreign = sum(id(p) not in own for p in stepped)
    if foreign:
        raise _refused(
            "the optimizer steps parameters of another model",
            "parameters of the model",
            f"{foreign} of {len(stepped)} that are not",
            "Pass the model whose parameters the optimizer was made with, after model.to(...).",
        )
    if stepped and not any(p.dtype is torch.bfloat16 for p in stepped):
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in stepped})
        raise _refused(
            "no parameter is bfloat16",
            "bfloat16 parameters, which a residual completes",
            ", ".join(kinds),
            "Convert the model first, then make the optimizer: model.to(torch.bfloat16).",
        )


def _refused(problem: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError(explain(problem, expected=expected, got=got, where="reuse_fp32_param", remedy=remedy))
