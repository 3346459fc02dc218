"""C54. Kind: the step is skipped (overflow) or fails half way; state must not be half moved.
Source: facebookresearch/fairscale PR 831 (scaler + host offload); hyper-parallel PR 894 (copy loop fails midway).
ENTRY "optimizer" (see C50).
Action: GradScaler loop of 6 steps, with inf in the grads of step 2 and 4; then a step whose post
hook raises once; then 2 normal steps. fused/foreach/default variants.
Right: skipped steps leave weights, moments and step counts untouched; after the failed step the
next ones work and everything equals the plain optimizer run the same way.
"""

import contextlib

import torch
from torch import nn

from .kit import DEV, check

ENTRY = "optimizer"
KIND = torch.device(DEV).type


def train(wrap_opt, **how):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(DEV)
    opt = wrap_opt(torch.optim.AdamW(m.parameters(), lr=0.05, **how))
    scaler = torch.amp.GradScaler(KIND, init_scale=16.0, growth_interval=3)
    seen = []
    for k in range(6):
        opt.zero_grad()
        scaler.scale(m(torch.randn(4, 6, device=DEV)).square().sum()).backward()
        if k in (2, 4):
            m[0].weight.grad[0, 0] = float("inf")
        scaler.step(opt)
        scaler.update()
        seen.append([scaler.get_scale(), [p.detach().clone() for p in m.parameters()]])
    gate = [True]

    def fail_once(*_):
        if gate[0]:
            gate[0] = False
            raise ValueError("asked for")

    opt.register_step_post_hook(fail_once)
    for _ in range(3):
        opt.zero_grad()
        m(torch.randn(4, 6, device=DEV)).square().sum().backward()
        with contextlib.suppress(ValueError):
            opt.step()
        seen.append([p.detach().clone() for p in m.parameters()])
    steps = [float(s["step"]) for s in opt.state_dict()["state"].values()]
    return seen, steps


def run(wrap_opt):
    for how in ({}, {"foreach": True}, {"fused": True}):
        check(train(lambda o: o, **how), train(wrap_opt, **how), str(how))
