"""Lightning: a callback for ``Trainer.fit``.

Law: with the callback a run's bits are those of the run without it.
"""

from __future__ import annotations

from typing import Any

from lowtide.errors import UnsupportedError
from lowtide.integrations.session import TrainingCallback, base_class, joined

__all__ = ["LowtideCallback"]


def _callback_base() -> type:
    try:
        return base_class("lightning.pytorch.Callback", "lightning")
    except UnsupportedError:
        return base_class("pytorch_lightning.Callback", "lightning")  # its older name


class LowtideCallback(TrainingCallback):
    """A Lightning ``Callback`` that applies a memory configuration while ``Trainer.fit`` runs.

    Effect: ``lowtide.apply`` to the LightningModule when fitting begins, undone
    when it ends or raises; bits stay the same. Cost: that of the regions.

    Args:
        config: a ``MemoryConfig``, or a mapping of its fields.
        report: gets the table of layers and the bytes of every region once, after the first batch, on the main
            process; None says nothing.
        fields: the fields of the configuration as keywords, instead of ``config``.

    Raises:
        ConfigError: no configuration, two of them, or one that cannot be met.
        WrapError: something in the layers is wrapped, or the model recomputes by itself, when fitting begins.
        UnsupportedError: lightning is not installed.

    >>> import pytest; _ = pytest.importorskip("lightning")
    >>> LowtideCallback({"recompute_activation_function": True}).applied is None
    True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> LowtideCallback:  # noqa: PYI034 - Self is not in Python 3.10
        """An instance that is a Lightning ``Callback``, too."""
        made: LowtideCallback = object.__new__(joined(cls, _callback_base()))
        return made

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Apply the configuration to the module that trains."""
        self._session.begin(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the first batch: the report."""
        self._session.step_ended(pl_module, tells=bool(trainer.is_global_zero))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the model back as it was."""
        self._session.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Fitting raised: put the model back as well."""
        self._session.end()
