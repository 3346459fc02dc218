"""A loop of one's own over a Hugging Face model: memory_enable instead of gradient_checkpointing_enable.

Needs transformers; downloads nothing. Run: python examples/hf_plain_loop.py
"""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import lowtide
from lowtide.integrations.transformers import memory_enable

LAYERS, WIDTH, TOKENS, WORDS, STEPS = 4, 64, 64, 100, 3
# What would be in a configuration file, beside gradient_checkpointing_kwargs.
MEMORY = {"recompute_method": "block", "full_recompute_num_layers": LAYERS, "swap_inputs": True}


def build() -> Qwen3ForCausalLM:
    """A small Qwen3 with random weights."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    ).train()


def train(model: Qwen3ForCausalLM) -> list[torch.Tensor]:
    """A few steps; the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        words = torch.randint(WORDS, (4, TOKENS))
        loss = model(input_ids=words, labels=words, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def main() -> None:
    """Train with and without, and compare the losses bit by bit."""
    torch.set_num_threads(1)
    lowtide.SwapManager().configure(min_bytes=0)  # the model is tiny
    plain = train(build())
    model = build()
    applied = memory_enable(model, MEMORY)
    print(applied)
    other = train(model)
    print(lowtide.report(model))
    applied.undo()
    equal = all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    print(f"losses bit-equal: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
