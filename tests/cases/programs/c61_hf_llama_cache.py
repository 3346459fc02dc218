"""C61. Kind: key/value cache inside a recomputed layer grows twice.
Source: huggingface/transformers issue 28056; pytorch/pytorch issue 155171; shihao1895/MemoryVLA issue 18.
Model: random tiny Llama (3 layers, grouped heads), decoder layers wrapped.
Action: training step with use_cache=False; with use_cache=True; with a DynamicCache the caller
made and looks at afterwards. Labels, attention mask with padding.
Right: loss, logits and gradients equal the unwrapped twin each time, or (recompute, unless strict=True)
an error for the cache calls, never other gradients; its text should name the cache (plain torch's does
not: "size of tensor a (14) must match"); the caller's cache has exactly the prompt length after backward.
"""

# ruff: noqa: B023, BLE001, FBT002, PT017

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from .kit import DEV, same_result, twin

ENTRY = "wrap"


class Net(LlamaForCausalLM):
    @property
    def layers(self):
        return self.model.layers


def build():
    return Net(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
    ).train()


def run(wrap, link=None, strict=False):
    plain, other = twin(build, wrap, link)
    ids = torch.randint(0, 50, (2, 7), device=DEV)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    notes = {}
    for how in ("no cache", "use_cache", "own cache"):

        def action(m):
            extra = {"use_cache": how != "no cache"}
            if how == "own cache":
                extra["past_key_values"] = DynamicCache(config=m.config)
            out = m(input_ids=ids, attention_mask=mask, labels=ids, **extra)
            out.loss.backward()
            if how == "own cache":
                assert extra["past_key_values"].get_seq_length() == 7, "cache grew in the replay"
            return [out.loss.detach(), out.logits.detach()]

        try:
            same_result(plain, other, action)
            notes[how] = "equal"
        except AssertionError:
            raise
        except Exception as e:
            assert not strict and how != "no cache", e
            notes[how] = f"{type(e).__name__}: {str(e)[:60]}"
    return notes
