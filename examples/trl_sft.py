"""TRL SFTTrainer: the same callback as for Trainer. TRL's own gradient checkpointing, on by default, must be off.

Needs trl, datasets and tokenizers; downloads nothing, the text is made here. Run: python examples/trl_sft.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import lowtide
from lowtide.integrations.transformers import LowtideCallback

LAYERS, WIDTH = 3, 64
PAD, END = "<pad>", "<eos>"
WORDS = [PAD, END, "the", "a", "tide", "boat", "sea", "moon", "rises", "falls", "turns", "waits", "low", "high"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=END)


def build() -> LlamaForCausalLM:
    """A small Llama with random weights."""
    torch.manual_seed(0)
    size = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), num_attention_heads=4, **size))


def train(callbacks: list[Any]) -> LlamaForCausalLM:
    """One epoch over sentences of random words."""
    torch.manual_seed(1)
    pick = torch.randint(2, len(WORDS), (16, 24)).tolist()
    texts = Dataset.from_list([{"text": " ".join(WORDS[word] for word in row)} for row in pick])
    model = build()
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            activation_checkpointing=False,  # with older transformers: gradient_checkpointing=False
            per_device_train_batch_size=4,
            num_train_epochs=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=False,
            use_cpu=not torch.accelerator.is_available(),
        )
        SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer(), callbacks=callbacks).train()
    return model


def main() -> None:
    """Train with and without the callback, and compare every weight bit by bit."""
    torch.set_num_threads(1)
    lowtide.SwapManager().configure(min_bytes=0)  # the model is tiny
    other = train([LowtideCallback(full_recompute_num_layers=LAYERS, swap_inputs=True)])
    equal = all(torch.equal(a, b) for a, b in zip(train([]).parameters(), other.parameters(), strict=True))
    print(f"weights after training bit-equal: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
