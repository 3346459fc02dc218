"""C58. Kind: shared bf16 / float32 weight storage drifts from real master weights in training.
Source: NVIDIA/apex issue 1842; NVIDIA/TransformerEngine PR 1408; stale copies: Megatron-LM PR 5071.
ENTRY "share_storage": run(share); share(list of float32 tensors) -> object with to_bf16() (before
forward), to_fp32() (before the optimizer step; each returns the list of tensors in that form).
Action: 30 AdamW steps with tiny lr (updates below bf16 resolution) of a 2-layer net computed in
bf16; gradient clipping; a load of new float32 weights at step 15 (in float32 form); to_bf16 and
to_fp32 called twice in a row on some steps.
Right: losses and float32 weights equal, bit for bit, a run that keeps separate float32 masters (the
data is chosen so that no weight ever sits on a rounding tie, see C57; this is asserted).
"""

import torch

from .kit import DEV, check

ENTRY = "share_storage"


class Plain:
    def __init__(self, masters):
        self.masters = masters

    def to_fp32(self):
        return self.masters

    def to_bf16(self):
        for m in self.masters:
            assert not bool(((m.detach().view(torch.int32) & 0xFFFF) == 0x8000).any()), "tie in the data"
        return [m.to(torch.bfloat16) for m in self.masters]


def train(share):
    g = torch.Generator("cpu").manual_seed(0)

    def make(*s):
        return torch.randn(*s, generator=g).to(DEV)

    shared = share([make(8, 6) * 0.3, make(8), make(2, 8) * 0.3])
    masters = [m.requires_grad_() for m in shared.to_fp32()]
    opt = torch.optim.AdamW(masters, lr=1e-5)
    losses = []
    for k in range(30):
        half = [h.detach().requires_grad_() for h in shared.to_bf16()]
        if k % 4 == 0:
            half = [h.detach().requires_grad_() for h in shared.to_bf16()]
        h = torch.tanh(make(5, 6).bfloat16() @ half[0].t() + half[1])
        loss = (h @ half[2].t()).float().square().mean()
        grads = torch.autograd.grad(loss, half)
        masters = shared.to_fp32() if k % 3 else (shared.to_fp32(), shared.to_fp32())[1]
        for p, gr in zip(opt.param_groups[0]["params"], grads, strict=True):
            p.grad = gr.float()
        torch.nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 1.0)
        opt.step()
        if k == 15:
            with torch.no_grad():
                for m in masters:
                    m.copy_(torch.linspace(-0.5, 0.5, m.numel(), device=DEV).view_as(m))
        losses.append(loss.detach())
    return losses, [m.detach().clone() for m in shared.to_fp32()]


def run(share):
    check(train(Plain), train(share))
