"""Two steps of a small GPT that recomputes and swaps, on whatever device there is, a simulated one included.

Run: python examples/simulate_training.py
Or:  lowtide simulate examples/simulate_training.py --device h100-80gb
"""

from __future__ import annotations

import torch
from torch import nn

import lowtide

torch.set_num_threads(1)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def train(*, wrapped: bool) -> list[float]:
    """Losses of two steps from a fixed seed."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256)).to(device)
    if wrapped:
        for layer in layers:
            lowtide.checkpoint_wrapper(layer, lowtide.swap_matmuls_and_attention(), swap_inputs=True)
        lowtide.auto(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    tokens = torch.randint(0, 256, (4, 129)).to(device)
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


print(f"losses bit-equal: {train(wrapped=False) == train(wrapped=True)}; {lowtide.SwapManager().traffic} on {device}")
