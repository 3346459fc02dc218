"""C59. Kind: group calls in a wrong order or for an unknown group.
Source: mindspore-ai/hyper-parallel issue 759 (wait without launch) and PR 894 (no active group).
ENTRY "group": run(wrap, api); api has set_group, launch_offload, wait_offload, launch_load,
wait_load (each takes a group name).
Action, each on a fresh wrapped model: no call at all; wait before launch; launch twice; load without
offload; load twice; wait twice; offload after load again; calls for a name nobody registered; a
backward while the group is still on the host (nobody loads it).
Right: a clear error or a harmless no-op; if no error, gradients equal the unwrapped twin; after an
error a normal cycle on the same model still works.
"""

# ruff: noqa: B023, BLE001, E741, PT017

import torch
from torch import nn

from .kit import DEV, Chain, same_result, twin

ENTRY = "group"
O, WO, L, WL = "launch_offload", "wait_offload", "launch_load", "wait_load"
GOOD = [O, WO, L, WL]
PLANS = [
    [],
    [WO],
    [WL],
    [L],
    [L, WL],
    [O, O, WO, L, WL],
    [O, WO, WO, L, WL],
    [O, WO, L, L, WL, WL],
    [O, L, WL],
    [O, WO, L, WL, O, WO, L, WL],
    [O],
    [O, WO],
    [O, WO, L],
    [WO, O, WO, L, WL],
]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        h = self.lin(x)
        return x + h.sin() * h.sigmoid()


def run(wrap, api, link=None):
    x, notes = torch.randn(4, 6, device=DEV), {}
    for i, plan in enumerate([*PLANS, "unknown"]):
        plain, other = twin(lambda: Chain(*[Layer() for _ in range(3)]), wrap, link)

        def action(m, calls=plan):
            if m is other:
                api.set_group(f"g{i}")
            loss = m(x).square().sum()
            if m is other:
                for call in GOOD if calls == "unknown" else calls:
                    getattr(api, call)("nobody" if calls == "unknown" else f"g{i}")
            loss.backward()
            return loss.detach()

        try:
            same_result(plain, other, action)
            notes[str(plan)] = "equal"
        except AssertionError:
            raise
        except Exception as e:
            assert str(e), "error without a text"
            notes[str(plan)] = f"{type(e).__name__}: {str(e)[:50]}"
        same_result(plain, other, lambda m: action(m, GOOD))
    return notes
