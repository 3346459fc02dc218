"""C63. Kind: encoder-decoder: one encoder output feeds every decoder layer; bias is handed on.
Source: huggingface/transformers PR 11353 and PR 22036; hyper-parallel issue 664 (shared side input).
Model: random tiny T5 (2 + 2 blocks, dropout on, tied embedding); encoder and decoder blocks wrapped.
Blocks return tuples with None, and pass a position bias (with grad) from block 0 to the others.
Action: 2 steps; the caller reads encoder_last_hidden_state after backward.
Right: loss and gradients (relative-bias table too) equal the unwrapped twin with the same seed; the
encoder state keeps its values.
"""

import copy

import torch
from transformers import T5Config, T5ForConditionalGeneration

from .kit import DEV, same_result, settle, wrap_list

ENTRY = "wrap"


def run(wrap, link=None):
    torch.manual_seed(0)
    plain = (
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=40,
                d_model=16,
                d_kv=4,
                d_ff=32,
                num_layers=2,
                num_decoder_layers=2,
                num_heads=4,
                dropout_rate=0.2,
                decoder_start_token_id=0,
            )
        )
        .to(DEV)
        .train()
    )
    other = copy.deepcopy(plain)
    for stack in (other.encoder, other.decoder):
        wrap_list(stack.block, wrap, link)
    settle(other, wrap)

    def action(m):
        seen = []
        for n in (6, 4):
            src = torch.randint(1, 40, (2, n), device=DEV)
            tgt = torch.randint(1, 40, (2, 5), device=DEV)
            out = m(input_ids=src, labels=tgt, use_cache=False)
            enc = out.encoder_last_hidden_state
            was = enc.detach().clone()
            out.loss.backward()
            assert torch.equal(enc.detach(), was)
            seen += [out.loss.detach(), was]
        return seen

    same_result(plain, other, action)
