"""Hugging Face Trainer: swap attention and recompute activation functions by one callback; compare with plain training.

Needs transformers and accelerate; downloads nothing. Run: python examples/hf_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import lowtide
from lowtide.integrations.transformers import LowtideCallback

LAYERS, WIDTH, TOKENS, WORDS = 4, 64, 64, 100


def build() -> LlamaForCausalLM:
    """A small Llama with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def texts() -> list[dict[str, torch.Tensor]]:
    """Sequences of random words, which are their own labels."""
    torch.manual_seed(1)
    rows = [torch.randint(WORDS, (TOKENS,)) for _ in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(callbacks: list[Any]) -> LlamaForCausalLM:
    """Two epochs, with evaluation after each."""
    model = build()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            num_train_epochs=2,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
        )
        Trainer(model, arguments, train_dataset=texts(), eval_dataset=texts()[:4], callbacks=callbacks).train()
    return model


def main() -> None:
    """Train with and without the callback, and compare every weight bit by bit."""
    torch.set_num_threads(1)
    lowtide.SwapManager().configure(min_bytes=0)  # the model is tiny
    plain = train([])
    other = train([LowtideCallback(swap_attention=True, recompute_activation_function=True)])
    print(lowtide.SwapManager().traffic)
    equal = all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    print(f"weights after training bit-equal: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
