"""C52. Kind: saving / loading optimizer state while it lives on the host.
Source: NovaSky-AI/SkyRL PR 1403 (step counter, classes in the file); bitsandbytes PR 1344 and Megatron-LM
PR 4638 (load puts state on the device); KempnerForge PR 115; hyper-parallel PR 894.
ENTRY "optimizer" (see C50).
Action: 3 steps; state_dict through torch.save / torch.load(weights_only=True); 2 more steps; a new
wrapped optimizer loads the file and repeats the 2 steps; a plain one does too (file is portable);
a plain file is loaded by a wrapped one; state_dict is taken again right after load, before a step.
Right: all end weights equal; every tensor in the dict has its full shape, real storage and right
values; step counts survive. (Storages that come from torch.load cannot be resized on the host).
"""

import io

import torch
from torch import nn

from .kit import DEV, check

ENTRY = "optimizer"


def keep(o):
    return o


def make(wrap_opt, weights=None):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(DEV)
    if weights:
        m.load_state_dict(weights)
    return m, wrap_opt(torch.optim.AdamW(m.parameters(), lr=0.05, amsgrad=True))


def steps(m, opt, ks):
    for k in ks:
        opt.zero_grad()
        m(torch.linspace(-1, k, 18, device=DEV).view(3, 6)).square().sum().backward()
        opt.step()
    return [p.detach().clone() for p in m.parameters()]


def through_file(sd):
    for s in sd["state"].values():
        assert all(t.numel() * t.element_size() <= t.untyped_storage().nbytes() for t in s.values()), "empty"
    box = io.BytesIO()
    torch.save(sd, box)
    return torch.load(io.BytesIO(box.getvalue()), weights_only=True, map_location="cpu")


def run(wrap_opt):
    files, ends, weights = [], [], None
    for way in (keep, wrap_opt):
        m, opt = make(way)
        steps(m, opt, (0, 1, 2))
        weights = {k: v.clone() for k, v in m.state_dict().items()}
        files.append(through_file(opt.state_dict()))
        ends.append(steps(m, opt, (3, 4)))
    check(files[0]["state"], files[1]["state"], "state in file")
    for way, sd in ((wrap_opt, files[1]), (keep, files[1]), (wrap_opt, files[0])):
        m, opt = make(way, weights)
        opt.load_state_dict(through_file(sd))
        check(files[0]["state"], through_file(opt.state_dict())["state"], "state after load")
        ends.append(steps(m, opt, (3, 4)))
    for e in ends[1:]:
        check(ends[0], e, "weights")
