"""C37. Kind: code that looks through the layer breaks once it is wrapped.
Source: pytorch/pytorch PR 78854; deepspeedai/DeepSpeed issue 5383 (attributes set on the wrapper).
Model: a layer with an attribute, a property, a method and a child, and an nn.Sequential.
Action: read attribute / property / child weight / method through the wrapper; index the Sequential;
set a flag through the wrapper that forward reads; train() / eval() / to(dtype) / apply / modules() through the parent.
Right: all as on the unwrapped layer; AttributeError for a missing name (no endless recursion). len /
iteration / slicing of a wrapped Sequential is a wish (full=True), torch's own wrapper lacks it.
"""

# ruff: noqa: FBT002

import torch
from torch import nn

from .kit import DEV

ENTRY = "wrap"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.kind, self.loud = nn.Linear(4, 4), "attn", False

    @property
    def width(self):
        return self.lin.out_features

    def helper(self, k):
        return k * self.width

    def forward(self, x):
        y = self.lin(x)
        return y * 10 if self.loud else y


def run(wrap, link=None, full=False):
    raw = Layer().to(DEV)
    m = wrap(raw)
    assert m.kind == "attn" and m.width == 4 and m.helper(3) == 12
    assert m.lin.weight is raw.lin.weight
    for missing in ("nope", "_nope"):
        try:
            getattr(m, missing)
        except AttributeError:
            continue
        raise AssertionError("missing attribute was found")
    x = torch.randn(2, 4, device=DEV)
    calm = m(x).detach()
    raw.loud = True
    torch.testing.assert_close(m(x).detach(), calm * 10)
    raw.loud, m.loud = False, True
    through = torch.allclose(m(x).detach(), calm * 10)
    seq = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(DEV)
    w = wrap(seq)
    assert w[0] is seq[0]
    if full:
        assert len(w) == 3 and list(w) == list(seq)
        assert w[1:](torch.ones(1, 4, device=DEV)).shape == (1, 2)
    parent = nn.ModuleList([w]).eval()
    assert not seq[0].training
    parent.train().to(torch.float64)
    assert seq[0].weight.dtype == torch.float64
    assert sum(isinstance(k, nn.Linear) for k in parent.modules()) == 2
    return {"setting an attribute through the wrapper reaches forward": through}
