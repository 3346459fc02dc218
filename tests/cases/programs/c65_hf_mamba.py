"""C65. Kind: scan-style layers: in-place writes, slices and views of one big projection are saved.
Source: modelscope/ms-swift PR 10157; pytorch/torchtitan PR 3513 (views of a base that is moved).
Model: random tiny Mamba, 3 blocks wrapped (slow pure-torch path: many saved slices of few storages).
Action: 2 steps; the second with another length.
Right: loss and gradients (A_log, D, conv, dt bias) equal the unwrapped twin. With host_bytes: host
bytes after forward are below 1.2 x the bytes of the distinct storages that plain autograd keeps.
"""

import copy

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import MambaConfig, MambaForCausalLM

from .kit import DEV, same_result, settle, wrap_list

ENTRY = "wrap"


def run(wrap, link=None, host_bytes=None):
    torch.manual_seed(0)
    plain = (
        MambaForCausalLM(
            MambaConfig(
                vocab_size=30,
                hidden_size=12,
                state_size=4,
                num_hidden_layers=3,
                conv_kernel=3,
                expand=2,
                time_step_rank=3,
                use_cache=False,
            )
        )
        .to(DEV)
        .train()
    )
    other = copy.deepcopy(plain)
    wrap_list(other.backbone.layers, wrap, link)
    settle(other, wrap)
    seen, distinct = {}, {}
    skip = {p.untyped_storage().data_ptr() for p in plain.parameters()}

    def note(t):
        s = t.untyped_storage()
        if s.data_ptr() not in skip:
            distinct[s.data_ptr()] = s.nbytes()
        return t

    def action(m):
        losses = []
        for n in (6, 9):
            ids = torch.randint(0, 30, (2, n), device=DEV)
            if m is plain:
                distinct.clear()
                with saved_tensors_hooks(note, lambda t: t):
                    loss = m(input_ids=ids, labels=ids).loss
            else:
                loss = m(input_ids=ids, labels=ids).loss
                if host_bytes is not None:
                    seen["host"] = host_bytes()
            loss.backward()
            losses.append(loss.detach())
        return losses

    same_result(plain, other, action)
    seen["distinct"] = sum(distinct.values())
    assert seen.get("host", 0) <= 1.2 * seen["distinct"], seen
    return seen
