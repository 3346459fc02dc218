"""LoRA with peft: only adapters train, and what attention saves for them moves to the lower tier.

Needs transformers and peft; downloads nothing. Run: python examples/hf_peft_lora.py
"""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.integrations.transformers import memory_enable

LAYERS, WIDTH, TOKENS, WORDS, STEPS = 4, 64, 64, 100, 3


def build() -> PeftModel:
    """A small Llama with random weights, frozen, and adapters with dropout in its attention."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
        )
    )
    return get_peft_model(base, LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))


def train(model: PeftModel) -> list[torch.Tensor]:
    """A few steps; the adapters afterwards."""
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    torch.manual_seed(1)
    for _ in range(STEPS):
        words = torch.randint(WORDS, (4, TOKENS))
        loss = model(input_ids=words, labels=words, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach() for p in adapters]


def main() -> None:
    """Train with and without, and compare the adapters bit by bit."""
    torch.set_num_threads(1)
    lowtide.SwapManager().configure(min_bytes=0)  # the model is tiny
    plain = train(build())
    model = build()
    with_memory = memory_enable(model, swap_attention=True, swap_attention_recompute_num_layers=2)
    print(with_memory)
    other = train(model)
    print(lowtide.SwapManager().traffic)
    with_memory.undo()
    equal = all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    print(f"adapters after training bit-equal: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
