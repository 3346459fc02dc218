"""The main job: a real GPT trained in every memory mode, with what each mode costs and saves.

Read in this order: :mod:`~lowtide.demo.modes` (all that a training script has
to add), :mod:`~lowtide.demo.model`, :mod:`~lowtide.demo.train`. Law: the
demonstration uses the public names of lowtide and nothing else, as any user
would.
"""

from __future__ import annotations

from lowtide.demo.comparison import run
from lowtide.demo.model import Shape
from lowtide.demo.train import Settings

__all__ = ["Settings", "Shape", "run"]
