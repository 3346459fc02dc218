"""Lightning: swap the inputs of layers that recompute, by one callback; compare with plain training.

Needs lightning; downloads nothing. Run: python examples/lightning_trainer.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import lowtide
from lowtide.integrations.lightning import LowtideCallback

LAYERS, WIDTH, TOKENS = 4, 64, 64


class Model(lightning.LightningModule):
    """A stack of transformer layers that learns to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True) for _ in range(LAYERS)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        x = batch
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(callbacks: list[Any]) -> Model:
    """One epoch of four batches."""
    torch.manual_seed(0)
    model = Model()
    batches = DataLoader(torch.randn(16, TOKENS, WIDTH), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, batches)
    return model


def main() -> None:
    """Train with and without the callback, and compare every weight bit by bit."""
    torch.set_num_threads(1)
    lowtide.SwapManager().configure(min_bytes=0)  # the model is tiny
    plain = train([])
    other = train([LowtideCallback(full_recompute_num_layers=LAYERS, swap_inputs=True)])
    equal = all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    print(f"weights after training bit-equal: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
