"""The text that the demonstration trains on: the sources of the Python that runs it.

Holds the corpus and its batches. Law: the same Python and the same seed give
the same bytes in the same order. Must never reach outside this machine.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "read_corpus"]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as bytes, cut into a part to train on and a part to judge by. Both are one-dimensional, uint8."""

    training: Tensor
    held_out: Tensor

    def batches(self, size: int, context: int, *, seed: int, part: str = "training") -> Batches:
        """Draw (bytes, next bytes) at random places, a batch at a time, without touching torch's own generator."""
        text = self.training if part == "training" else self.held_out
        return Batches(text, size, context, torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class Batches:
    """An endless stream of batches; see :meth:`Corpus.batches`."""

    text: Tensor
    size: int
    context: int
    generator: torch.Generator

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next bytes to read and the bytes to predict, each (size, context), int64."""
        last = self.text.numel() - self.context
        starts = torch.randint(last, (self.size,), generator=self.generator)
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


def read_corpus(folder: Path | None = None, *, held_out: float = 0.05) -> Corpus:
    """Read every ``.py`` file that lies directly in a folder, in order of their names.

    Args:
        folder: by default the standard library of the running Python, about 5 MB.
        held_out: the share of the text, taken from its end, that is not trained on.

    Raises:
        FileNotFoundError: the folder holds no Python source.
    """
    source = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    text = b"".join(path.read_bytes() for path in sorted(source.glob("*.py")))
    if not text:
        raise FileNotFoundError(f"no text to train on: expected Python sources (*.py) in {source}, got none.")
    # A bytearray, because torch warns about memory that it may not write to.
    everything = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = int(everything.numel() * (1 - held_out))
    return Corpus(everything[:cut], everything[cut:])
